"""Which cells are compared with which: predictions with the truth.

Both sides share the same real controls. Those in a predictions file are checked, and used only if the user asks for
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.conditions.condition import Condition, Group, conditions_of
from perturbdiff.conditions.gene_names import synonyms, unshared
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cell_sources import KnownSets, grouped
from perturbdiff.evaluation.readers.cells_by_condition import (
    Cells,
    ExpressionView,
    Reader,
    median_depth,
)
from perturbdiff.evaluation.readers.remarks import Findings, compare_scales
from perturbdiff.runtime.errors import UserError, listing

_CELLS_AT_ONCE = 4096


def check_units(predictions: Cells, truth: Cells) -> None:
    """Raise a `UserError` if depths of log1p values or labels of the control differ."""
    path, a, b = predictions.reader.path, predictions.target_sum, truth.target_sum
    both = predictions.scale == truth.scale == "log1p"
    if both and a is not None and b is not None and not np.isclose(a, b, rtol=1e-4):
        raise UserError(
            f"{path}: cells are normalised to {a:g} counts, those of {truth.reader.path} to {b:g}; "
            "predict from, and evaluate against, the same store"
        )
    if predictions.control != truth.control:
        raise UserError(
            f"{path}: its control is '{predictions.control}', that of {truth.reader.path} is '{truth.control}'"
        )


def _same_depth(predictions: Cells, truth: Cells, depths: tuple[float | None, float | None]) -> bool:
    """Return whether both sides are known to be normalised to one depth, as those of our own stages are."""
    made_by = predictions.made_by
    ours = bool(made_by.recipe or made_by.baseline)
    return ours or depths != (None, None) or None not in (predictions.target_sum, truth.target_sum)


def depths_of(predictions: Cells, truth: Cells) -> tuple[float | None, float | None]:
    """Return the depth that predicted and real counts are normalised to, None for a side that is log1p.

    It is that of the side that is log1p already, else the median depth of the truth's cells.
    """
    counts = predictions.scale == "counts", truth.scale == "counts"
    if not any(counts):
        return None, None
    if all(counts):
        depth = median_depth(truth.reader)
        return depth, depth
    done, todo = (truth, predictions) if counts[0] else (predictions, truth)
    if done.target_sum is None:
        raise UserError(
            f"{todo.reader.path}: are counts, but {done.reader.path} does not say to what depth its log1p values were "
            "normalised; give counts on both sides, or declare uns['perturbdiff']['target_sum'] there"
        )
    return (done.target_sum, None) if counts[0] else (None, done.target_sum)


def same_covariates(predictions: Cells, truth: Cells, notes: Findings) -> tuple[Cells, Cells]:
    """Return both sides with the covariates that both have."""
    for one, other in ((predictions, truth), (truth, predictions)):
        if without := sorted(other.covariates - one.covariates):
            names = " and ".join(without)
            text = (
                f"{one.reader.path}: has no {names}, so that cells of {other.reader.path} are pooled over it"
            )
            notes.add("covariates", text, len(without))
    both = predictions.covariates & truth.covariates
    return tuple(cells.pooled_over(cells.covariates - both) for cells in (predictions, truth))  # type: ignore[return-value]


def shared_conditions(
    predictions: Cells, truth: Cells, config: EvaluateConfig, notes: Findings
) -> list[Condition]:
    """Return the predicted conditions, sorted, after comparing them with the real ones."""
    path = predictions.reader.path
    conditions = sorted(predictions.rows)
    if unknown := [c for c in conditions if c not in truth.rows]:
        raise UserError(
            f"{path}: {len(unknown)} predicted conditions have no real cells in {truth.reader.path}: "
            f"{listing(map(str, unknown))} (cell type|batch|perturbation); predict conditions of the truth"
        )
    missing = [c for c in truth.rows if c not in predictions.rows]
    notes.facts["conditions_missing"] = len(missing)
    if missing and truth.complete:
        text = (
            f"{path}: {len(missing)} of the {len(truth.rows)} conditions of {truth.reader.path} have no prediction: "
            f"{listing(map(str, missing))} (cell type|batch|perturbation)"
        )
        if config.missing == "error":
            raise UserError(f"{text}; predict them, or leave them out with --missing skip")
        notes.add("missing", f"{text}; they are left out", len(missing))
    return conditions


def shared_genes(predictions: Reader, truth: Reader, notes: Findings) -> np.ndarray | None:
    """Return where the truth's genes are among the predictions', None if they are the same in the same order."""
    position = {gene: i for i, gene in enumerate(predictions.genes)}
    missing = [g for g in truth.genes if g not in position]
    if len(missing) == len(truth.genes):
        raise UserError(
            f"{predictions.path} and {truth.path}: "
            f"{unshared(predictions.genes, truth.genes, 'the predictions', 'the truth')}"
        )
    if missing:
        alike = synonyms(missing, [g for g in predictions.genes if g not in set(truth.genes)])
        spelled = "".join(f"; '{g}' may be {other}" for g, other in [*alike.items()][:1])
        raise UserError(
            f"{predictions.path}: {len(missing)} of the truth's {len(truth.genes)} genes are missing: "
            f"{listing(missing)}{spelled}; predict all of them, or give a truth ({truth.path}) with the predicted "
            "genes only"
        )
    extra = len(predictions.genes) - len(truth.genes)
    columns = np.array([position[g] for g in truth.genes])
    moved = 0 if (np.diff(columns) > 0).all() else int((np.argsort(columns) != np.arange(len(columns))).sum())
    notes.facts |= {"genes_left_out": extra, "genes_reordered": moved}
    if extra:
        text = f"{predictions.path}: {extra} genes that the truth does not have are left out"
        notes.add("genes", text, extra, warn=False)
    if moved:
        text = f"{predictions.path}: its genes are in another order than the truth's and were matched by name"
        notes.add("genes", text, moved, warn=False)
    return None if predictions.genes == truth.genes else columns


@dataclass
class Pairing:
    """The cells of both sides that are compared.

    Attributes
    ----------
    genes
        Shared genes in the truth's order.
    conditions
        Conditions scored, sorted by perturbation, cell type, batch.
    contexts
        Context of each condition; empty if all are pooled only.
    real, predicted
        The two sides; controls are read from ``real`` and serve both.
    controls
        Rows of the real controls of each (cell type, batch) in question that has any.
    predicted_controls
        Rows on the predicted side of the controls that predicted changes and tests are from; None: the real ones.
    facts
        What the summary tells about the inputs.
    findings
        Remarks on the inputs: ``kind``, ``text`` (a sentence) and ``count``.
    depth
        Sum to which the counts of a cell were scaled, None if it is not known.
    sets
        Which cells were a set, where both sides know it.
    """

    genes: tuple[str, ...]
    control: str
    conditions: list[Condition]
    contexts: Mapping[Condition, str]
    real: ExpressionView
    predicted: ExpressionView
    controls: Mapping[Group, np.ndarray]
    facts: dict[str, Any] = field(default_factory=dict)
    predicted_controls: Mapping[Group, np.ndarray] | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    depth: float | None = None
    sets: KnownSets | None = None

    @property
    def perturbations(self) -> list[str]:
        """Return the perturbations, sorted by name."""
        return sorted({c.perturbation for c in self.conditions})


def pair(predictions: Cells, truth: Cells, config: EvaluateConfig) -> Pairing:
    """Match predicted conditions with the truth's, genes by name.

    A covariate (cell type or batch) that only one side has is ignored on the other.

    Raises
    ------
    UserError
        If units, control labels, genes, conditions or controls do not match.
    """
    notes = Findings()
    if predictions.reader.path.samefile(truth.reader.path):
        notes.add("same", f"{truth.reader.path}: predictions and truth are the same file", 1)
    check_units(predictions, truth)
    predictions, truth = same_covariates(predictions, truth, notes)
    columns = shared_genes(predictions.reader, truth.reader, notes)
    conditions = shared_conditions(predictions, truth, config, notes)
    controls = controls_of(truth, conditions, notes)
    depths = depths_of(predictions, truth)
    real = ExpressionView(truth.reader, truth.rows, depth=depths[1])
    predicted = ExpressionView(
        predictions.reader, predictions.rows, columns, depth=depths[0], own_depths=predictions.depths
    )
    compare_scales(predicted, real, conditions, notes, known=_same_depth(predictions, truth, depths))
    own_controls = None
    if config.controls == "own":
        own_controls = _own_controls(predictions, conditions, notes)
        facts: dict[str, Any] = {"control_groups": len(own_controls), "control_groups_replaced": 0}
    else:
        replaced = _differing_controls(real, predicted, controls, predictions.controls, notes)
        facts = {"control_groups": len(controls), "control_groups_replaced": replaced}
    _note_seen(predictions, notes)
    facts |= {"controls": config.controls, "made_by": predictions.made_by.to_json(), **notes.facts}
    contexts = {c: truth.contexts[c] for c in conditions if c in truth.contexts}
    label = truth.control or "control"
    genes = tuple(truth.reader.genes)
    depth = truth.target_sum if depths[1] is None else depths[1]
    sets = _known_sets(predictions, truth, conditions, notes)
    return Pairing(
        genes,
        label,
        conditions,
        contexts,
        real,
        predicted,
        controls,
        facts,
        own_controls,
        notes.entries,
        depth,
        sets,
    )


def _known_sets(
    predictions: Cells, truth: Cells, conditions: Iterable[Condition], notes: Findings
) -> KnownSets | None:
    """Return the sets of the conditions; say so if only the predictions lack them."""
    if truth.sets is None:
        return None
    if predictions.sets is None:
        text = (
            f"{predictions.reader.path}: does not say which cells are a set (whole numbers in obs column 'set'), so "
            "that sets are not compared"
        )
        notes.add("sets", text, 1, warn=False)
        return None
    real, predicted = (
        grouped({c: side.rows[c] for c in conditions}, side.sets)
        for side in (truth, predictions)
        if side.sets is not None
    )
    return KnownSets(real, predicted)


def controls_of(truth: Cells, conditions: Iterable[Condition], notes: Findings) -> dict[Group, np.ndarray]:
    """Return the control rows of the conditions' groups; a group without any is left to the others' controls."""
    groups = sorted({c.group for c in conditions})
    if missing := [g for g in groups if g not in truth.controls]:
        named = listing("|".join(g) for g in missing)
        if len(missing) == len(groups):
            raise UserError(
                f"{truth.reader.path}: no control cells for {named} (cell type|batch), so that no change can be "
                "computed; evaluate conditions that have controls"
            )
        text = (
            f"{truth.reader.path}: no control cells for {len(missing)} of {len(groups)} groups (cell type|batch): "
            f"{named}; their cells are compared with the controls of the scope they are pooled in"
        )
        notes.add("controls", text, len(missing))
    return {g: truth.controls[g] for g in groups if g in truth.controls}


def _own_controls(
    predictions: Cells, conditions: Iterable[Condition], notes: Findings
) -> dict[Group, np.ndarray]:
    """Return the predictions' own controls of the conditions' groups."""
    path = predictions.reader.path
    controls = {
        g: predictions.controls[g] for g in sorted({c.group for c in conditions}) if g in predictions.controls
    }
    if not controls:
        raise UserError(
            f"{path}: has no controls of its own; leave out --predicted-controls to use the real ones"
        )
    text = f"{path}: predicted changes are from its own controls, which a model can choose to its advantage"
    notes.add("controls", text, len(controls))
    return controls


def _differing_controls(
    real: ExpressionView,
    predicted: ExpressionView,
    controls: Mapping[Group, np.ndarray],
    predicted_controls: Mapping[Group, np.ndarray],
    notes: Findings,
) -> int:
    """Count the groups whose controls in the predictions are not the real ones, which are used all the same."""
    differing = [
        g
        for g in controls
        if g in predicted_controls and not _same(real, controls[g], predicted, predicted_controls[g])
    ]
    if differing:
        text = (
            f"{predicted.reader.path}: its controls are not the real ones in {len(differing)} of {len(controls)} "
            f"groups (cell type|batch): {listing('|'.join(g) for g in differing)}; the real controls are used on "
            "both sides"
        )
        notes.add("controls", text, len(differing))
    return len(differing)


def _same(
    real: ExpressionView, rows: np.ndarray, predicted: ExpressionView, predicted_rows: np.ndarray
) -> bool:
    if len(predicted_rows) != len(rows):
        return False
    return bool(np.allclose(_mean(real, rows), _mean(predicted, predicted_rows), rtol=1e-4, atol=1e-5))


def _mean(side: ExpressionView, rows: np.ndarray) -> np.ndarray:
    """Return the mean of cells over the shared genes, read a few at a time."""
    parts = np.split(rows, range(_CELLS_AT_ONCE, len(rows), _CELLS_AT_ONCE))
    total = sum(np.asarray(side.cells(part).sum(axis=0, dtype=np.float64)).ravel() for part in parts)
    return np.asarray(total) / len(rows)


def _note_seen(predictions: Cells, notes: Findings) -> None:
    """Say which predicted conditions the model was trained on."""
    number, first = predictions.trained_on or (None, ())
    if number:
        text = (
            f"{predictions.reader.path}: the model was trained on {number} of the {len(predictions.rows)} predicted "
            f"conditions ({listing(first)}); their scores say nothing about unseen ones"
        )
        notes.add("seen", text, number)
    notes.facts["conditions_seen"] = number


def held_out_conditions(split: Path, part: str, truth: Cells) -> list[Condition]:
    """Return the truth's conditions that ``split`` puts into ``part``.

    Raises
    ------
    UserError
        If there is none.
    """
    from perturbdiff.splits.splits import read_split

    table = read_split(split)
    table = table[table["part"].astype(str) == part]
    conditions = [c for c in conditions_of(table) if c in truth.rows]
    if not conditions:
        raise UserError(
            f"{split}: no '{part}' condition that {truth.reader.path} holds; was it made for this store?"
        )
    return conditions
