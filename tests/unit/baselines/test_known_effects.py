"""Built-in baselines on a simulated screen whose perturbations have known effects."""

import numpy as np
import pandas as pd
import pytest

from perturbdiff.baselines import predict
from perturbdiff.config import recipes
from perturbdiff.predictions import read_predictions, requests
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.simulation.simulation_stage import simulate
from perturbdiff.splits.splits import make_split, read_split
from perturbdiff.store.pseudobulk import condition_means, correlation_of_changes
from perturbdiff.store.store import Store

SCREEN = [
    "simulate.cells=3600", "simulate.genes=200", "simulate.cell_types=3", "simulate.batches=2",
    "simulate.knockdowns=8", "simulate.drugs=0", "simulate.cytokines=2", "data.num_hvgs=200",
    "split.held_out=[cell_type_2]", "split.train_fraction=0.3", "split.valid_fraction=0",
]  # fmt: skip
CHANGES = ("linear", "nearest-context")  # the other built-in methods predict profiles, not changes


@pytest.fixture(scope="module")
def screen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("screen")
    recipe = recipes.load("demo", SCREEN)
    simulate(folder / "raw", recipe.simulate, seed=1)
    preprocess([folder / "raw" / "counts.h5ad"], folder / "store", recipe.data)
    make_split(folder / "store", folder / "split.parquet", recipe)
    return folder


def mean_correlation(folder, name):
    """Pearson's correlation of predicted with real pseudobulk changes against real controls, mean over conditions."""
    store = Store(folder / "store")
    wanted = requests(store, read_split(folder / "split.parquet"))
    table = store.conditions
    own = table["control"].to_numpy()[wanted["condition"]]
    real = dict(condition_means(store, np.unique([*wanted["condition"], *own])))
    found = read_predictions(
        predict(name, folder / "store", folder / "split.parquet", folder / f"{name}.h5ad")
    )
    found = found[(found.obs["source"] == "predicted").to_numpy()]
    keys = ["cell_type", "batch", "perturbation"]
    rows = pd.DataFrame(found.obs[keys].astype(str)).reset_index(drop=True).groupby(keys).indices
    return np.mean(
        [
            correlation_of_changes(real[c], np.asarray(found.X[rows[key]].mean(axis=0)).ravel(), real[k])
            for c, k, key in zip(
                wanted["condition"],
                own,
                wanted[keys].astype(str).itertuples(index=False, name=None),
                strict=True,
            )
        ]
    )


@pytest.mark.parametrize("name", CHANGES)
def test_methods_that_predict_changes_find_them(screen, name):
    assert mean_correlation(screen, name) >= 0.5


def test_a_copy_of_controls_finds_none(screen):
    assert abs(mean_correlation(screen, "control")) < 0.2
