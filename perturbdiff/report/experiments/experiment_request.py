"""What a report was asked to show of an experiment: design, figures, published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from perturbdiff.report.experiments.arm_design import Entry, default_design, read_design
from perturbdiff.report.experiments.experiment import experiment
from perturbdiff.report.experiments.experiment_chapter import ExperimentChapter, chapter, figure_names
from perturbdiff.report.experiments.published_numbers import read_published
from perturbdiff.report.experiments.training_work import works
from perturbdiff.report.figures.trained_models import bundles_of
from perturbdiff.report.loading.results import Run
from perturbdiff.report.sections.chapters import Chapter
from perturbdiff.runtime.errors import UserError

_LINKED = ("glance", "duels", "genes")


@dataclass(frozen=True, eq=False)
class ExperimentRequest:
    """Inputs of the chapter on an experiment, read and checked.

    Attributes
    ----------
    entries
        Of the design; empty without one.
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
            Records of predictions and bundles, for parameters and work; read only if a figure shows them.
        chapters
            Of the data sets, to lead to.
        """
        entries = self.entries or (default_design(runs) if self.papers is not None else ())
        if not entries:
            return None
        drawn = bundles_of(runs, records, bundles) if "scaling" in self.figures else {}
        there = {
            c.name: [(s.title, s.anchor) for s in c.sections if s.anchor.endswith(_LINKED)] for c in chapters
        }
        found = experiment(entries, against if against in self.arms else None, works(drawn), there)
        return chapter(found, self.figures, self.papers, arms=bool(self.entries))


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
