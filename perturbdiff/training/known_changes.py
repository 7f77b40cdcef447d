"""The changes that are expected of perturbations, from the training cells: by their vectors, or by other contexts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial.distance import cdist

from perturbdiff.checkpoint.change_regression import fill
from perturbdiff.checkpoint.pretrained_embeddings import Semantics
from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.conditions.vocabulary import GeneMap, Vocabulary
from perturbdiff.embeddings.kernel_ridge import LEAST
from perturbdiff.model import Denoiser
from perturbdiff.model.expected_changes import PredictedChanges, TransferredChanges
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.pseudobulk import condition_changes, group_means

if TYPE_CHECKING:
    from perturbdiff.training.setup import Source

logger = logging.getLogger(__name__)

_SHARPNESS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Inverse widths that are tried, in units of the median squared distance. 0 is the plain mean, the last nearly the
nearest context alone."""


def expect_changes(
    model: Denoiser, source: Source, genes: list[str], vocabulary: Vocabulary, frozen: Semantics
) -> None:
    """Fill the expected changes of a network, if it has them, from the training cells of a source.

    With ``anchor: predicted`` they come from the perturbations' vectors, with ``transferred`` from the perturbation in
    other contexts. In both, a context counts once for each of its training conditions.

    Parameters
    ----------
    model
        Its buffers are changed.
    source
        A store and what training may use of it.
    genes, vocabulary
        Of the model.
    frozen
        The vectors of the vocabulary's perturbations.

    Raises
    ------
    UserError
        With ``predicted``, if there are too few training perturbations.
    """
    if model.expected is None:
        return
    if isinstance(model.expected, TransferredChanges):
        _transfer(model.expected, source, genes, vocabulary)
    else:
        _predict(model.expected, source, genes, vocabulary, frozen)


def _predict(
    expected: PredictedChanges, source: Source, genes: list[str], vocabulary: Vocabulary, frozen: Semantics
) -> None:
    """Fill changes with the perturbations' means over training contexts, and with what their vectors tell."""
    vectors = frozen.vectors["perturbation"]
    label = vocabulary.encode("perturbation", source.store.conditions["perturbation"]) - 1
    sums, contexts = np.zeros((len(vectors), len(genes))), np.zeros(len(vectors))
    for condition, change in _training_changes(source, genes):
        sums[label[condition]] += change
        contexts[label[condition]] += 1
    measured = contexts > 0
    if measured.sum() < LEAST:
        raise UserError(
            f"model.anchor=predicted: {int(measured.sum())} training perturbations, and {LEAST} are the least to learn "
            "changes from; set model.anchor=control"
        )
    fill(expected, vectors, sums / np.maximum(contexts, 1)[:, None], measured)
    control = vocabulary.encode("perturbation", [vocabulary.control])
    for buffer in (expected.changes, expected.left_out):
        buffer[control] = 0.0
    logger.info(
        "expected changes: measured of %d perturbations, predicted of the others", int(measured.sum())
    )


