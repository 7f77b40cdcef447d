"""import-checkpoint, and what its bundles are good for."""

import json
import logging
from pathlib import Path

import pytest
import torch
from parity.released import relative
from released_layout import BY_NAME, ReleasedLayout
from small_store import small_store
from tiny_data import tiny_counts

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.predictions import read_predictions
from perturbdiff.released import load_released
from perturbdiff.released.checkpoint_import import import_checkpoint
from perturbdiff.released.pickles import read_torch
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.provenance import read_manifest

DATA = Path(__file__).parents[2] / "parity" / "data"
STEP = DATA / "tiny_step23.ckpt"
FINAL = DATA / "tiny_final_weights_only.ckpt"


def gene_list(folder, number=96):
    path = folder / "genes.json"
    path.write_text(json.dumps([f"g{i}" for i in range(number)]))
    return path


def own_file(folder, layout, **settings):
    return layout.write(folder / "model.ckpt", **settings), gene_list(folder, layout.genes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A store with the labels and genes of the small checkpoint."""
    adata = tiny_counts(genes=96)
    for column, names in (
        ("cell_type", {"B": "ct0", "T": "ct1"}),
        ("batch", {"d1": "Donor1", "d2": "Donor2"}),
        ("perturbation", {"control": "PBS", "p1": "CYT0", "p2": "CYT1", "p3": "CYT2"}),
    ):
        adata.obs[column] = adata.obs[column].cat.rename_categories(names)
    overrides = ["data.control=PBS", "data.num_hvgs=null", "split.held_out=[Donor2]"]
    return small_store(tmp_path_factory.mktemp("data"), overrides, adata)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    return import_checkpoint(STEP, folder / "bundle", genes=gene_list(folder))


def test_a_bundle_of_a_run_with_averaging(bundle):
    found = Bundle.load(bundle)
    assert found.vocabulary.perturbation == ("CYT0", "CYT1", "CYT2", "CYT3", "CYT4", "PBS")
    assert (found.vocabulary.control, found.vocabulary.batch[0]) == ("PBS", "Donor1")
    assert found.config.variant == "released"
    assert found.config.train.max_steps == 26
    assert (found.config.train.drop_covariates, found.config.train.zero_control) == (0.5, False)
    assert float(found.model.unit) == 10
    assert found.model.maximum.isinf().all()
    assert found.target_sum is None
    weights = read_torch(STEP)["state_dict"]
    assert torch.equal(found.model.output_layer.weight, weights["model.final_layer.linear.weight"])
    text = "".join(
        p.read_text() for p in bundle.iterdir() if p.suffix in (".json", ".md") and p.name != "run.json"
    )
    assert "/data/" not in text  # paths of the machine that trained it
    assert read_manifest(bundle)["results"] == {"genes": 96, "parameters": found.training["parameters"]}


def test_averaged_and_raw_weights(tmp_path):
    content = read_torch(STEP)
    for weights, entry in (("ema", "state_dict"), ("raw", "current_model_state")):
        model = load_released(STEP, weights=weights)
        theirs = content[entry]["model.blocks.0.block.attn.qkv.weight"]
        assert torch.equal(model.blocks[0].attention.qkv.weight, theirs)
    one, other = load_released(STEP), load_released(STEP, weights="raw")
    assert not torch.equal(one.output_layer.weight, other.output_layer.weight)
    final = load_released(FINAL)
    assert relative(final.output_layer.weight, one.output_layer.weight) < 0.1  # three steps later
    with pytest.raises(UserError, match="one set of weights only"):
        load_released(FINAL, weights="raw")


def test_a_network_owns_its_weights(tmp_path):
    path, _ = own_file(tmp_path, ReleasedLayout())
    model = load_released(path)
    before = model.output_layer.weight.detach().clone()
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(model.output_layer.weight, before)
    model.output_layer.weight.data.add_(1.0)


def test_sampling_from_it(bundle, data, run_cli, tmp_path):
    out = tmp_path / "predicted.h5ad"
    done = run_cli(
        "sample", bundle, data.store, "--split", data.split, "--out", out, "--device", "cpu",
        "--set", "sample.num_steps=3", "--set", "sample.start_level=3", "--set", "sample.set_size=16",
    )  # fmt: skip
    assert done.code == 0, done.err
    cells = read_predictions(out)
    new = cells[cells.obs["source"] == "predicted"]
    assert set(new.obs["perturbation"]) <= {"CYT0", "CYT1", "CYT2"}
    assert new.n_vars == 96
    assert new.X.min() >= 0
    assert 0 < new.X.max() < 100


@pytest.mark.parametrize("transfer", ["keep", "new-genes"])
def test_finetuning_from_it(bundle, data, run_cli, tmp_path, transfer):
    out = tmp_path / "tuned"
    done = run_cli(
        "finetune", bundle, data.store, "--split", data.split, "--out", out, "--transfer", transfer,
        "--config", "tiny", "--set", "train.max_steps=2", "--device", "cpu",
    )  # fmt: skip
    assert done.code == 0, done.err
    old, new = Bundle.load(bundle), Bundle.load(out)
    assert new.config.model.mlp_branch == "parallel"
    kept = old.model.covariate_projection.weight, new.model.covariate_projection.weight
    assert relative(kept[1], kept[0]) < 0.05
    moved = relative(new.model.output_layer.weight, old.model.output_layer.weight)
    assert (moved < 0.05) == (transfer == "keep")


def test_genes_are_needed_and_must_fit(tmp_path, run_cli):
    done = run_cli("import-checkpoint", STEP, "--out", tmp_path / "out")
    assert done.code == 2
    assert "it has 96 genes but not their names" in done.err
    with pytest.raises(UserError, match="the model has 96 genes, the gene list 95"):
        import_checkpoint(STEP, tmp_path / "out", genes=gene_list(tmp_path, 95))
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, run_cli):
    path, genes = own_file(tmp_path, ReleasedLayout(), use_class_silu=True, sigma_small=True)
    arguments = ["import-checkpoint", path, "--out", tmp_path / "b", "--genes", genes]
    done = run_cli(*arguments, "--target-sum", "10000")
    assert done.code == 0, done.err
    assert "not used: output head of the control stream" in done.err
    found = Bundle.load(tmp_path / "b")
    assert found.target_sum == 10000
    assert (found.config.model.fusion, found.config.sample.ddpm_variance) == ("sum-silu", "posterior")
    assert "up to date" in run_cli(*arguments, "--target-sum", "10000").err
    assert run_cli(*arguments, "--control", "nobody").code == 2


def test_pretraining_by_name(tmp_path):
    """No perturbation was told and controls were zero: one vector for all, whatever the label."""
    layout = ReleasedLayout(datasets=BY_NAME)
    path = tmp_path / "pretrained.ckpt"
    settings = layout.settings(p_drop_control=1)
    settings["cov_encoding_cfg"]["pert_encoding"] = "non"
    weights = layout.weights()
    torch.save({"state_dict": weights, "hyper_parameters": settings}, path)
    out = import_checkpoint(path, tmp_path / "bundle", genes=gene_list(tmp_path, layout.genes))
    found = Bundle.load(out)
    assert found.config.train.zero_control
    assert found.vocabulary.datasets == BY_NAME
    assert found.vocabulary.perturbation == ("PBS",)
    table = found.model.covariate_encoder.tables["perturbation"].weight
    assert torch.equal(table[0], weights["cov_encoder.pert_encoder.weight"][0])
    assert torch.equal(table[1], table[0])


@pytest.mark.parametrize("kind", ["perturbation", "cell_type"])
def test_frozen_tables_that_the_file_lacks(tmp_path, kind, caplog):
    layout = ReleasedLayout(perturbation="genept", cell_type="llm")
    name = {"perturbation": "pert_encoder", "cell_type": "celltype_encoder"}[kind]
    weights = layout.weights()
    removed = weights.pop(f"cov_encoder.{name}.0.weight")
    path, genes = tmp_path / "model.ckpt", gene_list(tmp_path, layout.genes)
    torch.save({"state_dict": weights, "hyper_parameters": layout.settings()}, path)
    with pytest.raises(UserError, match=f"frozen vectors of {kind} are not in the file; give them"):
        load_released(path)
    with pytest.raises(UserError, match=f"frozen vectors of {kind} are not .*--embedding {kind}=FILE"):
        import_checkpoint(path, tmp_path / "out", genes=genes)
    labels = layout.perturbations() if kind == "perturbation" else ["type0", "type1", "type2"]
    EmbeddingTable(tuple(labels), removed.numpy()).write(tmp_path / "table.npz")
    with caplog.at_level(logging.INFO):
        out = import_checkpoint(
            path, tmp_path / "out", genes=genes, embeddings={kind: tmp_path / "table.npz"}
        )
    found = Bundle.load(out)
    vectors = found.model.covariate_encoder.tables[kind].vectors
    first = 2 if kind == "perturbation" else 1  # the control has the scalar mean
    assert torch.equal(vectors[first:], removed[first - 1 :])
    if kind == "perturbation":
        torch.testing.assert_close(vectors[1], torch.full_like(vectors[1], removed.mean().item()))
    assert kind in found.tables
    with pytest.raises(UserError, match="its vectors are not frozen ones"):
        import_checkpoint(
            STEP, tmp_path / "x", genes=gene_list(tmp_path), embeddings={kind: tmp_path / "table.npz"}
        )


def test_drugs_and_doses_in_finetuning_and_sampling(tmp_path, run_cli):
    """Frozen vectors that came with a checkpoint follow their labels; so do the doses' vectors."""
    layout = ReleasedLayout(genes=80, perturbation="chemberta", cell_type="llm", batch=False)
    path, genes = own_file(tmp_path, layout, p_drop_control=0.5)
    imported = import_checkpoint(path, tmp_path / "imported", genes=genes)
    old, labels = Bundle.load(imported), layout.perturbations()
    assert any("share 0.5 of the steps" in line for line in old.training["import"])
    adata = tiny_counts()
    names = dict(zip(("control", "p1", "p2", "p3"), labels, strict=False))
    adata.obs["perturbation"] = adata.obs["perturbation"].cat.rename_categories(names)
    adata.obs["cell_type"] = adata.obs["cell_type"].cat.rename_categories({"B": "type0", "T": "type2"})
    overrides = ["data.num_hvgs=null", "split.held_out=[d2]"]
    data = small_store(tmp_path / "data", [f"data.control={json.dumps(labels[0])}", *overrides], adata)
    done = run_cli(
        "finetune", imported, data.store, "--split", data.split, "--out", tmp_path / "tuned",
        "--config", "tiny", "--set", "train.max_steps=2", "--device", "cpu",
    )  # fmt: skip
    assert done.code == 0, done.err
    new = Bundle.load(tmp_path / "tuned")
    for kind in ("perturbation", "cell_type"):
        shared = [label for label in getattr(new.vocabulary, kind) if (kind, label) in old.vocabulary]
        assert set(shared) >= (set(names.values()) if kind == "perturbation" else {"type0", "type2"})
        there, here = new.vocabulary.encode(kind, shared), old.vocabulary.encode(kind, shared)
        now, before = (b.model.covariate_encoder.tables[kind].vectors for b in (new, old))
        assert torch.equal(now[there], before[here])
        if kind == "perturbation":
            now, before = (b.model.covariate_encoder.dose for b in (new, old))
            assert torch.equal(now.weights[there] @ before.vectors, before.weights[here] @ before.vectors)
            assert relative(now.vectors, before.vectors) < 0.2
    done = run_cli(
        "sample", tmp_path / "tuned", data.store, "--split", data.split, "--out", tmp_path / "p.h5ad",
        "--device", "cpu", "--set", "sample.num_steps=2",
        "--set", "sample.start_level=2", "--set", "sample.set_size=16",
    )  # fmt: skip
    assert done.code == 0, done.err


def test_an_evil_file_in_the_command(tmp_path, run_cli):
    import os

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    layout = ReleasedLayout()
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": layout.weights(), "hyper_parameters": {"x": Evil()}}, path)
    done = run_cli("import-checkpoint", path, "--out", tmp_path / "out", "--genes", gene_list(tmp_path))
    assert done.code == 2
    assert "asks to load 'posix.system'" in done.err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
