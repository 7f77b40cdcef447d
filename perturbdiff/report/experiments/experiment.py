"""An experiment as figures and tables see it: groups with their estimates, looks of arms, and what sizes are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from perturbdiff.report.experiments.arm_design import Entry
from perturbdiff.report.experiments.arm_estimates import Estimates
from perturbdiff.report.experiments.run_groups import Line, groups
from perturbdiff.report.experiments.training_work import Work
from perturbdiff.report.figures.svg import Look, looks
from perturbdiff.report.loading.metric_columns import Column, metric_columns
from perturbdiff.report.loading.results import Run
from perturbdiff.runtime.errors import UserError, listing


@dataclass(frozen=True, eq=False)
class Experiment:
    """All groups of an experiment.

    Attributes
    ----------
    groups
        Collections × parts, in the order of the design.
    look
        How arms are drawn, by name.
    works
        Parameters and operations behind runs, where their bundles were given.
    chapters
        Data sets, and of each what its chapter on the page holds: words and anchors.
    """

    groups: Sequence[Estimates]
    look: Mapping[str, Look]
    works: Mapping[Run, Work] = field(default_factory=dict)
    chapters: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> list[Column]:
        """Return the metrics that any run holds, in the catalogue's order."""
        return metric_columns([e.run for _, line in self.lines for e in line.entries if e.run is not None])

    def name(self, estimates: Estimates) -> str:
        """Return what a group is called in figures: its collection, with the part only where there are both."""
        parts = {one.group.part for one in self.groups}
        return estimates.group.title if len(parts) > 1 else estimates.group.collection

    @property
    def lines(self) -> Iterator[tuple[Estimates, Line]]:
        """Yield every line with its group."""
        for estimates in self.groups:
            for line in estimates.group.lines:
                yield estimates, line


def experiment(
    entries: Sequence[Entry],
    against: str | None = None,
    works: Mapping[Run, Work] | None = None,
    chapters: Mapping[str, Sequence[tuple[str, str]]] | None = None,
) -> Experiment:
    """Return the experiment that a design's entries make.

    Parameters
    ----------
    entries
        See `read_design`.
    against
        The arm that differences are to; default: the first one of each group.
    works, chapters
        See `Experiment`.

    Raises
    ------
    UserError
        If no arm is called ``against``.
    """
    found = [Estimates(group, against) for group in groups(entries)]
    lines = [line for estimates in found for line in estimates.group.lines]
    arms = list(dict.fromkeys(line.arm for line in lines))
    if against is not None and against not in arms:
        raise UserError(f"no arm '{against}' to compare with; arms: {listing(arms)}")
    order = sorted(arms, key=lambda arm: any(x.kind == "baseline" for x in lines if x.arm == arm))
    ceilings = [arm for arm in arms if any(x.kind == "ceiling" for x in lines if x.arm == arm)]
    look = looks([arm for arm in order if arm not in ceilings], ceilings)
    return Experiment(found, look, works or {}, chapters or {})
