"""Predictions as whole counts: their sums, depths and genes; the same in parts; as good as log1p to an evaluation."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiny_data import tiny_counts

from perturbdiff import sampling
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config import recipes
from perturbdiff.config.settings import EvaluateConfig, SampleConfig
from perturbdiff.evaluation.readers import inputs, pairing
from perturbdiff.predictions import PredictionWriter, append_controls, read_predictions
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.sampling.count_draws import CountDraws, whole_counts
from perturbdiff.sampling.shards import merge
from perturbdiff.store.store import Store

NEW = ["N0", "N1", "N2"]
CONFIG = SampleConfig(num_steps=2, sets_per_batch=1, values="counts")


@pytest.fixture(scope="module")
def wide(trained, tmp_path_factory):
    """A store of the cells that the model was trained on, with genes that it does not know among its own."""
    folder = tmp_path_factory.mktemp("wide")
    cells = tiny_counts()
    more = ad.AnnData(
        np.random.default_rng(0).poisson(2, (cells.n_obs, len(NEW))).astype(np.float32),
        cells.obs,
        pd.DataFrame(index=NEW),
    )
    every = ad.concat([cells, more], axis=1)[:, [NEW[0], *cells.var_names, *NEW[1:]]].copy()
    every.obs = cells.obs
    every.write_h5ad(folder / "counts.h5ad")
    depth = Store(trained / "store").target_sum
    recipe = recipes.load("tiny", [f"data.target_sum={depth}", "data.num_hvgs=10000"])
    return Store(preprocess([folder / "counts.h5ad"], folder / "store", recipe.data))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    path = tmp_path_factory.mktemp("wanted") / "wanted.csv"
    pd.DataFrame(
        {"cell_type": ["B", "T", "B"], "batch": ["d1", "d2", "d2"], "perturbation": ["p1", "p2", "p2"],
         "n_cells": [40, 16, 21]}
    ).to_csv(path, index=False)  # fmt: skip
    return path


def draw(trained, store, wanted, out, **options):
    given = {"config": CONFIG, "device": "cpu", "conditions": wanted, **options}
    return sampling.sample(trained / "bundle", store.path, out, **given)


@settings(max_examples=40, deadline=None)
@given(
    arrays.arrays(
        np.float64, (9, 4), elements=st.one_of(st.just(0.0), st.floats(1e-3, 40)), fill=st.nothing()
    ),
    st.integers(0, 2**32 - 1),
)
def test_whole_counts_of_any_set(expected, seed):
    counts = whole_counts(expected, np.random.default_rng(seed))
    assert (counts == np.floor(counts)).all()
    assert (counts >= 0).all()
    assert not counts[expected == 0].any()
    enough = expected.sum(axis=0) >= (expected > 0).sum(axis=0)
    assert (counts[:, enough] > 0).tolist() == (expected[:, enough] > 0).tolist()
    assert (counts[:, ~enough] <= 1).all()
    assert (np.abs(counts - expected)[:, enough] <= expected[:, enough] + 1).all()


def test_whole_counts_are_right_on_average():
    rng = np.random.default_rng(1)
    expected = rng.gamma(0.5, 2, (30, 40)) * (rng.random((30, 40)) < 0.4) * rng.random(40)
    sums = np.array([whole_counts(expected, rng).sum(axis=0) for _ in range(1500)])
    error = sums.std(axis=0) / np.sqrt(len(sums))
    assert (np.abs(sums.mean(axis=0) - expected.sum(axis=0)) <= 5 * error + 1e-9).all()
    low = expected.sum(axis=0) < (expected > 0).sum(axis=0)
    assert low.any()
    assert not low.all()


def test_what_was_counted_comes_back():
    counted = np.random.default_rng(2).poisson(0.8, (50, 30)).astype(float)
    np.testing.assert_array_equal(whole_counts(counted, np.random.default_rng(0)), counted)


def test_counts_of_all_genes_of_the_store(trained, wide, wanted, tmp_path):
    made = read_predictions(draw(trained, wide, wanted, tmp_path / "p.h5ad"))
    assert made.X.dtype == np.int32
    assert made.var_names.tolist() == wide.genes
    known = set(Store(trained / "store").genes)
    assert made.var["predicted"].tolist() == [gene in known for gene in wide.genes]
    facts = made.uns["perturbdiff"]
    assert (facts["scale"], facts["target_sum"]) == ("counts", wide.target_sum)
    assert f"{len(wide.genes) - len(known)} of {len(wide.genes)} genes" in facts["unpredicted_genes"]
    predicted, control = (made[made.obs["source"] == source] for source in ("predicted", "control"))
    assert predicted.X.min() >= 0
    assert predicted.X[:, made.var["predicted"].to_numpy()].sum() > 0
    names = wide.obs(["cell"])["cell"]
    rows = [int(np.flatnonzero(names == cell)[0]) for cell in control.obs["cell"]]
    np.testing.assert_array_equal(control.X.toarray(), wide.counts(rows).toarray())
    np.testing.assert_array_equal(control.obs["n_counts"], wide.n_counts[rows])


def test_depth_and_other_genes_are_those_of_matched_control_cells(trained, wide, wanted, tmp_path):
    made = read_predictions(draw(trained, wide, wanted, tmp_path / "p.h5ad"))
    other = [wide.genes.index(name) for name in NEW]
    for (cell_type, batch), group in made.obs.groupby(["cell_type", "batch"], observed=True):
        table = wide.conditions
        mine = (table["cell_type"] == cell_type) & (table["batch"] == batch) & table["is_control"]
        condition = table[mine].iloc[0]
        rows = slice(int(condition["start"]), int(condition["stop"]))
        real = {(float(d), *c) for d, c in zip(
            wide.n_counts[rows], wide.counts(rows).toarray()[:, other].tolist(), strict=True)}  # fmt: skip
        cells = made[group.index[group["source"] == "predicted"]]
        drawn = [
            (float(d), *c)
            for d, c in zip(cells.obs["n_counts"], cells.X.toarray()[:, other].tolist(), strict=True)
        ]
        assert set(drawn) <= real
        size = int(condition["n_cells"])
        assert len(set(drawn[:size])) == min(size, len(drawn))  # none twice before all were used


def test_counts_are_the_log1p_values_at_the_depth(trained, wide, wanted, tmp_path):
    """In each set of 16 cells, the sum of a gene's counts lies around what the log1p predictions say."""
    counts = read_predictions(draw(trained, wide, wanted, tmp_path / "c.h5ad"))
    log1p = read_predictions(
        draw(trained, wide, wanted, tmp_path / "l.h5ad", config=CONFIG.model_copy(update={"values": "log1p"}))
    )
    cells = np.flatnonzero(counts.obs["source"] == "predicted")
    depth = counts.obs["n_counts"].to_numpy()[cells, None] / wide.target_sum
    expected = np.expm1(log1p[cells].X.toarray()) * depth
    drawn = counts[cells, log1p.var_names].X.toarray()
    assert drawn.sum() == pytest.approx(expected.sum(), rel=0.02)
    assert not drawn[expected == 0].any()
    assert np.corrcoef(drawn.sum(axis=0), expected.sum(axis=0))[0, 1] > 0.99


