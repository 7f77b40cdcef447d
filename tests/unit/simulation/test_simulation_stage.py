"""The simulator: the truth it writes is the truth of the counts, and nothing depends on how it was computed."""

import tracemalloc

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse, stats

from perturbdiff.config.settings import SimulateConfig
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.simulation import simulated_counts
from perturbdiff.simulation.simulated_counts import draw_counts
from perturbdiff.simulation.simulation_stage import draw_blocks, perturbation_vectors, simulate
from perturbdiff.simulation.true_effects import TINY, draw_plan, draw_truth

SMALL = SimulateConfig(
    cells=900, genes=120, cell_types=2, batches=2, knockdowns=4, drugs=1, cytokines=1, tiny_fraction=0.1
)
# large conditions and no latent: what is left between truth and pseudobulk is counting noise
CLEAN = SMALL.model_copy(
    update={
        "cells": 40_000, "genes": 150, "batches": 1, "wells": 1, "latent_strength": 0.0, "latent_shift": 0.0,
        "tiny_fraction": 0.0, "size_spread": 0.0, "batch_spread": 0.0, "counts_per_gene": 2.0,
    }
)  # fmt: skip
OUTPUTS = ("counts.h5ad", "effects.parquet", "conditions.csv", "manifest.json")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("small") / "out", SMALL, seed=3)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    out = simulate(tmp_path_factory.mktemp("clean") / "out", CLEAN, seed=1)
    return anndata.read_h5ad(out / "counts.h5ad"), pd.read_parquet(out / "effects.parquet")


def contents(out):
    return [(out / name).read_bytes() for name in OUTPUTS]


def shares(data, rows):
    """Mean share of counts of each gene over cells."""
    counts = sparse.csr_matrix(data.X)[rows]
    return np.asarray(counts.multiply(1 / counts.sum(1)).tocsr().mean(0)).ravel()


@pytest.mark.parametrize("block_size", [1, 37, 900])
def test_bytes_depend_on_the_seed_and_not_on_the_block_size(small, tmp_path, block_size):
    again = simulate(tmp_path / "again", SMALL, seed=3, block_size=block_size)
    assert contents(again) == contents(small)


def test_another_seed_gives_other_data(small, tmp_path):
    other = simulate(tmp_path / "other", SMALL, seed=4)
    assert all(a != b for a, b in zip(contents(other), contents(small), strict=True))


def test_an_equal_run_is_skipped(small):
    before = (small / "counts.h5ad").stat().st_mtime_ns
    simulate(small, SMALL, seed=3)
    assert (small / "counts.h5ad").stat().st_mtime_ns == before


def test_file_opens_as_anndata_with_raw_counts(small):
    data = anndata.read_h5ad(small / "counts.h5ad")
    assert data.shape == (900, 120)
    assert data.obs_names.is_unique
    assert np.issubdtype(data.X.dtype, np.integer)
    assert data.X.has_canonical_format
    assert data.X.data.min() >= 1
    for column in ("perturbation", "agent", "kind", "cell_type", "batch", "well"):
        assert isinstance(data.obs[column].dtype, pd.CategoricalDtype), column
    backed = anndata.read_h5ad(small / "counts.h5ad", backed="r")
    np.testing.assert_array_equal(backed[10:13].to_memory().X.toarray(), data[10:13].X.toarray())
    backed.file.close()


def test_conditions_table_counts_the_cells(small):
    table = pd.read_csv(small / "conditions.csv")
    obs = anndata.read_h5ad(small / "counts.h5ad").obs
    names = ["cell_type", "batch", "perturbation"]
    expected = table.set_index(names)["n_cells"].to_dict()
    assert obs.groupby(names, observed=True).size().to_dict() == expected
    assert table["n_cells"].sum() == 900
    drugs = table[table["kind"] == "drug"]
    labels = [f"{agent}@{dose:g}" for agent, dose in zip(drugs["agent"], drugs["dose"], strict=True)]
    assert drugs["perturbation"].tolist() == labels
    assert obs["dose"].isna().eq(obs["kind"] != "drug").all()


def test_tiny_conditions_exist_and_every_context_has_controls():
    table = draw_plan(SMALL, draw_truth(SMALL, 0), 0).conditions
    treated = table[table["perturbation"] > 0]["n_cells"]
    assert (treated <= TINY).sum() == 4  # a tenth of 32 conditions, rounded up
    assert treated.min() >= 1
    controls = table[table["perturbation"] == 0]
    assert len(controls) == 4
    assert controls["n_cells"].min() >= 10
    assert controls["n_cells"].sum() == round(0.15 * 900)


