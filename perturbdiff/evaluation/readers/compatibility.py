"""Do predictions and truth fit: units, covariates, conditions, genes; and what a person must know of it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cells_by_condition import Cells, Condition, Reader
from perturbdiff.evaluation.readers.expression_view import median_depth
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)


class Findings:
    """What is found about the inputs: logged at once, kept for the summary.

    Attributes
    ----------
    found
        ``kind``, ``text`` and ``count`` of each.
    facts
        Numbers by name.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def add(self, kind: str, text: str, count: int, *, warn: bool = True) -> None:
        """Log and keep a sentence."""
        (logger.warning if warn else logger.info)("%s", text)
        self.found.append({"kind": kind, "text": text, "count": count})


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


def depths(predictions: Cells, truth: Cells) -> tuple[float | None, float | None]:
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


def conditions(predictions: Cells, truth: Cells, config: EvaluateConfig, notes: Findings) -> list[Condition]:
    """Return the predicted conditions, sorted, after comparing them with the real ones."""
    path = predictions.reader.path
    conditions = sorted(predictions.rows, key=lambda c: (c[2], c[0], c[1]))
    if unknown := [c for c in conditions if c not in truth.rows]:
        raise UserError(
            f"{path}: {len(unknown)} predicted conditions have no real cells in {truth.reader.path}: "
            f"{listing('|'.join(c) for c in unknown)} (cell type|batch|perturbation); predict conditions of the truth"
        )
    missing = [c for c in truth.rows if c not in predictions.rows]
    notes.facts["conditions_missing"] = len(missing)
    if missing and truth.complete:
        text = (
            f"{path}: {len(missing)} of the {len(truth.rows)} conditions of {truth.reader.path} have no prediction: "
            f"{listing('|'.join(c) for c in missing)} (cell type|batch|perturbation)"
        )
        if config.missing == "error":
            raise UserError(f"{text}; predict them, or leave them out with --missing skip")
        notes.add("missing", f"{text}; they are left out", len(missing))
    return conditions


def columns(predictions: Reader, truth: Reader, notes: Findings) -> np.ndarray | None:
    """Return where the truth's genes are among the predictions', None if they are the same in the same order."""
    position = {gene: i for i, gene in enumerate(predictions.genes)}
    if missing := [g for g in truth.genes if g not in position]:
        raise UserError(
            f"{predictions.path}: {len(missing)} of the truth's {len(truth.genes)} genes are missing: "
            f"{listing(missing)}; predict all of them, or give a truth with the predicted genes only"
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
