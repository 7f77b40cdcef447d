"""The page's chapter on an experiment: the figures asked for, tables of arms, and published numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from perturbdiff.reporting.experiments import arm_tables, curve_sections, published_numbers
from perturbdiff.reporting.experiments import bar_sections as sections
from perturbdiff.reporting.experiments.arm_design import Entry, default_design, read_design
from perturbdiff.reporting.experiments.experiment import Experiment, experiment
from perturbdiff.reporting.experiments.published_numbers import read_published
from perturbdiff.reporting.experiments.run_groups import works
from perturbdiff.reporting.figures.svg import Plot
from perturbdiff.reporting.figures.trained_models import bundles_of
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.chapter_data import Section, drawn
from perturbdiff.reporting.sections.chapters import Chapter
from perturbdiff.runtime.errors import UserError, nearest

_LINKED = ("glance", "duels", "genes")

FIGURES: dict[str, Callable[[Experiment], Section]] = {
    "main": sections.main,
    "zeroshot": curve_sections.zeroshot,
    "fewshot": sections.fewshot,
    "steps": curve_sections.steps,
    "scaling": curve_sections.scaling,
    "ablation": sections.ablation,
    "variants": sections.variants,
    "guidance": sections.guidance,
}
"""What each figure is drawn by."""


@dataclass(frozen=True, eq=False)
class ExperimentChapter:
    """What the page says of the experiment as a whole, before its data sets."""

    facts: str
    found: Experiment
    sections: list[Section] = field(default_factory=list)

    @property
    def plots(self) -> list[Plot]:
        """Return all figures, for export."""
        return list(drawn(self.sections))


def figure_names(text: str) -> list[str]:
    """Return the names in a comma-separated list, each once.

    Raises
    ------
    UserError
        If one is not known.
    """
    names = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    for name in names:
        if name not in FIGURES:
            raise UserError(f"no figure '{name}'{nearest(name, FIGURES)}; figures: {', '.join(FIGURES)}")
    return names


def chapter(
    experiment: Experiment, names: Sequence[str], papers: pd.DataFrame | None, *, arms: bool
) -> ExperimentChapter | None:
    """Return the chapter, or None if there is nothing to show.

    Parameters
    ----------
    found
        The experiment.
    names
        Figures to draw, see `FIGURES`.
    papers
        See `read_published`.
    arms
        Whether tables of arms are shown: an experiment without a design has none of its own.
    """
    made = [FIGURES[name](experiment) for name in names]
    if arms:
        made += _tables(experiment)
    if papers is not None and (tables := published_numbers.beside(papers, experiment.groups)):
        made.append(
            Section("Beside the published numbers", "x-published", tables=tables, note=published_numbers.NOTE)
        )
    made = [section for section in made if section.filled or section.note or section.links]
    return ExperimentChapter(_facts(experiment), experiment, made) if made else None


def _tables(experiment: Experiment) -> list[Section]:
    means = Section("Arms", "x-arms", note=arm_tables.ABOUT)
    gaps = Section("Differences between arms", "x-differences", note=arm_tables.GAPS, folded=True)
    for estimates in experiment.groups:
        for names, what in ((arm_tables.SCORES, "scores"), (arm_tables.REALISM, "are the cells real?")):
            if (table := arm_tables.arms(estimates, names, what)) is not None:
                means.tables.append(table)
        if (
            table := arm_tables.differences(estimates, (*arm_tables.SCORES, *arm_tables.REALISM))
        ) is not None:
            gaps.tables.append(table)
    return [section for section in (means, gaps) if section.tables]


def _facts(experiment: Experiment) -> str:
    """Say on what the chapter rests."""
    lines = [line for _, line in experiment.lines]
    arms = {line.arm for line in lines if line.kind != "ceiling"}
    datasets = {name for x in experiment.groups for name in x.group.datasets}
    runs = sum(len(line.entries) for line in lines)
    lost = sum(line.missing for line in lines)
    seeds = {e.seed for line in lines if line.kind == "model" for e in line.entries}
    counts = [(len(arms), "arm"), (len(datasets), "data set"), (len(seeds), "seed"), (runs, "run")]
    words = [f"{n:,} {what}{'s' * (n != 1)}" for n, what in counts]
    return " · ".join([*words, *([f"{lost} failed"] if lost else [])])


@dataclass(frozen=True, eq=False)
class ExperimentRequest:
    """Inputs of the chapter on an experiment, read and checked.

    Attributes
    ----------
    entries
        Entries of the design. Empty if there is no design.
    figures
        Names of the figures to draw.
    papers
        See `read_published`.
    """

    entries: Sequence[Entry] = ()
    figures: Sequence[str] = ()
    papers: pd.DataFrame | None = field(default=None, repr=False)

    @property
    def arms(self) -> set[str]:
        """Return the arms of the design."""
        return {entry.arm for entry in self.entries}

    def rival(self, against: str | None, dataset: str) -> str | None:
        """Return the method that ``against`` means on a data set: an arm's first run there, else as it is.

        None if the arm has no run there: the data set is then compared as without a wish.
        """
        if against is None or against not in self.arms:
            return against
        there = [e.method for e in self.entries if e.run and (e.arm, e.dataset) == (against, dataset)]
        return there[0] if there else None

    def chapter(
        self,
        runs: Sequence[Run],
        against: str | None,
        records: Sequence[Path],
        bundles: Sequence[Path],
        chapters: Sequence[Chapter],
    ) -> ExperimentChapter | None:
        """Return the chapter, None if nothing was asked for or nothing is there.

        Parameters
        ----------
        against
            Reference of differences, if it is an arm.
        records, bundles
            Records of predictions and bundles, for parameters and work, read only if a figure shows them.
        chapters
            Chapters of the data sets, for links.
        """
        entries = self.entries or (default_design(runs) if self.papers is not None else ())
        if not entries:
            return None
        drawn = bundles_of(runs, records, bundles) if "scaling" in self.figures else {}
        there = {
            c.name: [(s.title, s.anchor) for s in c.sections if s.anchor.endswith(_LINKED)] for c in chapters
        }
        result = experiment(entries, against if against in self.arms else None, works(drawn), there)
        return chapter(result, self.figures, self.papers, arms=bool(self.entries))


def ask(runs: Sequence[Run], design: Path | None, figures: str, published: Path | None) -> ExperimentRequest:
    """Read what was asked for.

    Raises
    ------
    UserError
        If a table is not what it should be, a figure is not known, or figures are asked for without a design.
    """
    names = figure_names(figures)
    if names and design is None:
        raise UserError(
            "--figures needs --design: a table that says which run stands for what (docs/report.md)"
        )
    entries = () if design is None else read_design(design, runs)
    return ExperimentRequest(entries, names, None if published is None else read_published(published))
