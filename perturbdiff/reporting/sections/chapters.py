"""The report's chapter on one data set: its sections and its warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perturbdiff.reporting.figures.perturbation_table import PerturbationTable, perturbations
from perturbdiff.reporting.figures.svg import Look, Plot
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.cell_sections import set_scores
from perturbdiff.reporting.sections.chapter_data import ChapterData, Section, drawn, subject
from perturbdiff.reporting.sections.gene_sections import distinct, genes
from perturbdiff.reporting.sections.overview import Overview, overview
from perturbdiff.reporting.sections.reference_sections import predictability
from perturbdiff.reporting.sections.score_sections import duels, further, glance


@dataclass
class Chapter:
    """Everything the page says about one data set."""

    name: str
    anchor: str
    focus: str
    other: str | None
    about: ChapterData
    overview: Overview
    sections: list[Section] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def plots(self) -> list[Plot]:
        """Return all figures, for export."""
        return [*(picture.plot for picture in self.overview.cells), *drawn(self.sections)]

    @property
    def listing(self) -> PerturbationTable | None:
        """Return the table whose rows open cards."""
        return next((section.listing for section in self.sections if section.listing is not None), None)


def chapter(
    number_: int,
    runs: Sequence[Run],
    look: Mapping[str, Look],
    against: str | None,
    absent: Sequence[FailedRun] = (),
) -> Chapter:
    """Build the chapter on one data set from its runs (in the order of `read_runs`) and from what failed.

    Raises
    ------
    UserError
        If ``against`` was not run on this data set, or a table of a run cannot be read.
    """
    about = subject(f"d{number_}", runs, look, against, absent)
    focus, other = about.focus, about.other
    warnings = _warnings(runs)
    screen = overview(about, warnings)
    listing = _listing(about, screen)
    made = (
        glance(about),
        duels(about),
        listing,
        genes(about),
        distinct(about),
        set_scores(about),
        predictability(about),
        further(about),
    )
    return Chapter(
        about.name,
        about.anchor,
        focus.method,
        None if other is None else other.method,
        about,
        screen,
        [section for section in made if section.filled or section.intro],
        warnings,
    )


def _listing(about: ChapterData, screen: Overview) -> Section:
    """Return the section with the table of all conditions."""
    pictures = {picture.condition: f"fig-{picture.plot.name}" for picture in screen.cells}
    found = perturbations(about.anchor, about.runs, about.focus, about.other, about.sides, pictures)
    return Section("Perturbations", f"{about.anchor}-perturbations", listing=found)


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Say what makes the runs of one data set less than comparable."""
    warnings = []
    name = runs[0].dataset
    definitions = sorted({r.definition for r in runs})
    if len(definitions) > 1:
        warnings.append(
            f"{name}: the metrics were computed by different definitions ({', '.join(definitions)})."
        )
    truths = {
        str(entry.get("sha256"))
        for r in runs
        if isinstance(entry := (r.manifest.get("inputs") or {}).get("truth"), dict)
    }
    if len(truths) > 1:
        warnings.append(f"{name}: the runs were scored against different truths.")
    ways = {r.made_by.controls for r in runs} - {None}
    if len(ways) > 1:
        balanced = [r.method for r in runs if r.made_by.controls == "balanced"]
        warnings.append(
            f"{name}: {', '.join(balanced)} started from balanced control cells, other methods did not. So "
            "their energy distances are too low beside the others' (docs/metrics.md)."
        )
    reported = {r.method for r in runs if any(f.get("kind") == "controls" for f in r.findings)}
    replaced = {r.method: r.summary.get("control_groups_replaced") for r in runs if r.method not in reported}
    warnings += [
        f"{name}: {method} came with other control cells in {groups} groups. The real ones were used."
        for method, groups in replaced.items()
        if groups
    ]
    sets = {r.method: frozenset(_perturbations(r)) for r in runs if r.kind != "ceiling"}
    if len(set(sets.values())) > 1:
        sizes = ", ".join(f"{m} {len(s)}" for m, s in sets.items())
        warnings.append(
            f"{name}: the methods were scored on different perturbations ({sizes}). Compare with care."
        )
    return warnings


def _perturbations(run: Run) -> list[str]:
    return sorted(set(run.pooled["perturbation"]))
