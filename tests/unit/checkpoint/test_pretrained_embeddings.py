"""Semantic tables through training, bundle, sampling and finetuning."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_data import tiny_counts

from perturbdiff import sampling
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.pretrained_embeddings import add_tables, tables_of, teach
from perturbdiff.config import recipes
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.predictions import read_predictions
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import make_split, read_split
from perturbdiff.training.setup import for_finetuning, for_pretraining, from_scratch
from perturbdiff.training.training_stages import train

SHORT = (
    "model.width=16", "model.depth=1", "model.covariate_width=8", "train.max_steps=2", "train.warmup_steps=0",
    "train.valid_every=2", "sample.num_steps=2", "data.num_hvgs=24",
)  # fmt: skip
DOSED = ("data.dose_key=dose", "model.dose=sum", "split.held_out=[d2]", "split.valid_fraction=0.4")
WIDTH = 5


def table(*names, seed=0, width=WIDTH):
    vectors = np.random.default_rng(seed).normal(size=(len(names), width)).astype(np.float32)
    return EmbeddingTable(names, vectors)


def recipe(*changes):
    return recipes.load("tiny", [*SHORT, *DOSED, *changes])


def dosed_counts():
    """p1 at two doses, p2 and p3 at one."""
    counts = tiny_counts()
    names = counts.obs["perturbation"].astype(str).to_numpy()
    rng = np.random.default_rng(0)
    counts.obs["dose"] = np.where(names == "p1", rng.choice([0.1, 10.0], len(names)), 1.0)
    return counts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with doses, its split without p3, tables, and a bundle with frozen drugs and cell types."""
    folder = tmp_path_factory.mktemp("semantic")
    dosed_counts().write_h5ad(folder / "counts.h5ad")
    preprocess([folder / "counts.h5ad"], folder / "store", recipe().data)
    make_split(folder / "store", folder / "whole.parquet", recipe())
    split = read_split(folder / "whole.parquet")
    split.loc[split["perturbation"] == "p3@1", "part"] = "test"
    split.to_parquet(folder / "split.parquet")
    table("p1", "p2", "p3", "other").write(folder / "drugs.parquet")
    table("B", "T", "NK", seed=1, width=3).write(folder / "types.npz")
    train(
        folder / "store", folder / "split.parquet", folder / "bundle", recipe(),
        embeddings={"perturbation": folder / "drugs.parquet", "cell_type": folder / "types.npz"}, device="cpu",
    )  # fmt: skip
    return folder


def drawn(made, tmp_path, perturbations, **options):
    """Sample 6 cells of each perturbation in B / d1; returns means by perturbation."""
    wanted = pd.DataFrame({"cell_type": "B", "batch": "d1", "perturbation": perturbations, "n_cells": 6})
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
    wanted.to_csv(path, index=False)
    out = sampling.sample(
        options.pop("bundle", made / "bundle"), made / "store", path.with_suffix(".h5ad"),
        conditions=path, device="cpu", **options,
    )  # fmt: skip
    cells = read_predictions(out)
    cells = cells[cells.obs["source"] == "predicted"]
    return {name: cells[cells.obs["perturbation"] == name].X.toarray() for name in perturbations}


def test_buffers_hold_the_tables_rows(made):
    bundle, drugs = Bundle.load(made / "bundle"), EmbeddingTable.read(made / "drugs.parquet")
    frozen = bundle.model.covariate_encoder.tables["perturbation"].vectors.numpy()
    labels = ("none", *bundle.vocabulary.perturbation)
    assert "p3@1" not in labels
    for row, label in enumerate(labels):
        expected = {"none": np.zeros(WIDTH), "control": drugs.vectors.mean(0)}.get(label)
        expected = drugs.vectors[drugs.names.index(label[:2])] if expected is None else expected
        np.testing.assert_allclose(frozen[row], expected, rtol=1e-6, err_msg=label)
    weights = bundle.model.covariate_encoder.dose.weights.numpy()
    assert weights[labels.index("p1@10")].tolist() == [0, 0, 1]
    assert weights[labels.index("control")].tolist() == [0, 0, 0]
    types = bundle.model.covariate_encoder.tables["cell_type"]
    assert types.vectors.shape == (3, 3)
    frozen_names = {name for name, _ in bundle.model.named_parameters() if "vectors" in name}
    assert frozen_names == {"covariate_encoder.dose.vectors"}


