"""A variant is chosen by name and stays itself from training to the cells that come out."""

import numpy as np
import pytest

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.predictions import read_predictions
from perturbdiff.sampling import sample
from perturbdiff.training.training_stages import train


@pytest.mark.parametrize("name", ["paper", "released", "recommended"])
def test_a_variant_trains_and_samples(trained, tmp_path, name):
    recipe = recipes.load(
        "tiny",
        [f"variant={name}", "train.max_steps=2", "train.warmup_steps=1", "sample.num_steps=3",
         "train.learning_rate=1e-3"],
    )  # fmt: skip
    store, split = trained / "store", trained / "split.parquet"
    bundle = train(store, split, tmp_path / "bundle", recipe, device="cpu")
    assert Bundle.load(bundle).config.variant == name
    out = sample(bundle, store, tmp_path / "cells.h5ad", split=split, device="cpu")
    predicted = read_predictions(out)
    cells = predicted[(predicted.obs["source"] == "predicted").to_numpy()].to_memory().X.toarray()
    assert cells.shape[0] > 0
    assert np.isfinite(cells).all()
    assert (cells >= 0).all()