def test_condition_sizes_are_heavy_tailed():
    config = SimulateConfig(cells=50_000, knockdowns=100, drugs=0, cytokines=0, size_spread=0.8)
    table = draw_plan(config, draw_truth(config, 0), 0).conditions
    log_size = np.log(table.query("perturbation > 0 and n_cells > @TINY")["n_cells"])
    assert 0.5 < log_size.std() < 1.1
    assert log_size.max() - log_size.median() > 1.2


def test_pseudobulk_fold_changes_recover_the_written_effects(clean):
    data, effects = clean
    obs, found, true = data.obs, [], []
    for (label, cell_type), rows in effects.groupby(["perturbation", "cell_type"], observed=True):
        of_type = (obs["cell_type"] == cell_type).to_numpy()
        control = shares(data, of_type & (obs["perturbation"] == "control").to_numpy())
        treated = shares(data, of_type & (obs["perturbation"] == label).to_numpy())
        seen = control > 5e-4
        found.append(np.log(np.maximum(treated, 1e-6) / control)[seen])
        true.append(rows.set_index("gene")["log_fold_change"].reindex(data.var_names).to_numpy()[seen])
    found, true = np.concatenate(found), np.concatenate(true)
    assert np.corrcoef(found, true)[0, 1] > 0.95
    assert np.polyfit(true, found, 1)[0] == pytest.approx(1.0, abs=0.05)
    assert np.abs(true).max() > 1.0  # there is something to find


def test_a_knock_down_lowers_its_own_gene(clean):
    data, effects = clean
    for gene in data.obs.loc[data.obs["kind"] == "knockdown", "agent"].unique():
        own = effects[(effects["perturbation"] == gene) & (effects["gene"] == gene)]
        assert (own["log_fold_change"] < np.log(0.55)).all()
        column = data.var_names.get_loc(gene)
        assert shares(data, (data.obs["agent"] == gene).to_numpy())[column] < (
            0.6 * shares(data, (data.obs["agent"] == "control").to_numpy())[column]
        )


def test_response_grows_with_dose():
    config = SimulateConfig(doses=(0.1, 1.0, 10.0), drugs=3)
    truth = draw_truth(config, 2)
    table = truth.perturbations
    for _, rows in table[table["kind"] == "drug"].groupby("agent"):
        assert rows["dose"].is_monotonic_increasing
        for cell_type in range(3):
            effects = np.abs([truth.effect(p, cell_type) for p in rows.index])
            assert (np.diff(effects, axis=0) >= 0).all()
            assert np.linalg.norm(effects[2]) > 2 * np.linalg.norm(effects[0])


def test_specificity_sets_how_alike_cell_types_respond():
    def agreement(specificity):
        config = SimulateConfig(knockdowns=60, drugs=0, cytokines=0, specificity=specificity, programmes=30)
        weights = draw_truth(config, 0).weights[1:]
        first, second = weights[:, 0], weights[:, 1]
        cosine = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
        return cosine.mean()

    assert agreement(0.0) == pytest.approx(1.0)
    assert agreement(0.3) == pytest.approx(0.7, abs=0.1)
    assert agreement(1.0) == pytest.approx(0.0, abs=0.1)


def between_sets(latent_strength, latent_shift):
    """F statistics between the wells of one large condition, along its response and along the shift."""
    config = SimulateConfig(
        cells=6000, genes=200, cell_types=1, batches=1, knockdowns=0, drugs=0, cytokines=1, wells=10,
        control_fraction=0.5, tiny_fraction=0.0, latent_strength=latent_strength, latent_shift=latent_shift,
    )  # fmt: skip
    truth = draw_truth(config, 5)
    plan = draw_plan(config, truth, 5)
    (block,) = draw_blocks(config, truth, plan, 5, 6000)
    counts = sparse.csr_matrix((block.data, block.indices, np.r_[0, np.cumsum(block.per_cell)]), (6000, 200))
    log = np.log1p(counts.multiply(200.0 / counts.sum(1)).toarray())
    perturbation = plan.of_set("perturbation")[plan.set_of_cell]
    scores = {0: log @ truth.direction, 1: log @ truth.effect(1, 0)}
    statistic = {}
    for p, score in scores.items():
        sets = [s for s in range(len(plan.sets)) if plan.of_set("perturbation")[s] == p]
        members = [score[(plan.set_of_cell == s) & (perturbation == p)] for s in sets]
        latent = plan.sets["latent"].to_numpy()[sets]
        correlation = np.corrcoef(latent, [m.mean() for m in members])[0, 1]
        statistic[p] = (stats.f_oneway(*members).statistic, correlation)
    return statistic


def test_latent_factor_makes_sets_of_a_condition_differ():
    without = between_sets(0.0, 0.0)
    assert without[0][0] < 3
    assert without[1][0] < 3
    latent = between_sets(0.3, 0.15)
    for p in (0, 1):  # controls by the shift, perturbed cells by the strength
        assert latent[p][0] > 6
        assert latent[p][1] > 0.9