def _training_changes(source: Source, genes: list[str]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each perturbed training condition with its mean change, float64 [G] in the order of ``genes``, log1p."""
    store, table = source.store, source.store.conditions
    perturbed = np.flatnonzero(source.train & ~table["is_control"].to_numpy(bool))
    pools = ControlPools(table, Rows(table, source.exclude), perturbed, quiet=True)
    for condition, change in condition_changes(store, perturbed, pools, source.exclude):
        yield condition, _ordered(change, source, genes)


def _ordered(profiles: np.ndarray, source: Source, genes: list[str]) -> np.ndarray:
    """Return profiles [..., genes of the store] in the order of ``genes``, zero for those that the store lacks."""
    columns = GeneMap(source.store.genes, genes, name=str(source.store.path)).columns
    ordered = np.zeros((*profiles.shape[:-1], len(genes)))
    ordered[..., columns[columns >= 0]] = profiles[..., columns >= 0]
    return ordered


def _transfer(expected: TransferredChanges, source: Source, genes: list[str], vocabulary: Vocabulary) -> None:
    """Fill changes with the means of training conditions, and choose how much near contexts count.

    A perturbation with training cells in one context only moves nothing: what is the same elsewhere cannot be told.
    """
    table = source.store.conditions
    label = vocabulary.encode("perturbation", table["perturbation"])
    context = vocabulary.encode(expected.context, table[expected.context])
    pairs, values = _means_of_pairs(source, genes, label, context)
    if not pairs:
        logger.info(
            "expected changes: no perturbation has training cells in two %ss, so control cells are not moved",
            expected.context,
        )
        return
    levels = _control_levels(source, genes, context, len(expected.levels))
    rows = np.zeros(tuple(expected.rows.shape), np.int64)
    rows[tuple(np.array(pairs).T)] = np.arange(1, len(values))
    distance = cdist(levels[1:], levels[1:], "sqeuclidean")
    apart = distance[~np.eye(len(distance), dtype=bool)]
    distance /= max(float(np.median(apart)), np.finfo(np.float64).tiny)
    errors = [_left_out_error(values, rows, levels, -sharp * distance) for sharp in _SHARPNESS]
    sharpness = _SHARPNESS[int(np.argmin(errors))]
    expected.changes = torch.from_numpy(values).to(expected.changes)
    expected.rows.copy_(torch.from_numpy(rows))
    expected.levels.copy_(torch.from_numpy(levels))
    expected.nearness[1:, 1:] = torch.from_numpy(-sharpness * distance)
    logger.info(
        "expected changes: of %d perturbations in two %ss or more, sharpness %g: the others leave %.2f of a "
        "condition's change untold (all alike %.2f, only the nearest %.2f; squared)",
        len({perturbation for perturbation, _ in pairs}), expected.context, sharpness,
        min(errors), errors[0], errors[-1],
    )  # fmt: skip


def _means_of_pairs(
    source: Source, genes: list[str], label: np.ndarray, context: np.ndarray
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return the n pairs of perturbation and context, of perturbations in two contexts or more, and their mean changes.

    The means are float32 [1 + n, G], log1p, with zeros first. ``label`` and ``context`` are the ids of all conditions.
    """
    sums: dict[tuple[int, int], np.ndarray] = {}
    conditions: Counter[tuple[int, int]] = Counter()
    for condition, change in _training_changes(source, genes):
        pair = (int(label[condition]), int(context[condition]))
        sums[pair] = sums[pair] + change if pair in sums else change
        conditions[pair] += 1
    contexts = Counter(perturbation for perturbation, _ in sums)
    pairs = [pair for pair in sums if contexts[pair[0]] > 1]
    means = np.zeros((1 + len(pairs), len(genes)), np.float32)
    for row, pair in enumerate(pairs, 1):
        means[row] = sums.pop(pair) / conditions[pair]  # memory of the sums is given back one by one
    return pairs, means


def _control_levels(source: Source, genes: list[str], context: np.ndarray, contexts: int) -> np.ndarray:
    """Return the mean of each context's control cells, log1p [contexts, G], and of all for one that has none."""
    groups = np.where(source.store.conditions["is_control"].to_numpy(bool), context, -1)
    means, cells = group_means(source.store, groups, contexts, label="control levels", exclude=source.exclude)
    means[cells == 0] = means[cells > 0].mean(axis=0)
    return _ordered(means, source, genes)


def _left_out_error(values: np.ndarray, rows: np.ndarray, levels: np.ndarray, nearness: np.ndarray) -> float:
    """Return the squared error of conditions that their other contexts tell, over that of no change at all."""
    error = total = 0.0
    for found in rows:
        where = np.flatnonzero(found)
        if len(where) < 2:
            continue
        truth, level = values[found[where]].astype(np.float64), levels[where]
        log_weight = nearness[np.ix_(where - 1, where - 1)].copy()
        np.fill_diagonal(log_weight, -np.inf)
        weight = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        told = weight @ truth
        kept = np.maximum(1 + np.minimum(told, 0) / np.maximum(weight @ level, np.finfo(float).tiny), 0)
        error += float(np.square(np.maximum(told, 0) + level * (kept - 1) - truth).sum())
        total += float(np.square(truth).sum())
    return error / max(total, np.finfo(float).tiny)
