"""Pretraining, isolation of held-out cells, and the three ways of transfer."""

from __future__ import annotations

import dataclasses
import re
import shutil
from typing import get_args

import pytest
import torch
from tiny_data import tiny_counts

from perturbdiff import sampling
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.conditions.condition import conditions_of
from perturbdiff.config import recipes
from perturbdiff.predictions import read_predictions
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store
from perturbdiff.training.setup import dataset_names
from perturbdiff.training.training_cells import HeldOut
from perturbdiff.training.training_stages import finetune, pretrain
from perturbdiff.training.transfer import Transfer

SHORT = (
    "train.max_steps=4",
    "train.warmup_steps=1",
    "train.log_every=2",
    "model.unit=rms",
    "model.gate=true",
    "train.ema_decay=0",
    "loss.mmd_statistic=cross",
)
LABELS = ["cell_type", "batch", "perturbation"]


def recipe(*changes):
    return recipes.load("tiny", [*SHORT, *changes])


@pytest.fixture(scope="module")
def atlas(tmp_path_factory):
    """A store of unperturbed cells: other genes, one more cell type; 3 cells bear names of the tiny data."""
    counts = tiny_counts(seed=5, genes=90)
    counts = counts[counts.obs["perturbation"] == "control"].copy()
    counts.var_names = [f"g{i + 20}" for i in range(90)]
    counts.obs["cell_type"] = counts.obs["cell_type"].astype(str).replace({"B": "NK"}).astype("category")
    counts.obs_names = [f"atlas{i}" for i in range(counts.n_obs)]
    folder = tmp_path_factory.mktemp("atlas")
    counts.write_h5ad(folder / "atlas.h5ad")
    return preprocess([folder / "atlas.h5ad"], folder / "atlas", recipe().data)