@pytest.mark.parametrize(("mean", "dispersion"), [(0.05, 0.5), (1.0, 2.0), (8.0, 0.1), (300.0, 0.05)])
def test_counts_are_negative_binomial(mean, dispersion):
    cells, genes = 2000, 20
    counts = draw_counts(
        7,
        np.arange(cells),
        np.zeros(cells, np.int64),
        np.ones((1, genes), np.float32),
        np.zeros((0, genes), np.float32),
        depth=np.array([mean * genes]),
        depth_spread=0.0,
        dispersion=np.full(genes, dispersion),
    )
    dense = sparse.csr_matrix((counts.data, counts.indices, np.r_[0, np.cumsum(counts.per_cell)])).toarray()
    size = 1 / dispersion
    law = stats.nbinom(size, size / (size + mean))
    draws = dense.ravel()
    assert draws.mean() == pytest.approx(mean, rel=0.1)
    assert draws.var() == pytest.approx(mean + dispersion * mean**2, rel=0.12)
    for k in (0, int(mean), int(mean + 2 * law.std())):
        assert (draws <= k).mean() == pytest.approx(law.cdf(k), abs=0.01)
    correlation = np.corrcoef(dense[:-1].ravel(), dense[1:].ravel())[0, 1]
    assert abs(correlation) < 0.03  # neighbouring cells are independent


def test_depth_is_log_normal_and_cells_co_vary():
    config = SimulateConfig(cells=4000, genes=300, cell_types=1, batches=1, context_depth_spread=0.0)
    truth = draw_truth(config, 0)
    plan = draw_plan(config, truth, 0)
    (block,) = draw_blocks(config, truth, plan, 0, 4000)
    ends = np.cumsum(block.per_cell)
    depth = np.add.reduceat(block.data, np.r_[0, ends[:-1]])
    assert np.median(depth) == pytest.approx(0.9 * 300, rel=0.05)
    assert np.log(depth).std() == pytest.approx(config.depth_spread, rel=0.15)
    assert abs(stats.skew(np.log(depth))) < 0.3


def test_memory_does_not_grow_with_the_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(simulated_counts, "_PIECE", 4096)

    def peak(cells):
        config = SimulateConfig(
            cells=cells, genes=40, cell_types=1, batches=1, knockdowns=2, drugs=0, cytokines=0
        )
        tracemalloc.start()
        simulate(tmp_path / str(cells), config, seed=0, block_size=500)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(2_000)
    grown = peak(60_000) - peak(10_000)  # both beyond the size of a piece written at once
    assert grown < 16 * 50_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cells": 100}, "simulate.cells=100 is too few .* at least"),
        ({"knockdowns": 200}, "simulate.knockdowns=200 needs as many genes"),
        ({"doses": ()}, "simulate.doses is empty"),
        ({"doses": (0.0, 1.0)}, "simulate.doses must be positive"),
        ({"doses": (1.0, 1.0)}, "simulate.doses must be positive and different"),
        ({"knockdowns": 0, "drugs": 0, "cytokines": 0}, "nothing to simulate"),
    ],
)
def test_impossible_experiments_are_refused_before_writing(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        simulate(tmp_path / "out", SMALL.model_copy(update=change), seed=0)
    assert not (tmp_path / "out").exists()


def test_manifest_tells_what_came_out(small):
    manifest = provenance.read_manifest(small)
    assert manifest is not None
    assert manifest["seed"] == 3
    assert manifest["results"]["cells"] == 900
    assert manifest["results"]["conditions"] == 36
    assert 0 < manifest["results"]["density"] < 1


@pytest.mark.parametrize("quality", [1.0, 0.5, 0.0])
def test_vectors_know_the_effects_as_well_as_asked(quality):
    config = SMALL.model_copy(update={"knockdowns": 100, "cells": 10_000})
    truth = draw_truth(config, 1)
    found, best = (
        perturbation_vectors(config, truth, q, 1).set_index("name").to_numpy().ravel() for q in (quality, 1.0)
    )
    assert len(found) == 104 * 32
    assert abs(np.corrcoef(found, best)[0, 1] - quality) < 0.05


def test_vectors_are_written_as_a_semantic_table_if_asked_for(small, tmp_path):
    assert not (small / "vectors.parquet").exists()
    out = simulate(tmp_path / "out", SMALL.model_copy(update={"vector_quality": 1.0}), seed=3)
    names = EmbeddingTable.read(out / "vectors.parquet").names
    assert set(names) == set(pd.read_csv(out / "conditions.csv")["perturbation"]) - {"control"}
