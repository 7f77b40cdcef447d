"""Sampling from a bundle: shape, units, independence of shards, refusals."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff import sampling
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config.settings import SampleConfig
from perturbdiff.predictions import read_predictions, requests
from perturbdiff.runtime.errors import UserError
from perturbdiff.sampling.sampling_stage import method_of
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store

LABELS = ["cell_type", "batch", "perturbation"]


def draw(trained, out, **options):
    if "conditions" not in options:
        options["split"] = trained / "split.parquet"
    return read_predictions(
        sampling.sample(trained / "bundle", trained / "store", out, device="cpu", **options)
    )


def predicted(adata):
    cells = adata[adata.obs["source"] == "predicted"]
    return cells.obs[LABELS].astype(str).reset_index(drop=True), cells.X.toarray()


def table(tmp_path, **columns):
    path = tmp_path / f"wanted{len(list(tmp_path.iterdir()))}.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_predicts_every_test_condition_with_its_number_of_cells(trained, tmp_path):
    adata = draw(trained, tmp_path / "p.h5ad")
    store = Store(trained / "store")
    wanted = requests(store, read_split(trained / "split.parquet"))
    labels, x = predicted(adata)
    counts = labels.groupby(LABELS).size()
    assert counts.to_dict() == wanted.set_index(LABELS)["n_cells"].to_dict()
    bundle = Bundle.load(trained / "bundle")
    assert list(adata.var_names) == bundle.genes
    assert x.min() >= 0
    assert (x <= bundle.model.maximum.numpy() + 1e-6).all()
    assert (x == 0).any()
    assert sp.issparse(adata.X)
    assert adata.X.dtype == np.float32
    facts = adata.uns["perturbdiff"]
    assert (facts["scale"], facts["target_sum"]) == ("log1p", store.target_sum)


def test_the_real_controls_follow(trained, tmp_path):
    adata = draw(trained, tmp_path / "p.h5ad")
    store = Store(trained / "store")
    control = adata[adata.obs["source"] == "control"]
    expected = store.conditions.merge(adata.obs[["cell_type", "batch"]].astype(str).drop_duplicates())
    expected = expected[expected["is_control"]]
    rows = [np.arange(a, b) for a, b in zip(expected["start"], expected["stop"], strict=True)]
    real = store.expression(np.concatenate(rows))
    np.testing.assert_array_equal(control.X.toarray(), real.toarray())
    assert set(control.obs["cell"]) == set(store.obs(["cell"])["cell"][np.concatenate(rows)])


def test_shards_together_are_the_whole(trained, tmp_path):
    settings = SampleConfig(num_steps=3, sets_per_batch=1, guidance=1.0)
    wanted = table(
        tmp_path, cell_type=["B", "B", "T", "T"], batch=["d1", "d2"] * 2, perturbation=["p1", "p2"] * 2,
        n_cells=[40, 5, 12, 20],
    )  # fmt: skip
    options = {"conditions": wanted, "config": settings}
    whole = draw(trained, tmp_path / "whole.h5ad", **options)
    pieces = [draw(trained, tmp_path / f"{i}.h5ad", shard=(i, 3), **options) for i in range(3)]
    assert all(piece.n_obs for piece in pieces)
    for source in ("predicted", "control"):
        mine = [p[p.obs["source"] == source] for p in pieces]
        full = whole[whole.obs["source"] == source]
        np.testing.assert_array_equal(np.concatenate([m.X.toarray() for m in mine]), full.X.toarray())
        assert pd.concat([m.obs for m in mine])["cell"].tolist() == full.obs["cell"].tolist()


def test_a_condition_does_not_depend_on_the_others(trained, tmp_path):
    alone = table(tmp_path, cell_type=["B"], batch=["d2"], perturbation=["p1"], n_cells=[20])
    settings = SampleConfig(num_steps=3)
    _, x = predicted(draw(trained, tmp_path / "a.h5ad", conditions=alone, config=settings))
    more = table(
        tmp_path, cell_type=["T", "B"], batch=["d1", "d2"], perturbation=["p2", "p1"], n_cells=[5, 20]
    )
    labels, both = predicted(draw(trained, tmp_path / "b.h5ad", conditions=more, config=settings))
    np.testing.assert_allclose(both[(labels["perturbation"] == "p1").to_numpy()], x, atol=1e-5)
    _, other = predicted(draw(trained, tmp_path / "c.h5ad", conditions=alone, config=settings, seed=1))
    assert not np.allclose(other, x, atol=1e-3)


def test_a_table_of_conditions(trained, tmp_path, caplog):
    caplog.set_level("INFO", "perturbdiff")
    wanted = table(
        tmp_path, cell_type=["B", "T"], batch=["d1", "new"], perturbation=["p1", "p2"], n_cells=[7, None]
    )
    adata = draw(trained, tmp_path / "p.zarr", conditions=wanted)
    labels, _ = predicted(adata)
    assert labels.groupby("batch").size().to_dict() == {"d1": 7, "new": 16}  # a set of the model's size
    assert "batches unknown to the model, predicted as an average batch: new" in caplog.text
    assert "controls of the same cell type" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("B", "d1", "p9"), "not trained with perturbation p9"),
        (("C", "d1", "p1"), "neither .*store nor the model has the cell type 'C'; the store has B, T"),
        (("B", "d22", "p1"), "the batch 'd22', did you mean 'd2'. a batch that is really new"),
        (("B", "d1", "p1", "0"), "whole numbers from 1 to 1e9, found '0'"),
        (("B", "d1", "p1", "2.5"), "whole numbers from 1"),
        (("B", "d1", "p1", "9" * 20), "whole numbers from 1 to 1e9, found '999"),
    ],
)
def test_refuses_what_it_cannot_predict(trained, tmp_path, row, message):
    columns = dict(zip([*LABELS, "n_cells"], ([value] for value in row), strict=False))
    with pytest.raises(UserError, match=message):
        draw(trained, tmp_path / "p.h5ad", conditions=table(tmp_path, **columns))
    assert not (tmp_path / "p.h5ad").exists()


def test_refuses_tables_that_are_not_tables(trained, tmp_path):
    (tmp_path / "wanted.csv").write_text("cell_type,perturbation\nB,p1\n")
    with pytest.raises(UserError, match="lacks the column batch"):
        draw(trained, tmp_path / "p.h5ad", conditions=tmp_path / "wanted.csv")
    twice = table(tmp_path, cell_type=["B", "B"], batch=["d1", "d1"], perturbation=["p1", "p1"])
    with pytest.raises(UserError, match="occurs twice"):
        draw(trained, tmp_path / "p.h5ad", conditions=twice)
    with pytest.raises(UserError, match="either --split"):
        sampling.sample(trained / "bundle", trained / "store", tmp_path / "p.h5ad")
    with pytest.raises(UserError, match="shard 2/2"):
        draw(trained, tmp_path / "p.h5ad", shard=(2, 2))


def changed_bundle(trained, tmp_path, file, change):
    bundle = tmp_path / "bundle"
    shutil.copytree(trained / "bundle", bundle)
    record = json.loads((bundle / file).read_text())
    (bundle / file).write_text(json.dumps(change(record)))
    (bundle / "manifest.json").unlink()  # it would tell that the file was changed
    return bundle


def from_bundle(bundle, trained, tmp_path):
    return sampling.sample(
        bundle, trained / "store", tmp_path / "p.h5ad", split=trained / "split.parquet", device="cpu"
    )


def test_genes_are_matched_by_name(trained, tmp_path):
    def rename(genes):
        return ["absent", *genes[1:]]

    bundle = changed_bundle(trained, tmp_path, "genes.json", rename)
    adata = read_predictions(from_bundle(bundle, trained, tmp_path))
    assert "absent" not in adata.var_names
    assert adata.n_vars == 63


def test_refuses_other_genes_and_other_units(trained, tmp_path):
    bundle = changed_bundle(
        trained, tmp_path, "genes.json", lambda genes: [f"ENSG{i}" for i in range(len(genes))]
    )
    with pytest.raises(UserError, match="no gene in common .*the model"):
        from_bundle(bundle, trained, tmp_path)
    shutil.rmtree(bundle)
    bundle = changed_bundle(trained, tmp_path, "config.json", lambda record: {**record, "target_sum": 1e4})
    with pytest.raises(UserError, match=r"model was trained at 10000; .*data.target_sum=10000"):
        from_bundle(bundle, trained, tmp_path)


def test_refuses_what_is_not_a_bundle(trained, tmp_path):
    with pytest.raises(UserError, match="not a model bundle"):
        from_bundle(trained / "store", trained, tmp_path)
    bundle = tmp_path / "bundle"
    shutil.copytree(trained / "bundle", bundle)
    (bundle / "model.safetensors").write_bytes(b"nothing")
    (bundle / "manifest.json").unlink()  # it would tell that the file was changed
    with pytest.raises(UserError, match="cannot be read"):
        from_bundle(bundle, trained, tmp_path)


def test_a_file_tells_of_which_recipe_and_seeds_it_is(trained, tmp_path):
    """Runs that differ by seeds alone have one key; another guidance, training or weights have another."""
    few = SampleConfig(num_steps=2)
    facts = draw(trained, tmp_path / "a.h5ad", config=few).uns["perturbdiff"]
    assert facts["recipe"] == "tiny"
    assert facts["train_seed"] == 0
    again = draw(trained, tmp_path / "b.h5ad", config=few, seed=5).uns["perturbdiff"]
    assert (again["recipe_key"], again["seed"]) == (facts["recipe_key"], 5)
    fresh = draw(trained, tmp_path / "c.h5ad", config=few, random_init=True).uns["perturbdiff"]
    other = draw(trained, tmp_path / "d.h5ad", config=SampleConfig(num_steps=2, guidance=0.5))
    keys = {facts["recipe_key"], fresh["recipe_key"], other.uns["perturbdiff"]["recipe_key"]}
    assert len(keys) == 3


def test_the_key_of_a_recipe_leaves_out_seed_and_versions(trained, tmp_path):
    def key(**changes):
        bundle = tmp_path / f"bundle{len(list(tmp_path.iterdir()))}"
        bundle.mkdir()
        manifest = json.loads((trained / "bundle" / "manifest.json").read_text()) | changes
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        return method_of(bundle, "tiny", SampleConfig(), random_init=False).recipe_key

    same = key()
    assert key(seed=9, versions={}, results={}) == same
    assert key(stage="finetune") != same
    assert key(inputs={"store": {"name": "x", "sha256": "0"}}) != same
