"""What a chapter is about: the runs on one data set, who is compared with whom, and their numbers, read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures.page_tables import Table
from perturbdiff.reporting.figures.perturbation_table import PerturbationTable
from perturbdiff.reporting.figures.svg import Look, Plot
from perturbdiff.reporting.loading.comparison import families, ranks
from perturbdiff.reporting.loading.de_tables import Effects, Side, effects, paired_sides, top_genes
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.metric_columns import (
    PDCORR,
    Column,
    key_columns,
    main_columns,
    metric_columns,
    named,
    score_table,
)
from perturbdiff.reporting.loading.results import Run
from perturbdiff.runtime.errors import UserError, listing, nearest

TOP_PERTURBATIONS = 6
TOP_GENES = 12


@dataclass
class Section:
    """A heading with what stands below it, in this order: intro, links, legend, figures, tables, note, parts.

    Attributes
    ----------
    title, anchor
        Heading and the id that links lead to. The anchor starts with the chapter's.
    link
        What the contents bar says instead of a long title.
    intro, note
        Sentences above and below.
    links
        Pairs of words and an anchor elsewhere on the page.
    legend
        Pairs of a colour of the figures and what it stands for.
    figures
        Figures with their captions.
    tables
        Tables, a title of theirs stands above each.
    listing
        The table of all conditions, below the others.
    folded
        Whether the section is closed until the reader opens it.
    short
        Whether it is printed although it is folded.
    small
        Whether the figures stand in narrow columns.
    beside
        Whether the tables stand beside the figures where the page is wide.
    parts
        Sections within this one.
    """

    title: str
    anchor: str
    link: str = ""
    intro: str = ""
    links: list[tuple[str, str]] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    figures: list[tuple[Plot, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    listing: PerturbationTable | None = None
    note: str = ""
    folded: bool = False
    short: bool = False
    small: bool = False
    beside: bool = False
    parts: list[Section] = field(default_factory=list)

    @property
    def filled(self) -> bool:
        """Return whether there is anything to show."""
        return bool(self.figures or self.tables or self.listing or any(part.filled for part in self.parts))


def drawn(sections: Sequence[Section]) -> Iterator[Plot]:
    """Yield the figures of sections and of the sections within them, in the order of the page."""
    for section in sections:
        yield from (plot for plot, _ in section.figures)
        yield from drawn(section.parts)


@dataclass
class ChapterData:
    """The runs on one data set: models, external methods, built-in baselines, ceilings, and what failed.

    Attributes
    ----------
    anchor
        Start of the ids and file names of this chapter.
    focus, other
        The method the chapter is about, and whom it is compared with condition by condition.
    absent
        Methods without scores.
    """

    anchor: str
    runs: Sequence[Run]
    look: Mapping[str, Look]
    focus: Run
    other: Run | None
    absent: Sequence[FailedRun] = ()
    _values: dict[tuple[str, str], pd.Series] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the data set."""
        return self.focus.dataset

    @cached_property
    def ranked(self) -> list[Run]:
        """Return the runs that compete: all but the ceilings."""
        return competing(self.runs)

    @cached_property
    def ceilings(self) -> list[Run]:
        """Return the runs of one half of the real cells against the other."""
        return [r for r in self.runs if r.kind == "ceiling" and not r.is_reference]

    @cached_property
    def worth(self) -> dict[str, tuple[str, str]]:
        """Return what the calibration of the data set says of each metric, and why; empty without one."""
        return next((run.worth for run in (self.focus, *self.ranked) if run.worth), {})

    @cached_property
    def every(self) -> list[Column]:
        """Return all metrics that any run holds."""
        return metric_columns(self.runs)

    @cached_property
    def main(self) -> list[Column]:
        """Return the metrics of the score table."""
        return main_columns(self.every) or self.every

    @cached_property
    def key(self) -> list[Column]:
        """Return the few metrics that stand for the others in figures."""
        return key_columns(self.every)

    def panels(self, most: int) -> list[Run]:
        """Return the runs that get a panel of their own: focus, opponent, ceilings, then the others, best first."""
        first = [self.focus, *([self.other] if self.other else []), *self.ceilings]
        metric = named(self.every, PDCORR) or self.every[0]
        score = {r.method: r.score(metric.name)[0] for r in self.runs}
        rest = [r for r in self.runs if r not in first and not r.is_reference]
        rest.sort(key=lambda r: -np.nan_to_num(score[r.method], nan=-np.inf))
        return list(dict.fromkeys([*first, *rest]))[:most]

    def values(self, run: Run, metric: str) -> pd.Series:
        """Return one metric per condition, see `Run.values`."""
        key = run.method, metric
        if key not in self._values:
            self._values[key] = run.values(metric)
        return self._values[key]

    @property
    def effects(self) -> dict[str, Effects]:
        """Return the summary of the DE tables of every run that holds them."""
        return self._read[0]

    @property
    def genes(self) -> list[pd.DataFrame]:
        """Return the strongest DE genes, see `top_genes`. Columns for the focus and its opponent."""
        return self._read[1]

    @property
    def sides(self) -> dict[str, tuple[Side, Side]]:
        """Return the real and predicted test results of the focus and its opponent, as far as they are known."""
        return self._read[2]

    @cached_property
    def _read(self) -> tuple[dict[str, Effects], list[pd.DataFrame], dict[str, tuple[Side, Side]]]:
        """Read each run's DE tables once and keep only what figures need."""
        found: dict[str, Effects] = {}
        kept: dict[str, tuple[Side, Side]] = {}
        for run in self.runs:
            if (sides := paired_sides(run)) is None:
                continue
            found[run.method] = effects(*sides, run.alpha)
            if run in (self.focus, self.other):
                kept[run.method] = sides
        if self.focus.method not in kept:
            return found, [], kept
        predicted = [(method, side) for method, (_, side) in kept.items()]
        real = kept[self.focus.method][0]
        predicted.sort(key=lambda item: item[0] != self.focus.method)
        top = top_genes(real, predicted, self.focus.alpha, perturbations=TOP_PERTURBATIONS, genes=TOP_GENES)
        return found, top, kept


