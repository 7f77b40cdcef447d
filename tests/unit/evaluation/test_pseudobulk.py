"""DE of replicates: the sums, which replicates are compared and how, and what is said where it cannot be done."""

from __future__ import annotations

import importlib.util

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation import evaluate, pseudobulk_de
from perturbdiff.evaluation.pseudobulk_de import add, replicate_test
from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError

GENES = 60
installed = pytest.mark.skipif(
    importlib.util.find_spec("pydeseq2") is None, reason="pydeseq2 is not installed (extra pseudobulk)"
)


def study(rng, donors=4, cells=25):
    """Return counts whose donors differ in genes 20 to 39; perturbation A changes genes 0 to 9."""
    table = pd.DataFrame(
        [(d, p) for d in range(donors) for p in ("control", "A", "B") for _ in range(cells)],
        columns=["donor", "perturbation"],
    )
    rates = np.random.default_rng(1).lognormal(1.5, 0.5, GENES)
    expected = np.tile(rates, (len(table), 1))
    expected[table["perturbation"] == "A", :10] *= 3
    sway = rng.lognormal(0, 0.8, (donors, 3, 20))  # of each donor and perturbation: not of the perturbation
    arm = table["perturbation"].map({"control": 0, "A": 1, "B": 2})
    expected[:, 20:40] *= sway[table["donor"], arm]
    counts = rng.poisson(expected).astype(np.float32)
    obs = table.assign(donor=[f"d{d}" for d in table["donor"]], cell_type="T").astype(str)
    obs.index = [f"c{i}" for i in range(len(obs))]
    return ad.AnnData(sp.csr_matrix(counts), obs, pd.DataFrame(index=[f"g{i}" for i in range(GENES)]))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    truth, other = (study(np.random.default_rng(seed)) for seed in (0, 9))
    paths = [folder / "truth.h5ad", folder / "predicted.h5ad"]
    truth.write_h5ad(paths[0])
    other.write_h5ad(paths[1])
    return paths


def run(files, out, column="donor", **more):
    config = EvaluateConfig(
        **{"control": "control", "scale": "counts", "replicate_column": column, "metrics": ("DEOver",)} | more
    )
    return evaluate(files[1], files[0], out, config, threads=1)


@installed
def test_genes_of_the_perturbation_hold_and_those_of_donors_do_not(files, tmp_path):
    out = run(files, tmp_path / "out")
    table = pd.read_parquet(out / "de_pseudobulk.parquet")
    summary = pd.read_csv(out / "pseudobulk.csv").set_index(["scope_kind", "perturbation"])
    row = summary.loc[("pooled", "A")]
    assert (row["design"], row["replicates"], row["control_replicates"]) == ("paired", 4, 4)
    assert row["n_DE_cells"] > 18  # of genes that A changes, and of genes that donors do
    own = table[(table["scope_kind"] == "pooled") & (table["perturbation"] == "A")].set_index("gene")
    found = set(own.index[own["q"] < 0.05])
    assert len(own) == GENES
    assert {f"g{i}" for i in range(10)} <= found
    assert len(found) <= 14
    assert (own["log2fc"].iloc[:10] > 1).all()
    assert 10 <= row["n_survive"] < row["n_DE_cells"]
    assert row["share"] == pytest.approx(row["n_survive"] / row["n_DE_cells"])
    none = summary.loc[("pooled", "B")]
    assert none["n_survive"] < 0.4 * none["n_DE_cells"]
    facts = untrusted.read(out / "summary.json", "JSON")["pseudobulk"]
    assert (facts["column"], facts["tested"], facts["tests"]) == ("donor", 2, 2)
    assert 0 < facts["survive"] < 1


@installed
def test_a_test_is_within_replicates_where_both_sides_share_them():
    rng = np.random.default_rng(3)
    levels = rng.lognormal(4, 0.6, GENES)
    own = {f"d{i}": np.append(rng.poisson(levels * rng.lognormal(0, 1, GENES)), 20.0) for i in range(4)}
    changed = {name: sums.copy() for name, sums in own.items()}
    for sums in changed.values():
        sums[:3] = np.rint(3 * sums[:3])
    paired = replicate_test(changed, own, GENES)
    renamed = {f"other {name}": sums for name, sums in own.items()}
    unpaired = replicate_test(changed, renamed, GENES)
    assert (paired.design, unpaired.design) == ("paired", "unpaired")
    assert paired.p[:3].max() < 1e-3 < unpaired.p[:3].min()
    np.testing.assert_allclose(paired.log2_fold[:3], np.log2(3), atol=0.4)
    again = replicate_test(changed, dict(reversed(own.items())), GENES)
    np.testing.assert_array_equal(again.p, paired.p)  # whatever the order of the replicates