def test_the_bundle_keeps_whole_tables(made, tmp_path):
    bundle = Bundle.load(made / "bundle")
    assert bundle.tables["perturbation"].names == ("p1", "p2", "p3", "other")
    assert bundle.tables["cell_type"].names == ("B", "T", "NK")
    bundle.save(tmp_path)
    for name in ("embeddings/perturbation.npz", "embeddings/cell_type.npz", "model.safetensors", "README.md"):
        assert (tmp_path / name).read_bytes() == (made / "bundle" / name).read_bytes(), name
    assert "frozen vectors: perturbation, table of 4 names × 5" in (tmp_path / "README.md").read_text()


def test_unseen_perturbations_combinations_and_doses_are_sampled(made, tmp_path, caplog):
    caplog.set_level("INFO", "perturbdiff")
    asked = ["p1@0.1", "p3@1", "p1@0.1+p2@10", "p2@10", "other@1"]
    found = drawn(made, tmp_path, asked)
    assert all(np.isfinite(x).all() and len(x) == 6 for x in found.values())
    assert (
        "not trained on, predicted through semantic vectors: p3@1, p1@0.1+p2@10, p2@10, other@1"
        in caplog.text
    )


def test_a_label_taught_is_what_training_on_it_would_have_encoded(made):
    bundle = Bundle.load(made / "bundle")
    before = len(bundle.vocabulary.perturbation)
    teach(bundle, {"perturbation": ["p3@1", "p1@0.1+p2@1", "p3@1"], "cell_type": ["NK", "B"]})
    assert bundle.vocabulary.perturbation[before:] == ("p3@1", "p1@0.1+p2@1")
    assert bundle.vocabulary.cell_type == ("B", "T", "NK")
    encoder, drugs = bundle.model.covariate_encoder, bundle.tables["perturbation"].vectors
    np.testing.assert_allclose(encoder.tables["perturbation"].vectors[-2:], [drugs[2], drugs[:2].mean(0)])
    np.testing.assert_allclose(encoder.dose.weights[-2:], [[0, 1, 0], [0.5, 0.5, 0]])
    assert torch.equal(
        encoder.tables["cell_type"].vectors[-1], torch.from_numpy(bundle.tables["cell_type"].vectors[2])
    )


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("p9@1", "semantic table has no such name, did you mean .*--embedding perturbation=FILE"),
        ("p1+p9", "semantic table has no such name"),
        ("p3@3", "p3@3: the model knows no dose 3 of p3; the nearest it was trained with: 0.1, 1, 10"),
    ],
)
def test_sampling_refuses_what_the_table_lacks(made, tmp_path, label, message):
    with pytest.raises(UserError, match=message):
        drawn(made, tmp_path, [label])


def test_sampling_takes_a_further_table(made, tmp_path):
    table("new", seed=3).write(tmp_path / "more.npz")
    options = {"embeddings": {"perturbation": tmp_path / "more.npz"}}
    assert drawn(made, tmp_path, ["new@1"], **options)["new@1"].min() >= 0
    bundle = Bundle.load(made / "bundle")
    with pytest.raises(UserError, match="4 numbers, the model's 5"):
        add_tables(bundle, {"perturbation": table("new", width=4)})


def test_learned_vectors_refuse_unseen_labels_and_tables(made, trained, tmp_path):
    with pytest.raises(UserError, match="not trained with perturbation p9.*semantic vectors"):
        sampling_one_hot(trained, tmp_path, "p9")
    with pytest.raises(UserError, match="--embedding perturbation: the model has learned vectors"):
        sampling_one_hot(trained, tmp_path, "p1", embeddings={"perturbation": made / "drugs.parquet"})


def sampling_one_hot(trained, tmp_path, label, **options):
    path = tmp_path / "wanted.csv"
    path.write_text(f"cell_type,batch,perturbation,n_cells\nB,d1,{label},4\n")
    return sampling.sample(
        trained / "bundle", trained / "store", tmp_path / "p.h5ad", conditions=path, device="cpu", **options
    )