def competing(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that are ranked: all but ceilings, unless there is nothing else."""
    return [r for r in runs if r.kind != "ceiling"] or list(runs)


def subject(
    anchor: str,
    runs: Sequence[Run],
    look: Mapping[str, Look],
    against: str | None,
    absent: Sequence[FailedRun] = (),
) -> ChapterData:
    """Return what a chapter on these runs of one data set is about.

    Raises
    ------
    UserError
        If ``against`` was not run on this data set.
    """
    ranked = competing(runs)
    return ChapterData(anchor, runs, look, ranked[0], opponent(ranked, against), absent)


def opponent(ranked: Sequence[Run], against: str | None) -> Run | None:
    """Choose whom to compare the first run with: as asked, else nearest-context, else the best other by PDCorr."""
    focus = ranked[0]
    others = {r.method: r for r in ranked if r is not focus}
    if against is not None:
        if (named_run := next((r for r in others.values() if against in r.names), None)) is not None:
            return named_run
        if against not in focus.names:
            hint = nearest(against, others)
            raise UserError(f"no run of '{against}' on {focus.dataset}{hint} methods: {listing(others)}")
    usual = next((r for r in others.values() if r.baseline == "nearest-context"), None)
    if not others or usual is not None:
        return usual
    same_method = next(f.runs for f in families(ranked) if focus in f.runs)
    others = {m: r for m, r in others.items() if r not in same_method} or others  # rather than another seed
    columns = metric_columns(ranked)
    metric = named(columns, PDCORR) or columns[0]
    table = pd.Series(score_table(list(others.values()), [metric])[metric.name])
    return others[str(ranks(table, metric.direction).fillna(np.inf).idxmin())]