def test_parts_joined_are_the_single_run(trained, wide, wanted, tmp_path):
    whole = draw(trained, wide, wanted, tmp_path / "whole.h5ad")
    parts = [draw(trained, wide, wanted, tmp_path / f"{i}.h5ad", shard=(i, 2)) for i in range(2)]
    joined = merge(parts, tmp_path / "joined.h5ad")
    assert whole.read_bytes() == joined.read_bytes()
    assert not read_predictions(joined).var["predicted"].all()


def test_the_seed_decides(trained, wide, wanted, tmp_path):
    made = [
        read_predictions(draw(trained, wide, wanted, tmp_path / f"{k}.h5ad", seed=seed)).X.toarray()
        for k, seed in enumerate((0, 0, 1))
    ]
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).any()


def test_log1p_stores_have_no_counts(trained):
    store = Store(trained / "store")
    store.input_scale = "log1p"
    with pytest.raises(UserError, match="holds log1p values, so it has no depths"):
        CountDraws(store, GeneMap(store.genes, store.genes, name="it"))


def test_an_evaluation_reads_counts_as_the_log1p_values_they_are(trained, tmp_path):
    """Real cells as predictions, in counts and in log1p, of some of the genes that were measured: the same values."""
    store, views = Store(trained / "store"), []
    real = store.conditions[~store.conditions["is_control"]].iloc[:2]
    for k, predicted in enumerate((None, np.ones(store.n_genes, bool))):
        path = tmp_path / f"{k}.h5ad"
        with PredictionWriter(
            path, store.genes, method="real", control=store.control, target_sum=store.target_sum,
            predicted=predicted,
        ) as writer:  # fmt: skip
            for _, condition in real.iterrows():
                rows = slice(int(condition["start"]), int(condition["stop"]))
                labels = condition[["cell_type", "batch", "perturbation"]]
                obs = pd.DataFrame([labels] * int(condition["n_cells"])).assign(n_counts=store.n_counts[rows])
                writer.append(store.expression(rows) if predicted is None else store.counts(rows), obs)
            append_controls(writer, store, real)
        config = EvaluateConfig()
        truth = inputs.open_truth(store.path, config)
        pairs = pairing.pair(inputs.open_predictions(path, config), truth, config)
        views.append([pairs.predicted.cells(pairs.predicted.rows[c]).toarray() for c in pairs.conditions])
        assert pairs.facts["control_groups_replaced"] == 0
    assert (store.n_counts[:50] > store.counts(slice(0, 50)).sum(axis=1).A1).any()
    for log1p, counts in zip(*views, strict=True):
        np.testing.assert_allclose(counts, log1p, rtol=1e-6)


def test_a_named_depth_must_be_there(tmp_path):
    adata = ad.AnnData(
        np.ones((2, 2), np.float32),
        pd.DataFrame({"perturbation": ["p1", "control"]}, index=["a", "b"]),
        pd.DataFrame(index=["g1", "g2"]),
        uns={"perturbdiff": {"kind": "predictions", "scale": "counts", "control": "control", "depth": "n"}},
    )
    adata.write_h5ad(tmp_path / "p.h5ad")
    with pytest.raises(UserError, match="no obs column 'n'"):
        inputs.open_predictions(tmp_path / "p.h5ad", EvaluateConfig())
    adata.obs["n"] = [1.0, np.nan]
    adata.write_h5ad(tmp_path / "q.h5ad")
    with pytest.raises(UserError, match="must have the depth of each cell"):
        inputs.open_predictions(tmp_path / "q.h5ad", EvaluateConfig())