def test_a_model_without_its_tables_still_knows_its_labels_vectors(made):
    bundle = Bundle.load(made / "bundle")
    bundle.tables = {}
    own = tables_of(bundle)["perturbation"]
    assert {"p1", "p2", "p1@0.1", "control"} <= set(own.names)
    teach(bundle, {"perturbation": ["p2@10", "p1@10+p2@1"]})
    with pytest.raises(UserError, match="perturbation p3@1"):
        teach(bundle, {"perturbation": ["p3@1"]})


def test_validation_labels_are_known_where_vectors_are_frozen(made, tmp_path):
    split = read_split(made / "split.parquet")
    split.loc[split["perturbation"] == "p3@1", "part"] = "valid"
    split.to_parquet(tmp_path / "split.parquet")
    drugs = EmbeddingTable.read(made / "drugs.parquet")
    material = from_scratch(made / "store", tmp_path / "split.parquet", recipe(), {"perturbation": drugs})
    assert "p3@1" in material.vocabulary.perturbation
    learned = from_scratch(made / "store", tmp_path / "split.parquet", recipe("model.dose=label"))
    assert "p3@1" not in learned.vocabulary.perturbation


def scratch(made, *changes, **tables):
    return from_scratch(made / "store", made / "split.parquet", recipe(*changes), tables)


def test_sum_and_concat_of_the_dose(made):
    drugs = EmbeddingTable.read(made / "drugs.parquet")
    widths = {}
    for how in ("label", "sum", "concat"):
        encoder = scratch(made, f"model.dose={how}", perturbation=drugs).model.covariate_encoder
        widths[how] = encoder.project.in_features
        assert (encoder.dose is None) == (how == "label")
    assert widths == {"label": 24, "sum": 24, "concat": 32}
    assert scratch(made, "model.dose=concat").model.covariate_encoder.project.in_features == 24  # no table


@pytest.mark.parametrize(
    ("changes", "tables", "message"),
    [
        (["model.dose=label", "model.gene_embedding=table"], {}, "--embedding gene=FILE"),
        (["model.dose=label"], {"gene": table("g1")}, "model.gene_embedding is 'none'"),
        (
            ["model.dose=label", "model.covariates=[perturbation]"],
            {"cell_type": table("B")},
            r"not told.*covariates=\[perturbation,cell_type\]",
        ),
        (["model.dose=label"], {"cell_type": table("B")}, "lacks cell_type T"),
    ],
)
def test_training_refuses_tables_that_do_not_fit(made, changes, tables, message):
    with pytest.raises(UserError, match=message):
        scratch(made, *changes, **tables)


def test_missing_labels_take_the_mean_if_asked(made):
    types = table("B", seed=1)
    model = scratch(
        made, "model.dose=label", "model.missing_embedding=mean", cell_type=types
    ).model.covariate_encoder.tables["cell_type"]
    np.testing.assert_allclose(model.vectors[2], types.vectors.mean(0))


def test_gene_vectors_follow_the_genes(made):
    from perturbdiff.store.store import Store

    genes = Store(made / "store").genes
    vectors = table(*reversed(genes), seed=4, width=6)
    material = scratch(made, "model.dose=label", "model.gene_embedding=table", gene=vectors)
    found = material.model.gene_table.vectors.numpy()
    np.testing.assert_array_equal(found, vectors.vectors[::-1])


def finetuned(made, config, mode="keep", **tables):
    return for_finetuning(made / "bundle", made / "store", made / "split.parquet", config, mode, tables)


def test_finetuning_takes_the_bundles_tables(made):
    old = Bundle.load(made / "bundle")
    material = finetuned(made, recipe("model.dose=label"))  # the bundle decides
    theirs, ours = old.model.state_dict(), material.model.state_dict()
    for name in ours:
        if name.startswith("covariate_encoder."):
            assert torch.equal(ours[name], theirs[name]), name
    assert material.tables["perturbation"].names == old.tables["perturbation"].names
    assert any("3 taken by value, 0 new" in line for line in material.facts["transferred"])


