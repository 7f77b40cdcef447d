"""Which cells are compared with which: predictions with the truth, or one half of the truth with the other.

The same real controls stand on both sides; those that a predictions file carries are checked, never scored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from perturbdiff.errors import UserError, listing
from perturbdiff.evaluation.differential import Sparse
from perturbdiff.evaluation.inputs import Cells, Condition, Group, Reader

logger = logging.getLogger(__name__)

_HIGHEST = 15.0  # log1p values beyond this are no expression profile that the field's tools would accept


@dataclass
class Side:
    """One side of the comparison: reads cells in the shared gene order and checks every value.

    Attributes
    ----------
    columns
        Positions of the shared genes among the reader's, or None where they are the same.
    highest
        Largest value seen so far.
    """

    reader: Reader
    rows: Mapping[Condition, np.ndarray]
    columns: np.ndarray | None = None
    highest: float = 0.0

    def cells(self, rows: np.ndarray) -> Sparse:
        """Return log1p values of ``rows`` over the shared genes.

        Raises
        ------
        UserError
            If a value is not finite or negative.
        """
        cells: Sparse = sp.csr_matrix(self.reader.expression(rows))
        cells = cells.astype(np.float32, copy=False)  # equal on both sides, so that equal values stay ties
        if cells.data.size:
            low, high = float(cells.data.min()), float(cells.data.max())
            if not np.isfinite(low + high):
                raise UserError(
                    f"{self.reader.path}: X holds values that are not finite; mend or drop these cells"
                )
            if low < 0:
                raise UserError(
                    f"{self.reader.path}: X holds negative values (lowest {low:.3g}), log1p values are at least 0; "
                    "clip the predictions at 0"
                )
            self.highest = max(self.highest, high)
        return cells if self.columns is None else cells[:, self.columns]

    def warn_if_high(self) -> None:
        """Say so if values are too large for log1p of normalised counts."""
        if self.highest >= _HIGHEST:
            logger.warning(
                "%s: largest value %.1f; log1p of normalised counts stays below %g. Are these log1p values?",
                self.reader.path,
                self.highest,
                _HIGHEST,
            )


@dataclass
class Pairing:
    """Everything that is compared.

    Attributes
    ----------
    genes
        Shared genes in the truth's order.
    conditions
        Conditions scored, sorted by perturbation, cell type, batch.
    contexts
        Context of each condition.
    real, predicted
        The two sides; controls are read from ``real`` and serve both.
    controls
        Rows of the real controls of each (cell type, batch) in question that has any.
    facts
        What the summary says of the inputs.
    """

    genes: tuple[str, ...]
    control: str
    conditions: list[Condition]
    contexts: Mapping[Condition, str]
    real: Side
    predicted: Side
    controls: Mapping[Group, np.ndarray]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def perturbations(self) -> list[str]:
        """Return the perturbations, sorted by name."""
        return sorted({c[2] for c in self.conditions})


def pair(predictions: Cells, truth: Cells) -> Pairing:
    """Match predicted conditions with the truth's, genes by name.

    Raises
    ------
    UserError
        If units, control labels, genes, conditions or controls do not match.
    """
    path = predictions.reader.path
    _check_units(predictions, truth)
    columns = _columns(predictions.reader, truth.reader)
    conditions = sorted(predictions.rows, key=lambda c: (c[2], c[0], c[1]))
    if unknown := [c for c in conditions if c not in truth.rows]:
        raise UserError(
            f"{path}: {len(unknown)} predicted conditions have no real cells in {truth.reader.path}: "
            f"{listing('|'.join(c) for c in unknown)} (cell type|batch|perturbation); predict conditions of the truth"
        )
    controls = _controls(truth, conditions)
    real = Side(truth.reader, truth.rows)
    predicted = Side(predictions.reader, predictions.rows, columns)
    replaced = _differing_controls(real, predicted, controls, predictions.controls)
    label = truth.control or predictions.control or "control"
    facts = {"control_groups": len(controls), "control_groups_replaced": replaced}
    contexts = {c: truth.contexts[c] for c in conditions}
    return Pairing(tuple(truth.reader.genes), label, conditions, contexts, real, predicted, controls, facts)


def split_half(truth: Cells, wanted: Iterable[Condition], *, seed: int) -> Pairing:
    """Draw half of each wanted condition's real cells as the "prediction" of the other half.

    The score is what remains of a perfect prediction given the noise of so few cells. Conditions with a single
    cell are left out and counted.

    Raises
    ------
    UserError
        If no condition has two cells.
    """
    wanted = sorted(wanted, key=lambda c: (c[2], c[0], c[1]))
    first: dict[Condition, np.ndarray] = {}
    second: dict[Condition, np.ndarray] = {}
    rng = np.random.default_rng(seed)
    for condition in wanted:
        rows = truth.rows[condition]
        order = rng.permutation(len(rows))
        if len(rows) >= 2:
            first[condition] = np.sort(rows[order[: len(rows) // 2]])
            second[condition] = np.sort(rows[order[len(rows) // 2 :]])
    if not first:
        raise UserError(f"{truth.reader.path}: no test condition with at least two cells to split in halves")
    conditions = list(first)
    return Pairing(
        tuple(truth.reader.genes),
        truth.control or "control",
        conditions,
        {c: truth.contexts[c] for c in conditions},
        Side(truth.reader, second),
        Side(truth.reader, first),
        _controls(truth, conditions),
        {"conditions_too_small": len(wanted) - len(conditions)},
    )


def _check_units(predictions: Cells, truth: Cells) -> None:
    path, a, b = predictions.reader.path, predictions.target_sum, truth.target_sum
    if a is not None and b is not None and not np.isclose(a, b, rtol=1e-4):
        raise UserError(
            f"{path}: cells are normalised to {a:g} counts, those of {truth.reader.path} to {b:g}; "
            "predict from, and evaluate against, the same store"
        )
    if predictions.control != truth.control:
        raise UserError(
            f"{path}: its control is '{predictions.control}', that of {truth.reader.path} is '{truth.control}'"
        )


def _columns(predictions: Reader, truth: Reader) -> np.ndarray | None:
    """Return where the truth's genes are among the predictions', None if they are the same in the same order."""
    for reader in (predictions, truth):
        if len(set(reader.genes)) < len(reader.genes):
            twice = sorted({g for g in reader.genes if reader.genes.count(g) > 1})
            raise UserError(f"{reader.path}: gene names occur twice: {listing(twice)}; make them unique")
    position = {gene: i for i, gene in enumerate(predictions.genes)}
    if missing := [g for g in truth.genes if g not in position]:
        raise UserError(
            f"{predictions.path}: {len(missing)} of the truth's {len(truth.genes)} genes are missing: "
            f"{listing(missing)}; predict all of them, or give a truth with the predicted genes only"
        )
    if extra := len(predictions.genes) - len(truth.genes):
        logger.info("%s: %d genes that the truth does not have are left out", predictions.path, extra)
    if predictions.genes == truth.genes:
        return None
    return np.array([position[g] for g in truth.genes])


def _controls(truth: Cells, conditions: Iterable[Condition]) -> dict[Group, np.ndarray]:
    """Return the control rows of the conditions' groups; a group without any is left to the others' controls."""
    groups = sorted({c[:2] for c in conditions})
    if missing := [g for g in groups if g not in truth.controls]:
        named = listing("|".join(g) for g in missing)
        if len(missing) == len(groups):
            raise UserError(
                f"{truth.reader.path}: no control cells for {named} (cell type|batch), so that no change can be "
                "computed; evaluate conditions that have controls"
            )
        logger.warning(
            "%s: no control cells for %d of %d groups (cell type|batch): %s; their cells are compared with the "
            "controls of the scope they are pooled in",
            truth.reader.path,
            len(missing),
            len(groups),
            named,
        )
    return {g: truth.controls[g] for g in groups if g in truth.controls}


def _differing_controls(
    real: Side, predicted: Side, controls: Mapping[Group, np.ndarray], theirs: Mapping[Group, np.ndarray]
) -> int:
    """Count the groups whose controls in the predictions are not the real ones (the real ones are used anyway)."""
    differing = [g for g, rows in controls.items() if not _same(real, rows, predicted, theirs.get(g))]
    if differing:
        logger.warning(
            "%s: its controls are not the real ones in %d of %d groups (cell type|batch): %s; "
            "the real controls are used on both sides",
            predicted.reader.path,
            len(differing),
            len(controls),
            listing("|".join(g) for g in differing),
        )
    return len(differing)


def _same(real: Side, rows: np.ndarray, predicted: Side, theirs: np.ndarray | None) -> bool:
    if theirs is None or len(theirs) != len(rows):
        return False
    a, b = (side.cells(r).mean(axis=0, dtype=np.float64) for side, r in ((real, rows), (predicted, theirs)))
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-5))


def held_out_conditions(split: Path, part: str, truth: Cells) -> list[Condition]:
    """Return the truth's conditions that ``split`` puts into ``part``.

    Raises
    ------
    UserError
        If there is none.
    """
    from perturbdiff.data.splits import read_split

    table = read_split(split)
    table = table[table["part"].astype(str) == part]
    keys = zip(table["cell_type"], table["batch"], table["perturbation"], strict=True)
    chosen = [(str(c), str(b), str(p)) for c, b, p in keys]
    found = [c for c in chosen if c in truth.rows]
    if not found:
        raise UserError(
            f"{split}: no '{part}' condition that {truth.reader.path} holds; is it this store's split?"
        )
    return found
