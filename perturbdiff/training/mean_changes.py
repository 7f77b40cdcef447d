"""Measures the changes of the training perturbations that a network expects (``model.anchor: predicted``)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from perturbdiff.checkpoint.change_regression import fill
from perturbdiff.checkpoint.pretrained_embeddings import Semantics
from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.conditions.vocabulary import GeneMap, Vocabulary
from perturbdiff.embeddings.kernel_ridge import LEAST
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.pseudobulk import condition_changes

if TYPE_CHECKING:
    from perturbdiff.training.setup import Source

logger = logging.getLogger(__name__)


def expect_changes(
    model: Denoiser, source: Source, genes: list[str], vocabulary: Vocabulary, frozen: Semantics
) -> None:
    """Fill the expected changes of a network, if it has them, from the training cells of a source.

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
        If there are too few training perturbations.
    """
    if model.expected is None:
        return
    store, exclude, vectors = source.store, source.exclude, frozen.vectors["perturbation"]
    table = store.conditions
    perturbed = np.flatnonzero(source.train & ~table["is_control"].to_numpy(bool))
    pools = ControlPools(table, Rows(table, exclude), perturbed, quiet=True)
    columns = GeneMap(store.genes, genes, name=str(store.path)).columns
    label = vocabulary.encode("perturbation", table["perturbation"]) - 1
    sums, contexts = np.zeros((len(vectors), len(genes))), np.zeros(len(vectors))
    for condition, change in condition_changes(store, perturbed, pools, exclude):
        sums[label[condition], columns[columns >= 0]] += change[columns >= 0]
        contexts[label[condition]] += 1
    measured = contexts > 0
    if measured.sum() < LEAST:
        raise UserError(
            f"model.anchor=predicted: {int(measured.sum())} training perturbations, and {LEAST} are the least to learn "
            "changes from; set model.anchor=control"
        )
    fill(model.expected, vectors, sums / np.maximum(contexts, 1)[:, None], measured)
    control = vocabulary.encode("perturbation", [vocabulary.control])
    for buffer in (model.expected.changes, model.expected.left_out):
        buffer[control] = 0.0
    logger.info(
        "expected changes: measured of %d perturbations, predicted of the others", int(measured.sum())
    )
