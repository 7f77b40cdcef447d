"""Chooses what to hold out, so that the predictions can be judged: enough cells in each held-out condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.runtime.errors import listing

ENOUGH_CELLS = (30, 10, 2)
"""Cells that a held-out condition and its controls need; a lower number is taken where no context has more."""
TEST_SHARE = 0.2
"""Share of the perturbed cells that the held-out context should have, so that most cells train."""
MANY_PERTURBATIONS = 10
"""From this number on, some of the held-out context's perturbations train."""
ENOUGH_TO_VALIDATE = 5
"""Perturbations that validation needs; with fewer, its choice of weights would be chance."""

_TRAIN, _VALID = 0.3, 0.15
_RANDOM_BATCHES = 3
_NEARLY_ALL = 0.8
_WORDS = {"cell_type": "cell type", "batch": "batch"}


@dataclass(frozen=True)
class HeldOut:
    """What is held out.

    Attributes
    ----------
    settings
        Values by dotted recipe key.
    why
        Sentences that say what is held out, why, and what cannot be judged.
    """

    settings: dict[str, Any]
    why: tuple[str, ...]


@dataclass(frozen=True)
class _Context:
    """A context that could be held out, with the perturbations that can be judged there."""

    column: str
    name: str
    share: float
    present: tuple[str, ...]
    judged: tuple[str, ...]


def hold_out(
    conditions: pd.DataFrame, *, columns: Sequence[str] = ("cell_type", "batch"), by_label: bool = True
) -> HeldOut:
    """Choose the context to hold out.

    A context is one cell type or, if there is no choice of cell types, one batch. It has enough control cells and
    enough cells of perturbations that also occur elsewhere. Of such contexts, the one is taken that has about a fifth
    of the perturbed cells. Where there is no second context, a random third of all cells is held out.

    Parameters
    ----------
    conditions
        Columns ``cell_type, batch, perturbation, n_cells, is_control``.
    columns
        Columns whose labels may be held out, the preferred one first.
    by_label
        Whether the labels are those of the store, so that a recipe can name the perturbations to hold out. Doses that
        are joined to the labels later make them others.
    """
    for least in ENOUGH_CELLS:
        for column in columns:
            found = [one for one in _contexts(conditions, column, least) if one.judged]
            if found:
                return _held(_best(found), conditions, least, by_label=by_label)
    return _random(conditions)


def _contexts(conditions: pd.DataFrame, column: str, least: int) -> list[_Context]:
    """Return the labels of a column with the perturbations that could be judged there."""
    control = conditions["is_control"].to_numpy(bool)
    names, row = np.unique(conditions[column].to_numpy(str), return_inverse=True)
    labels, place = np.unique(conditions["perturbation"].to_numpy(str), return_inverse=True)
    cells = conditions["n_cells"].to_numpy(np.int64)
    counts = np.zeros((len(names), len(labels)), np.int64)
    np.add.at(counts, (row[~control], place[~control]), cells[~control])
    controls = np.bincount(row[control], cells[control], minlength=len(names))
    elsewhere = counts.sum(axis=0) - counts
    enough = (counts >= least) & (elsewhere >= least) & (controls >= least)[:, None]
    share = counts.sum(axis=1) / max(1, counts.sum())
    return [
        _Context(
            column, str(name), float(share[k]),
            tuple(labels[counts[k] > 0].tolist()), tuple(labels[enough[k]].tolist()),
        )
        for k, name in enumerate(names)
    ]  # fmt: skip


def _best(contexts: Sequence[_Context]) -> _Context:
    """Return the context with nearly as many judged perturbations as any, and a fifth of the cells."""
    most = max(len(one.judged) for one in contexts)
    fit = [one for one in contexts if len(one.judged) >= _NEARLY_ALL * most]
    return min(fit, key=lambda one: (abs(one.share - TEST_SHARE), one.name))


def _held(context: _Context, conditions: pd.DataFrame, least: int, *, by_label: bool) -> HeldOut:
    many = len(context.judged) >= MANY_PERTURBATIONS
    validated = len(context.judged) * (1 - _TRAIN) * _VALID >= ENOUGH_TO_VALIDATE
    settings: dict[str, Any] = {
        "split.context_column": context.column,
        "split.held_out": [context.name],
        "split.train_fraction": _TRAIN if many else 0.0,
        "split.valid_fraction": _VALID if validated else 0.0,
    }
    if by_label and len(context.judged) < len(context.present):
        settings["split.perturbations"] = list(context.judged)
    if context.column == "batch":
        settings["evaluate.context_column"] = "batch"
    word, count = _WORDS[context.column], len(context.judged)
    some = f"{round(100 * (1 - _TRAIN))} % of its" if many else "its"
    why = [
        f"held out: {some} {count} perturbation{'s' * (count != 1)} in {word} '{context.name}', which has "
        f"{round(100 * context.share)} % of the perturbed cells; the model learns from the others and "
        "from its control cells"
    ]
    small = len(context.present) - count
    if small and by_label:
        why.append(
            f"{small} perturbation{'s' * (small != 1)} of '{context.name}' with fewer than {least} cells there or "
            "elsewhere cannot be judged and train instead"
        )
    if not validated:
        why.append("there are too few perturbations for validation, so the last weights are kept")
    return HeldOut(settings, (*why, *_limits(conditions, least)))


def _random(conditions: pd.DataFrame) -> HeldOut:
    """Hold out a random third of the cells, which is all that can be held out within one context."""
    settings = {
        "data.batch_key": None,
        "data.random_batches": _RANDOM_BATCHES,
        "split.context_column": "batch",
        "split.held_out": [f"random_{_RANDOM_BATCHES}"],
        "split.train_fraction": 0.0,
        "split.valid_fraction": 0.0,
        "evaluate.context_column": "batch",
    }
    perturbed = ~conditions["is_control"].to_numpy(bool)
    labels, place = np.unique(conditions["perturbation"].to_numpy(str)[perturbed], return_inverse=True)
    cells = np.bincount(place, conditions["n_cells"].to_numpy(np.int64)[perturbed])
    few = labels[cells < _RANDOM_BATCHES * ENOUGH_CELLS[0]].tolist()
    why = [
        "held out: a random third of the cells, because no second cell type or batch has both control cells and "
        "perturbed cells",
        "so the report says how well the model reproduces perturbations that it has seen; whether it predicts them in "
        "new cell types or batches cannot be judged",
    ]
    if few:
        why.append(f"few cells, and therefore noisy scores, for {listing(few, 4)}")
    return HeldOut(settings, (*why, *_limits(conditions, ENOUGH_CELLS[0])))


def _limits(conditions: pd.DataFrame, least: int) -> list[str]:
    """Say what cannot be judged."""
    limits = []
    if least < ENOUGH_CELLS[0]:
        limits.append(f"no held-out condition has {ENOUGH_CELLS[0]} cells, so the scores will be noisy")
    if len(set(conditions["perturbation"].to_numpy()[~conditions["is_control"].to_numpy(bool)])) == 1:
        limits.append("with one perturbation, whether the model tells perturbations apart cannot be judged")
    return limits
