"""Which cells of both sides are compared for the definition `cell-eval2`, by context, and their checked counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from perturbdiff import __version__
from perturbdiff.conditions.condition import Condition
from perturbdiff.conditions.targets import Targets
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.cell_eval2.anchors import RealCells
from perturbdiff.evaluation.cell_eval2.measurements import Profile
from perturbdiff.evaluation.cell_eval2.metrics import Rules
from perturbdiff.evaluation.readers.cell_sources import StoreReader
from perturbdiff.evaluation.readers.cells_by_condition import Cells, Reader
from perturbdiff.evaluation.readers.pairing import (
    check_units,
    same_covariates,
    shared_conditions,
    shared_genes,
)
from perturbdiff.evaluation.readers.remarks import Findings
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.errors import UserError, listing

_WHOLE = 1e-6  # largest distance of a count from a whole number
_REMEDY = (
    "the definition cell-eval2 is one of raw counts: give counts (sample --values counts writes them), or choose "
    "--definition cell-eval-0.6.6, which takes log1p values"
)


@dataclass(frozen=True)
class CountReader:
    """Counts of one file or store over the shared genes.

    Attributes
    ----------
    reader
        Where the values are.
    read
        Its function from row numbers to raw values.
    columns
        Positions of the shared genes among the reader's, or None where they are the same.
    max_total
        Largest sum of a cell.
    """

    reader: Reader
    read: Callable[[np.ndarray], Sparse]
    columns: np.ndarray | None
    max_total: float

    @classmethod
    def of(cls, cells: Cells, columns: np.ndarray | None, max_total: float) -> CountReader:
        """Return the counts of ``cells``.

        Raises
        ------
        UserError
            If the values are not counts.
        """
        reader = cells.reader
        if isinstance(reader, StoreReader):
            if not reader.has_counts:
                raise UserError(
                    f"{reader.path}: the store was made from log1p values and has no counts; {_REMEDY}"
                )
            return cls(reader, reader.counts, columns, max_total)
        if cells.scale != "counts":
            raise UserError(f"{reader.path}: values are log1p; {_REMEDY}")
        return cls(reader, reader.expression, columns, max_total)

    def __call__(self, rows: np.ndarray) -> Sparse:
        """Return the counts of ``rows`` in this order, CSR float64 [len(rows), G].

        Raises
        ------
        UserError
            If a value is negative, not finite or no whole number, or a cell has too many counts.
        """
        cells: Sparse = sp.csr_matrix(self.read(rows))
        if self.columns is not None:
            cells = cells[:, self.columns]
        self._check(cells, rows)
        return sp.csr_matrix((cells.data.astype(np.float64), cells.indices, cells.indptr), shape=cells.shape)

    def _check(self, cells: Sparse, rows: np.ndarray) -> None:
        path = self.reader.path
        with np.errstate(invalid="ignore"):
            wrong = ~((cells.data >= 0) & (np.abs(cells.data - np.rint(cells.data)) <= _WHOLE))
        if wrong.any():
            k = int(np.argmax(wrong))
            row = int(rows[int(np.searchsorted(cells.indptr, k, "right")) - 1])
            column = int(cells.indices[k])
            gene = self.reader.genes[column if self.columns is None else int(self.columns[column])]
            raise UserError(
                f"{path}: X has values that are no counts (first: {cells.data[k]:g}, cell "
                f"'{self.reader.cell_name(row)}', gene '{gene}'); {_REMEDY}"
            )
        totals = np.asarray(cells.sum(axis=1, dtype=np.float64)).ravel()
        if len(totals) and totals.max() > self.max_total:
            row = int(rows[int(totals.argmax())])
            raise UserError(
                f"{path}: cell '{self.reader.cell_name(row)}' has {totals.max():g} counts, more than the "
                f"{self.max_total:g} that cell-eval2 takes; give raw counts"
            )


@dataclass(frozen=True)
class Panel:
    """The cells of one context.

    Attributes
    ----------
    scope
        ``context`` and its label; pooled where there is one context only.
    conditions
        Its conditions.
    predicted
        Rows of the predicted cells of each perturbation.
    real
        The real cells.
    """

    scope: Scope
    conditions: tuple[Condition, ...]
    predicted: Mapping[str, np.ndarray]
    real: RealCells


@dataclass(frozen=True)
class Panels:
    """All contexts.

    Attributes
    ----------
    panels
        At least one; several by name.
    genes
        The gene axis.
    targets
        Target genes of the perturbations.
    read
        Reads predicted counts.
    notes
        Remarks on the inputs.
    """

    panels: list[Panel]
    genes: tuple[str, ...]
    targets: Targets
    read: CountReader
    notes: Findings

    def positions(self, perturbations: Sequence[str]) -> list[np.ndarray]:
        """Return the positions of each perturbation's target genes."""
        place = {gene: i for i, gene in enumerate(self.genes)}
        return [np.array([place[g] for g in self.targets.genes[p]], np.int64) for p in perturbations]

    def digest(self, rules: Rules, controls: Iterable[Profile]) -> str:
        """Return the digest of the rules with this gene axis, these targets and the profiles of these controls."""
        return _digest(rules, self, self.panels, controls)

    def key(self, panel: Panel, rules: Rules, controls: Profile, truth: str) -> str:
        """Return a digest of all that the ends of ``panel`` depend on; ``truth`` is the SHA-256 of the real cells."""
        known = hashlib.sha256(f"{__version__} {truth} {_digest(rules, self, [panel], [controls])}".encode())
        for name, rows in sorted({**panel.real.rows, panel.real.control: panel.real.controls}.items()):
            known.update(f"\0{name}\0{len(rows)}\0".encode() + rows.astype(np.int64).tobytes())
        return known.hexdigest()