@installed
def test_genes_without_counts_are_not_tested():
    rng = np.random.default_rng(4)
    sides = [{f"{s}{i}": np.append(rng.poisson(30, GENES), 15.0) for i in range(3)} for s in "ab"]
    for side in sides:
        for sums in side.values():
            sums[5] = 0
    found = replicate_test(*sides, GENES)
    assert np.flatnonzero(np.isnan(found.p)).tolist() == [5]
    assert found.reason == ""


def test_too_few_replicates_are_told():
    enough, few = np.append(np.full(GENES, 9.0), 30), np.append(np.full(GENES, 9.0), 3)
    found = replicate_test({"d0": enough, "d1": few}, {"d0": enough, "d2": enough}, GENES)
    assert "1 replicates of at least 10 cells, 2 of the controls" in found.reason
    assert np.isnan(found.p).all()
    nothing = {name: np.append(np.zeros(GENES), 30.0) for name in ("d0", "d1")}
    assert "two genes" in replicate_test(nothing, nothing, GENES).reason


def test_sums_are_those_of_the_counts(files, monkeypatch, tmp_path):
    seen = []
    nothing = np.full(GENES, np.nan)
    monkeypatch.setattr(pseudobulk_de.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(
        pseudobulk_de,
        "replicate_test",
        lambda *sides: (
            seen.append(sides) or pseudobulk_de.Tested(nothing, nothing, nothing, "", (0, 0), "none")
        ),
    )
    run(files, tmp_path / "out")
    truth = ad.read_h5ad(files[0])
    perturbed, controls, _ = seen[0]
    for sums, name in ((perturbed, "A"), (controls, "control")):
        assert sorted(sums) == ["d0", "d1", "d2", "d3"]
        for donor, found in sums.items():
            rows = (truth.obs["donor"] == donor) & (truth.obs["perturbation"] == name)
            expected = np.asarray(truth.X[rows.to_numpy()].sum(axis=0)).ravel()
            np.testing.assert_allclose(found, np.append(expected, rows.sum()))
    left = {"d0": np.array([1.0, 2.0])}
    assert add(left, {"d0": np.array([1.0, 1.0]), "d1": np.array([5.0, 1.0])})["d0"].tolist() == [2.0, 3.0]


def test_what_cannot_be_done_is_told_in_one_line(files, tmp_path, monkeypatch, caplog):
    def text(out):
        (finding,) = [
            f for f in untrusted.read(out / "summary.json", "JSON")["findings"] if f["kind"] == "pseudobulk"
        ]
        assert not (out / "de_pseudobulk.parquet").exists()
        return finding["text"]

    assert "need no test" in text(run(files, tmp_path / "one", metrics=("PDCorr",)))
    assert "no DE of pseudobulks" in caplog.text
    monkeypatch.setattr(pseudobulk_de.importlib.util, "find_spec", lambda _: None)
    assert "pip install 'perturbdiff[pseudobulk]'" in text(run(files, tmp_path / "two"))
    logged = []
    for i, path in enumerate(files):
        cells = ad.read_h5ad(path)
        cells.X = cells.X.log1p() / 2
        logged.append(tmp_path / f"{i}.h5ad")
        cells.write_h5ad(logged[-1])
    assert "log1p values" in text(run(logged, tmp_path / "three", scale="log1p"))
    with pytest.raises(UserError, match="no obs column 'doner'.*donor"):
        run(files, tmp_path / "four", column="doner")
    assert not (tmp_path / "four").exists()
    config = EvaluateConfig(control="control", scale="counts", replicate_column="donor")
    with pytest.raises(UserError, match="--shard"):
        evaluate(files[1], files[0], tmp_path / "five", config, shard=(0, 2))