@pytest.fixture(scope="module")
def pretrained(trained, atlas, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "bundle"
    pairs = [(trained / "store", trained / "split.parquet")]
    return pretrain([trained / "store", atlas], out, recipe(), downstream=pairs, device="cpu")


def test_pretraining_knows_both_stores_and_only_contexts(pretrained, trained, atlas):
    bundle = Bundle.load(pretrained)
    assert bundle.config.train.zero_control
    assert bundle.genes == list(dict.fromkeys([*Store(trained / "store").genes, *Store(atlas).genes]))
    assert bundle.vocabulary.datasets == ("store", "atlas")
    assert bundle.vocabulary.cell_type == ("B", "NK", "T")
    assert len(bundle.model.input_layers.layers) == 2
    # only the row of "no perturbation" was trained
    torch.manual_seed(bundle.config.seed)
    table = bundle.model.covariate_encoder.tables["perturbation"].weight
    assert table[0].abs().sum() > 0


def test_no_held_out_condition_is_seen(pretrained, trained):
    split = read_split(trained / "split.parquet")
    held = {
        tuple(row) for row in split[split["part"].isin(["valid", "test"])][LABELS].itertuples(index=False)
    }
    seen = Bundle.load(pretrained).seen
    assert held
    assert not held & {tuple(row) for row in seen[LABELS].itertuples(index=False)}
    assert (seen["role"] == "target").all()
    assert set(seen["dataset"]) == {"store", "atlas"}


def test_held_out_cells_are_left_out_by_name(trained, tmp_path):
    split = read_split(trained / "split.parquet")
    held = HeldOut.collect([(trained / "store", trained / "split.parquet")])
    counts = tiny_counts()
    counts.obs["cell_type"] = "renamed"  # other labels, the same cells
    counts.obs["perturbation"] = "control"
    counts.write_h5ad(tmp_path / "same.h5ad")
    same = Store(preprocess([tmp_path / "same.h5ad"], tmp_path / "same", recipe().data))
    use, exclude = held.leave_out(same)
    assert use.all()
    truth = Store(trained / "store")
    names = truth.obs()
    out = names.merge(split, on=LABELS)
    out = set(out[out["part"].isin(["valid", "test"])]["cell"])
    assert out
    assert set(same.obs(["cell"])["cell"][exclude]) == out


def test_a_store_wholly_held_out_is_refused(trained):
    store = Store(trained / "store")
    every = set(conditions_of(store.conditions))
    with pytest.raises(UserError, match="every condition is held out"):
        HeldOut(conditions=every).leave_out(store)


def counted(report):
    """Parameters that the report takes, re-initialises or misses."""
    totals = [
        re.match(r"(taken from|re-initialised|missing in).*?: ([\d,]+) parameters", line) for line in report
    ]
    return sum(int(found[2].replace(",", "")) for found in totals if found)


@pytest.mark.parametrize("mode", get_args(Transfer))
def test_transfer(pretrained, trained, tmp_path, mode):
    # a learning rate of almost nothing: what is kept stays what it was
    changes = ("train.learning_rate=1e-12", "train.weight_decay=0")
    out = finetune(
        pretrained, trained / "store", trained / "split.parquet", tmp_path / "b", recipe(*changes),
        transfer=mode, device="cpu",
    )  # fmt: skip
    old, new = Bundle.load(pretrained), Bundle.load(out)
    before, after = old.model.state_dict(), new.model.state_dict()
    assert new.genes == (Store(trained / "store").genes if mode == "new-genes" else old.genes)
    for name in ("blocks.0.attention.qkv.weight", "time_embedding.expand.weight", "fusion.0.weight"):
        torch.testing.assert_close(after[name], before[name])
    same = new.genes == old.genes and torch.allclose(
        after["output_layer.weight"], before["output_layer.weight"]
    )
    assert same == (mode == "keep")
    assert len(new.model.input_layers.layers) == 1
    kept = mode == "keep"
    assert kept == (
        new.genes == old.genes
        and torch.allclose(after["input_layers.layers.0.weight"], before["input_layers.layers.0.weight"])
    )
    rows = [
        b.model.covariate_encoder.tables["cell_type"].weight[b.vocabulary.encode("cell_type", ["T"])]
        for b in (old, new)
    ]
    torch.testing.assert_close(rows[0], rows[1])
    assert new.vocabulary.cell_type[: len(old.vocabulary.cell_type)] == old.vocabulary.cell_type
    assert torch.equal(new.model.unit, old.model.unit) == kept
    report = new.training["transferred"]
    assert report[0].startswith("taken from the pretrained model: ")
    assert any(line.startswith("re-initialised: ") for line in report) == (mode != "keep")
    assert counted(report) == sum(p.numel() for p in new.model.parameters())
    assert ("left behind: " in "".join(report)) == (mode == "keep")  # the other data set's input layers
    assert "Transferred" in (out / "README.md").read_text()


def test_genes_that_the_store_lacks_are_not_predicted(pretrained, trained, tmp_path):
    out = finetune(
        pretrained, trained / "store", trained / "split.parquet", tmp_path / "b", recipe(), device="cpu"
    )
    bundle, store = Bundle.load(out), Store(trained / "store")
    foreign = [gene not in set(store.genes) for gene in bundle.genes]
    assert any(foreign)
    assert (bundle.model.maximum.numpy()[foreign] == 0).all()
    found = sampling.sample(
        out, trained / "store", tmp_path / "p.h5ad", split=trained / "split.parquet", device="cpu"
    )
    assert set(read_predictions(found).var_names) == set(store.genes) & set(bundle.genes)


def test_a_pretrained_bundle_samples_contexts(pretrained, trained, tmp_path, caplog):
    caplog.set_level("INFO", "perturbdiff")
    (tmp_path / "w.csv").write_text("cell_type,batch,perturbation,n_cells\nT,d1,control,9\n")
    found = sampling.sample(
        pretrained, trained / "store", tmp_path / "p.h5ad", conditions=tmp_path / "w.csv", device="cpu"
    )
    adata = read_predictions(found)
    assert (adata.obs["source"] == "predicted").sum() == 9
    assert "knows contexts only" in caplog.text


def test_the_bundle_decides_the_architecture(pretrained, trained, tmp_path, caplog):
    caplog.set_level("INFO", "perturbdiff")
    out = finetune(
        pretrained,
        trained / "store",
        trained / "split.parquet",
        tmp_path / "b",
        recipe("model.width=64"),
        device="cpu",
    )
    assert Bundle.load(out).config.model.width == 32
    assert "the bundle decides the architecture: width=32" in caplog.text


def test_an_unknown_data_set_starts_from_the_mean_layer(pretrained, trained):
    from perturbdiff.checkpoint.bundle import build_model
    from perturbdiff.training.transfer import transfer_weights

    old = Bundle.load(pretrained)
    words = dataclasses.replace(old.vocabulary, datasets=("new",))
    model = build_model(old.config, old.genes, words)
    report = transfer_weights(old, model, words, "keep")
    mean = torch.stack([layer.weight for layer in old.model.input_layers.layers]).mean(0)
    torch.testing.assert_close(model.input_layers.layers[0].weight, mean)
    assert "input and control layer of data set new: mean of 2 pretrained layers" in report
    assert not any(line.startswith("left behind") for line in report)


def test_a_stores_data_set_is_known_whatever_key_its_name_ends_with(pretrained, trained, tmp_path):
    """As in the workflow, where the prior's store and that of the finetuning differ in their genes."""
    assert dataset_names([tmp_path / "a-0123abcd", tmp_path / "a-89abcdef"]) == ["a", "a-2"]
    assert dataset_names([tmp_path / "0123abcd"]) == ["0123abcd"]
    keyed, split = tmp_path / "store-0123abcd", trained / "split.parquet"
    shutil.copytree(trained / "store", keyed)
    tuned = Bundle.load(finetune(pretrained, keyed, split, tmp_path / "b", recipe(), device="cpu"))
    assert "input and control layer of data set store: taken" in tuned.training["transferred"]
    assert sampling.sample(pretrained, keyed, tmp_path / "p.h5ad", split=split, device="cpu").exists()


def test_stores_with_other_gene_names_are_refused(pretrained, trained, tmp_path):
    counts = tiny_counts()
    counts.var_names = [f"ENSG{i}" for i in range(counts.n_vars)]
    counts.write_h5ad(tmp_path / "c.h5ad")
    store = preprocess([tmp_path / "c.h5ad"], tmp_path / "store", recipe().data)
    with pytest.raises(UserError, match="no gene in common"):
        finetune(pretrained, store, trained / "split.parquet", tmp_path / "b", recipe(), device="cpu")


def test_an_anchored_model_learns_its_output_layer_anew(pretrained, trained):
    """Pretraining without controls makes whole cells, an anchored output layer changes to control cells."""
    from perturbdiff.checkpoint.bundle import build_model
    from perturbdiff.training.transfer import transfer_weights

    old = Bundle.load(pretrained)
    anchored = old.config.model_copy(
        update={"model": old.config.model.model_copy(update={"anchor": "control"})}
    )
    model = build_model(anchored, old.genes, old.vocabulary)
    start = model.output_layer.weight.clone()
    report = transfer_weights(old, model, old.vocabulary, "keep")
    assert torch.equal(model.output_layer.weight, start)
    assert "output layer: new" in report[-1]
    output = model.output_layer
    assert f"re-initialised: {output.weight.numel() + output.bias.numel():,} parameters" in report[1]
    gain = model.gain_layer
    assert f"new: {gain.weight.numel() + gain.bias.numel():,} parameters (output" in report[2]


def test_pretraining_reads_gene_lists_as_other_stages_do(atlas, tmp_path):
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "genes.txt").write_text("# chosen for the screen\ng25\ng30\ng999\n")
    out = pretrain([atlas], tmp_path / "bundle", recipe(), genes=tmp_path / "list", device="cpu")
    assert Bundle.load(out).genes == ["g25", "g30", "g999"]


def test_other_depths_are_told(trained, atlas, tmp_path, caplog):
    deep = preprocess([trained / "counts.h5ad"], tmp_path / "deep", recipe("data.target_sum=50000").data)
    finetune(trained / "bundle", deep, trained / "split.parquet", tmp_path / "tuned", recipe(), device="cpu")
    said = r"cells are scaled to different depths \(.*{}: \d+.* counts, .*{}: \d+"
    assert re.search(said.format("bundle", "deep"), caplog.text)
    caplog.clear()
    pretrain([deep, atlas], tmp_path / "prior", recipe(), device="cpu")
    assert re.search(said.format("deep", "atlas"), caplog.text)
