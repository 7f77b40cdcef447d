"""How predictable a data set is at all: do its effects replicate, are they alike across contexts, and above noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import Condition
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.readers.cells_by_condition import Cells, ExpressionView, median_depth
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope

TABLE = "predictability.csv"
COLUMNS = (
    "unit",
    "replicate_cosine",
    "signal_to_noise",
    "de_first_half",
    "de_second_half",
    "de_both",
    "de_replicated",
    "cosine_with_mean",
    "cross_context_cosine",
    "contexts",
)
NUMBERS = (
    "replicate_cosine",
    "cross_context_cosine",
    "cosine_with_mean",
    "signal_to_noise",
    "de_genes",
    "de_replicated",
)
"""What the summary has quartiles of."""
_CELLS_AT_ONCE = 4096


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of ``x`` and ``y`` [M, G], float64 [M]; NaN where a row is zero."""
    lengths = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    inner = np.asarray((x * y).sum(axis=-1), np.float64)
    return np.divide(inner, lengths, out=np.full(inner.shape, np.nan), where=lengths > 0)


def replication(scope: Scope, halves: Comparison) -> pd.DataFrame:
    """Return how well the effects of one half of the cells are found again in the other half.

    Each half has its own controls, so that δ₁ and δ₂, the mean changes of the halves, share no noise. Hence
    ⟨δ₁, δ₂⟩ estimates the squared length of the true change, and |δ₁ − δ₂|² / 4 the squared noise of the change over
    all cells.

    Parameters
    ----------
    halves
        The technical duplicate.

    Returns
    -------
    DataFrame
        unit (perturbation, or "context|perturbation"), replicate_cosine, signal_to_noise (the first estimate over the
        second), DE genes of each half and of both with the same sign, de_replicated (genes of both over the mean of
        the halves; NaN without any).
    """
    first, second = halves.real, halves.predicted
    noise = ((first.delta - second.delta) ** 2).sum(axis=1) / 4
    signal = (first.delta * second.delta).sum(axis=1)
    both = first.significant & second.significant & (np.sign(first.log2_fold) == np.sign(second.log2_fold))
    counts = [side.significant.sum(axis=1) for side in (first, second)]
    mean = (counts[0] + counts[1]) / 2
    names = halves.perturbations
    return pd.DataFrame(
        {
            "unit": list(names) if scope[0] == POOLED else [f"{scope[1]}|{name}" for name in names],
            "replicate_cosine": cosine(first.delta, second.delta),
            "signal_to_noise": np.divide(signal, noise, out=np.full(len(names), np.nan), where=noise > 0),
            "de_first_half": counts[0],
            "de_second_half": counts[1],
            "de_both": both.sum(axis=1),
            "de_replicated": np.divide(
                both.sum(axis=1), mean, out=np.full(len(names), np.nan), where=mean > 0
            ),
        }
    )


def cross_context(cells: Cells, wanted: Iterable[Condition]) -> pd.DataFrame:
    """Return how alike the change of a perturbation is in other contexts: what could be carried over.

    All cells of the wanted perturbations are read, whatever part of the split they are in, a context at a time.
    Changes are from the controls of their own context.

    Parameters
    ----------
    cells
        The truth.
    wanted
        Conditions that are scored.

    Returns
    -------
    DataFrame
        perturbation, context (of a wanted condition), cross_context_cosine (mean over all other contexts that have
        the perturbation) and contexts (their number). Only pairs that have another context.
    """

    def context(condition: Condition) -> str:
        return cells.contexts.get(condition, "|".join(condition.group))

    asked = {(c.perturbation, context(c)) for c in wanted}
    names = {perturbation for perturbation, _ in asked}
    depth = median_depth(cells.reader) if cells.scale == "counts" else None
    view = ExpressionView(cells.reader, cells.rows, depth=depth)
    conditions = [c for c in sorted(cells.rows) if c.perturbation in names]
    groups: dict[str, set[tuple[str, str]]] = {}
    for condition in cells.rows:
        groups.setdefault(context(condition), set()).add(condition.group)
    controls: dict[str, np.ndarray | None] = {}
    rows = []
    for name, members in groupby(conditions, lambda c: c.perturbation):
        found: dict[str, list[np.ndarray]] = {}
        for condition in members:
            found.setdefault(context(condition), []).append(cells.rows[condition])
        if len(found) < 2:
            continue
        changes = {}
        for label, parts in found.items():
            if label not in controls:
                own = [cells.controls[g] for g in sorted(groups[label]) if g in cells.controls]
                controls[label] = _mean(view, own) if own else None
            if (control := controls[label]) is not None:
                changes[label] = _mean(view, parts) - control
        rows += list(_compared(name, changes, asked))
    columns = pd.Index(["perturbation", "context", "cross_context_cosine", "contexts"])
    return pd.DataFrame(rows, columns=columns)


def _compared(
    name: str, changes: dict[str, np.ndarray], asked: set[tuple[str, str]]
) -> Iterator[tuple[str, str, float, int]]:
    for label, change in changes.items():
        others = [other for key, other in changes.items() if key != label]
        if (name, label) in asked and others:
            yield name, label, float(np.nanmean(cosine(np.stack(others), change[None]))), len(others)


def _mean(view: ExpressionView, parts: list[np.ndarray]) -> np.ndarray:
    """Return the mean of cells, float64 [G], read a few at a time."""
    rows = np.sort(np.concatenate(parts))
    pieces = np.split(rows, range(_CELLS_AT_ONCE, len(rows), _CELLS_AT_ONCE))
    total = sum(np.asarray(view.cells(piece).sum(axis=0, dtype=np.float64)).ravel() for piece in pieces)
    return np.asarray(total) / len(rows)


def joined(replicates: pd.DataFrame, across: pd.DataFrame, with_mean: pd.Series) -> pd.DataFrame:
    """Return one table of all that is known, a row per unit of ``replicates``.

    Parameters
    ----------
    replicates, across
        What `replication` and `cross_context` return.
    with_mean
        Cosine of a unit's change with that of the mean of the other perturbations.
    """
    keys = across.assign(pair=across["context"] + "|" + across["perturbation"])
    by_context = bool(len(replicates)) and bool(replicates["unit"].isin(keys["pair"].tolist()).any())
    grouped = keys.groupby("pair" if by_context else "perturbation")[
        ["cross_context_cosine", "contexts"]
    ].mean()
    table = replicates.set_index("unit").join(grouped)
    table["cosine_with_mean"] = with_mean.reindex(table.index)
    return table.reset_index().reindex(columns=list(COLUMNS))


def summary(table: pd.DataFrame) -> dict[str, Any]:
    """Return the quartiles of each column over the units, and how many units have more signal than noise.

    Parameters
    ----------
    table
        What `joined` returns.
    """
    known = table.assign(de_genes=(table["de_first_half"] + table["de_second_half"]) / 2)
    quartiles = {name: known[name].quantile([0.25, 0.5, 0.75]).tolist() for name in NUMBERS}
    return {
        "units": len(table),
        "above_noise": int((table["signal_to_noise"] > 1).sum()),
        "with_de_genes": int((known["de_genes"] > 0).sum()),
        "contexts": table["contexts"].median(),
        "quartiles": quartiles,
    }
