"""How a store and the requested conditions fit a bundle: units, labels, input layers."""

from __future__ import annotations

import logging
import math

import numpy as np
import pandas as pd
import torch

from perturbdiff.checkpoint.bundle import SAME_DEPTH, Bundle
from perturbdiff.checkpoint.pretrained_embeddings import teach
from perturbdiff.model import Covariates
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.store.store import Store, dataset_of

logger = logging.getLogger(__name__)


def check_depth(bundle: Bundle, store: Store) -> float:
    """Return the largest log1p value a cell of the store's depth can have.

    Raises
    ------
    UserError
        If store and bundle are scaled to different depths.
    """
    ours, theirs = bundle.target_sum, store.target_sum
    if ours is None or not math.isfinite(theirs):
        logger.info("%s: the depth its values refer to is unknown to the store or the bundle", store.path)
    elif abs(theirs / ours - 1) > SAME_DEPTH:
        raise UserError(
            f"{store.path}: cells are scaled to {theirs:g} counts, the model was trained at {ours:g}; "
            f"preprocess again with --set data.target_sum={ours:g}"
        )
    return math.log1p(theirs) if math.isfinite(theirs) else math.inf


def encode(bundle: Bundle, store: Store, wanted: pd.DataFrame) -> Covariates:
    """Return the ids of the requests' labels, int64 [n] each.

    Labels that the model was not trained with are added to it if its semantic tables have them.

    Raises
    ------
    UserError
        If the model cannot know a perturbation or cell type that it is told.
    """
    words, used = bundle.vocabulary, bundle.config.model.covariates
    if bundle.config.train.zero_control:
        logger.warning("the model knows contexts only (pretraining): perturbations make no difference")
    label = wanted["perturbation"].where(wanted["perturbation"] != store.control, words.control)
    told = "perturbation" in used and not bundle.config.train.zero_control
    teach(bundle, {"cell_type": wanted["cell_type"], **({"perturbation": label} if told else {})})
    words = bundle.vocabulary
    perturbation = words.encode("perturbation", label, strict=told)
    cell_type = words.encode("cell_type", wanted["cell_type"], strict="cell_type" in used)
    batch = words.encode("batch", wanted["batch"])
    new = sorted(set(wanted["batch"][batch == 0]))
    if new and "batch" in used:
        logger.info("batches unknown to the model, predicted as an average batch: %s", listing(new))
    if not told:
        perturbation = np.zeros_like(perturbation)
    return Covariates(*(torch.from_numpy(ids) for ids in (perturbation, cell_type, batch)))


def input_layer(bundle: Bundle, store: Store) -> int:
    """Return the place of the store among the model's data sets, whose input layers it uses.

    Raises
    ------
    UserError
        If the model has several and none is this store's.
    """
    names, name = bundle.vocabulary.datasets, dataset_of(store.path)
    if len(names) > 1 and name not in names:
        raise UserError(
            f"{store.path}: the model has input layers for the data sets {listing(names)}, none for '{name}'; "
            "finetune it on this store, or name the store's folder like one of them"
        )
    return names.index(name) if name in names else 0