def test_finetuning_with_a_new_table_keeps_the_map_of_its_width(made):
    old = Bundle.load(made / "bundle").model.covariate_encoder
    drugs = table("p1", "p2", seed=7)
    material = finetuned(made, recipe(), perturbation=drugs)
    new = material.model.covariate_encoder
    assert torch.equal(new.tables["perturbation"].project.weight, old.tables["perturbation"].project.weight)
    place = material.vocabulary.perturbation.index("p2@1") + 1
    np.testing.assert_array_equal(new.tables["perturbation"].vectors[place], drugs.vectors[1])
    wide = finetuned(made, recipe(), perturbation=table("p1", "p2", width=7)).model.covariate_encoder
    assert wide.tables["perturbation"].project.in_features == 7


def test_finetuning_from_learned_to_frozen_vectors(made, trained, tmp_path):
    config = recipes.load("tiny", ["model.dose=label"])
    drugs = table("p1", "p2", "p3")
    material = for_finetuning(
        trained / "bundle",
        trained / "store",
        trained / "split.parquet",
        config,
        "keep",
        {"perturbation": drugs},
    )
    assert material.model.covariate_encoder.tables["perturbation"].vectors.shape == (5, WIDTH)
    assert any("missing in the pretrained model" in line for line in material.facts["transferred"])


def test_pretraining_prepares_frozen_vectors_and_leaves_out_labels_without_one(made):
    drugs = table("p1", "p3")
    material = for_pretraining([made / "store"], recipe(), [], None, {"perturbation": drugs})
    assert material.vocabulary.perturbation == ("control", "p1@0.1", "p1@10", "p3@1")
    assert material.model.covariate_encoder.dose.weights.shape == (5, 3)
    assert for_pretraining([made / "store"], recipe(), [], None).model.covariate_encoder.dose is None


def test_finetuning_a_model_that_came_without_its_tables(made, tmp_path):
    bundle = Bundle.load(made / "bundle")
    bundle.tables = {}
    bundle.save(tmp_path)
    material = for_finetuning(tmp_path, made / "store", made / "split.parquet", recipe(), "keep")
    ours, theirs = material.model.state_dict(), bundle.model.state_dict()
    for name in ("tables.perturbation.vectors", "tables.cell_type.vectors", "dose.weights", "dose.vectors"):
        assert torch.equal(ours[f"covariate_encoder.{name}"], theirs[f"covariate_encoder.{name}"]), name
    assert material.tables == {}


def test_command_line(made, run_cli, tmp_path):
    common = [made / "store", "--split", made / "split.parquet", "--out", tmp_path / "b"]
    for text, message in (("drugs.parquet", "KIND=FILE"), (f"drug={made}/drugs.parquet", "KIND one of")):
        done = run_cli("train", *common, "--embedding", text)
        assert (done.code, message in done.err) == (2, True), done.err
    done = run_cli("train", *common, "--embedding", f"perturbation={tmp_path}/none.npz")
    assert (done.code, "none.npz" in done.err) == (2, True), done.err
    assert not (tmp_path / "b").exists()


def test_a_network_that_expects_changes_goes_through_all_stages(made, tmp_path):
    known = table("p1@0.1", "p1@10", "p2", "p3", "other")
    known.write(tmp_path / "drugs.parquet")
    changed = recipe("model.anchor=predicted", "model.dose=label")
    bundle = train(
        made / "store", made / "split.parquet", tmp_path / "bundle", changed,
        embeddings={"perturbation": tmp_path / "drugs.parquet"}, device="cpu",
    )  # fmt: skip
    loaded = Bundle.load(bundle)
    assert loaded.model.expected is not None
    assert loaded.model.expected.measured.sum() == 3
    size = len(loaded.model.expected.changes)
    teach(loaded, {"perturbation": ["p3@1", "other"]})
    assert loaded.model.expected.changes.shape == (size + 2, 24)
    assert loaded.model.expected.changes[-2:].any(dim=1).all()
    (tmp_path / "drawn").mkdir()
    cells = drawn(made, tmp_path / "drawn", ["p2@1", "other"], bundle=bundle)
    assert not np.allclose(cells["p2@1"].mean(0), cells["other"].mean(0), atol=1e-3)
    again = for_finetuning(bundle, made / "store", made / "split.parquet", changed, "keep")
    torch.testing.assert_close(
        again.model.expected.changes[:size], Bundle.load(bundle).model.expected.changes
    )
    assert again.model.expected.left_out.any()
