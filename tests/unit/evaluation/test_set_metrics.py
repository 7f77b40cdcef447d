"""Metrics whose points are sets of cells: by hand, for known families, and from files."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff.conditions.cell_distances import energy_distance
from perturbdiff.config.settings import DataConfig, EvaluateConfig
from perturbdiff.evaluation.ceiling_stage import ceiling
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.evaluation.metrics import set_metrics as sm
from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.readers.cell_sources import grouped
from perturbdiff.evaluation.readers.inputs import open_truth
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store

GENES = [f"g{i}" for i in range(12)]
CONFIG = EvaluateConfig(
    metrics=("sets", "energy_distance"), bootstrap=0, embed_conditions=0, ceiling_splits=2
)


def family(rng, between: float, *, sets: int = 30, size: int = 12, shift: float = 0.0) -> np.ndarray:
    """Return sets [S, m, G] of positive values whose factor moves all genes of a set."""
    factor = rng.normal(0, between, (sets, 1, 1)) * np.linspace(-1, 1, len(GENES))
    return np.log1p(rng.poisson(np.exp(1.0 + shift + factor), (sets, size, len(GENES)))).astype(np.float32)


def test_the_catalogue_has_the_metrics_in_their_order():
    assert tuple(n for n, m in METRICS.items() if m.family == "sets") == sm.SET_METRICS


def test_energy_score_by_hand():
    across, own = np.array([[1.0, 3.0], [2.0, 2.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    assert sm.family_score(across, own) == pytest.approx(2.0 - 0.5)
    assert np.isnan(sm.family_score(across[:1], own[:1, :1]))
    assert np.isnan(sm.family_score(across[:, :0], own))


def test_sets_are_as_far_apart_as_the_root_of_their_energy_distance():
    one, two = np.zeros((1, 2, 1)), np.full((1, 2, 1), 3.0)
    across, own, _ = sm.SetDistances.of(one, two).apart()
    assert across == pytest.approx(np.sqrt(2 * 3.0))
    assert own == pytest.approx(0.0)
    rng = np.random.default_rng(0)
    x, y = family(rng, 1.0, sets=2), family(rng, 1.0, sets=3)
    unbiased = sm.SetDistances.of(x, y).unbiased()[0]
    assert unbiased[1, 2] == pytest.approx(energy_distance(x[1], y[2]))


def test_the_true_family_has_the_least_score_and_a_ratio_near_one():
    rng = np.random.default_rng(1)
    real = family(rng, 0.5, size=40)
    found = {b: sm.set_metrics(family(rng, b, sets=39, size=40), real, rng) for b in (0.0, 0.5, 2.0)}
    scores = {b: values["family_score"] for b, values in found.items()}
    assert min(scores, key=lambda b: scores[b]) == 0.5
    assert found[0.5]["set_variance_ratio"] == pytest.approx(1.0, abs=0.5)
    assert abs(found[0.0]["set_variance_ratio"]) < 0.1
    assert found[0.0]["set_range"] < 0.5 < found[0.5]["set_range"]
    assert found[0.0]["set_recall"] < 0.6 < found[0.5]["set_recall"]
    assert found[2.0]["set_precision"] < 0.7 < found[0.5]["set_precision"]


def test_the_ratio_has_no_value_where_true_sets_do_not_differ():
    rng = np.random.default_rng(2)
    alike = [sm.variance_ratio(family(rng, 0.5), family(rng, 0.0), rng) for _ in range(8)]
    assert np.isnan(alike).sum() >= 6
    assert np.isfinite(sm.variance_ratio(family(rng, 0.0), family(rng, 0.5), rng))


def test_sets_are_cut_to_a_size_that_most_of_them_have():
    sizes = [np.arange(n) for n in (3, 20, 30, 40)]
    assert sm.common_size(sizes, sizes) == 3
    assert sm.common_size(sizes[1:], [np.arange(400)] * 5) == 20
    assert sm.common_size([np.arange(400)], [np.arange(400)]) == sm.MOST_CELLS
    assert sm.common_size(sizes, []) == 0
    rows = sm.drawn_rows([np.arange(100 * k, 100 * k + 60) for k in range(60)], 50, np.random.default_rng(0))
    assert rows.shape == (sm.MOST_SETS, 50)
    assert all(len(set(own)) == 50 and len(set(own // 100)) == 1 for own in rows)


def side(seed: int, between: float, wells: str | None) -> ad.AnnData:
    """Return two perturbations and controls, 10 sets of 12 cells each."""
    rng = np.random.default_rng(seed)
    blocks = [family(rng, between, sets=10, shift=shift) for shift in (0.0, 0.6, 1.2)]
    obs = pd.DataFrame({"perturbation": np.repeat(["control", "p1", "p2"], 120), "source": "predicted"})
    if wells is not None:
        numbers = np.tile(np.repeat(np.arange(10), 12), 3)
        obs[wells] = numbers if wells == "set" else [f"w{n}" for n in numbers]
    obs.index = obs.index.astype(str)
    cells = ad.AnnData(sp.csr_matrix(np.concatenate(blocks).reshape(360, -1)), obs, pd.DataFrame(index=GENES))
    cells.uns["perturbdiff"] = {"scale": "log1p", "control": "control", "target_sum": 1e4}
    return cells


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    made = {
        "real": (0, 0.7, "well"),
        "apart": (1, 0.7, "set"),
        "alike": (2, 0.0, "set"),
        "none": (3, 0.7, None),
    }
    for name, given in made.items():
        side(*given).write_h5ad(folder / f"{name}.h5ad")
    return folder


KNOWN = CONFIG.model_copy(update={"set_column": "well"})


def means(folder):
    table = pd.read_csv(folder / "aggregate.csv")
    return table[table["scope_kind"] == "pooled"].set_index("metric")


def test_files_with_sets_are_scored_with_chance_and_a_ceiling(files, tmp_path):
    real = files / "real.h5ad"
    found = {
        name: means(evaluate(files / f"{name}.h5ad", real, tmp_path / name, KNOWN, threads=k))
        for k, name in enumerate(("apart", "alike"), start=1)
    }
    top = means(ceiling(real, tmp_path / "top", KNOWN))
    for table in (*found.values(), top):
        assert set(sm.SET_METRICS) <= set(table.index)
    apart, alike = found["apart"]["nanmean"], found["alike"]["nanmean"]
    assert apart["family_score"] < alike["family_score"] < found["alike"]["chance"]["family_score"]
    assert alike["set_variance_ratio"] < 0.2 < apart["set_variance_ratio"]
    assert alike["set_recall"] < apart["set_recall"]
    assert top["nanmean"]["family_score"] < alike["family_score"]
    assert top["split_sd"]["family_score"] > 0
    conditions = pd.read_csv(tmp_path / "apart" / "conditions.csv")
    assert (conditions[["n_sets", "n_predicted_sets"]] == 10).all(axis=None)


def test_where_sets_are_unknown_there_are_no_such_metrics(files, tmp_path, caplog):
    real = files / "real.h5ad"
    plain = means(evaluate(files / "apart.h5ad", real, tmp_path / "plain", CONFIG))
    assert set(plain.index) == {"energy_distance"}
    assert not [r for r in caplog.records if "are a set" in r.message]
    without = means(evaluate(files / "none.h5ad", real, tmp_path / "without", KNOWN))
    assert set(without.index) == {"energy_distance"}
    only = KNOWN.model_copy(update={"metrics": ("sets",)})
    with pytest.raises(UserError, match="--set-col"):
        evaluate(files / "none.h5ad", real, tmp_path / "only", only)


def test_a_column_that_is_not_there_is_named(files, tmp_path):
    with pytest.raises(UserError, match="'plate'"):
        evaluate(
            files / "apart.h5ad",
            files / "real.h5ad",
            tmp_path / "x",
            CONFIG.model_copy(update={"set_column": "plate"}),
        )


def test_a_store_knows_its_sets(tmp_path):
    counts = side(0, 0.7, "well")
    counts.X = sp.csr_matrix(np.rint(np.expm1(counts.X.toarray())))
    counts.write_h5ad(tmp_path / "counts.h5ad")
    columns = {"cell_type_key": None, "batch_key": None, "num_hvgs": None, "set_key": "well"}
    store = preprocess(
        [tmp_path / "counts.h5ad"], tmp_path / "store", DataConfig(**columns, control="control")
    )
    cells, labels = open_truth(store, CONFIG), Store(store).obs(["set"])["set"].astype(str).to_numpy()
    assert cells.sets is not None
    for sets in grouped(cells.rows, cells.sets).values():
        assert sorted(set(labels[rows].tolist()).pop() for rows in sets) == [f"w{n}" for n in range(10)]
        assert all(len(rows) == 12 and len(set(labels[rows])) == 1 for rows in sets)