def _digest(rules: Rules, panels: Panels, scored: Sequence[Panel], controls: Iterable[Profile]) -> str:
    values = hashlib.sha256()
    for profile in controls:
        values.update(profile.sums.tobytes() + profile.cpm.tobytes())
    left_out = [
        ("|".join(panel.scope), name, gene)
        for panel in scored
        for name in panel.predicted
        for gene in panels.targets.genes[name]
    ]
    return rules.digest(genes=panels.genes, targets=left_out, controls=values.hexdigest())


def panels_of(predictions: Cells, truth: Cells, config: EvaluateConfig, rules: Rules) -> Panels:
    """Match predictions and truth.

    Raises
    ------
    UserError
        If a side has no counts, or genes, conditions or controls do not match, or a condition was not predicted.
    """
    notes = Findings()
    check_units(predictions, truth)
    columns = shared_genes(predictions.reader, truth.reader, notes)
    read = CountReader.of(predictions, columns, rules.max_total)
    real = CountReader.of(truth, None, rules.max_total)
    predictions, truth = same_covariates(predictions, truth, notes)
    conditions = shared_conditions(predictions, truth, config, notes)
    if truth.complete and (left := notes.facts["conditions_missing"]):
        raise UserError(
            f"{predictions.reader.path}: {left} conditions have no prediction, and cell-eval2 scores all of them; "
            "predict them, or give a truth without them (--missing skip is not of its rules)"
        )
    genes = tuple(truth.reader.genes)
    names = sorted({c.perturbation for c in conditions})
    targets = Targets.read(None if config.targets is None else Path(config.targets), names, genes)
    _note_targets(targets, notes)
    panels = [
        _panel(scope, members, predictions, truth, real)
        for scope, members in _scopes(conditions, truth.contexts).items()
    ]
    return Panels(panels, genes, targets, read, notes)


def _note_targets(targets: Targets, notes: Findings) -> None:
    """Tell what did not match; without any target at all say what that means."""
    if len(targets.without) == len(targets.genes) and not targets.source:
        text = (
            "no perturbation is named after a measured gene, so that no target gene is left out; if the perturbations "
            "have target genes, name them with --targets FILE, else discrimination and errors are too good"
        )
        notes.add("targets", text, len(targets.genes))
        return
    for text, number, warn in targets.remarks():
        notes.add("targets", text, number, warn=warn)


def _scopes(
    conditions: Sequence[Condition], contexts: Mapping[Condition, str]
) -> dict[Scope, list[Condition]]:
    """Return the conditions of each context, or all of them as the pool."""
    members: dict[str, list[Condition]] = {}
    for condition in conditions:
        members.setdefault(contexts.get(condition, ""), []).append(condition)
    if len(members) == 1:
        return {(POOLED, POOLED): list(conditions)}
    return {("context", label): members[label] for label in sorted(members)}


def _panel(
    scope: Scope, conditions: Sequence[Condition], predictions: Cells, truth: Cells, read: CountReader
) -> Panel:
    groups = sorted({c.group for c in conditions})
    controls = [truth.controls[g] for g in groups if g in truth.controls]
    if not controls:
        named = listing("|".join(g) for g in groups)
        raise UserError(
            f"{truth.reader.path}: no control cells for {named} (cell type|batch), so that no change can be computed; "
            "evaluate conditions that have controls"
        )
    real = RealCells(
        read,
        _by_perturbation(conditions, truth.rows),
        np.sort(np.concatenate(controls)),
        truth.control or "control",
    )
    return Panel(scope, tuple(conditions), _by_perturbation(conditions, predictions.rows), real)


def _by_perturbation(
    conditions: Iterable[Condition], rows: Mapping[Condition, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the ascending rows of each perturbation."""
    parts: dict[str, list[np.ndarray]] = {}
    for condition in conditions:
        parts.setdefault(condition.perturbation, []).append(rows[condition])
    return {name: np.sort(np.concatenate(found)) for name, found in parts.items()}
