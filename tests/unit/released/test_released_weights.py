"""Every layout of the released code, by its tensors' names and shapes."""

import pytest
import torch
from released_layout import BY_NAME, ReleasedLayout

from perturbdiff.model import Covariates
from perturbdiff.released.checkpoint_import import denoiser_of
from perturbdiff.released.released_weights import layout_of, translate
from perturbdiff.runtime.errors import UserError

SIZES = {"perturbation": 5, "cell_type": 3, "batch": 4}


def run(model, dataset=None, seed=0, told=True):
    torch.manual_seed(seed)
    cells, genes = 6, model.num_genes
    x, control, earlier = (torch.rand(2, cells, genes) for _ in range(3))
    ids = Covariates(torch.tensor([1, 3]), torch.tensor([2, 3]), torch.tensor([4, 1]))
    place = None if dataset is None else torch.full((2,), dataset)
    with torch.no_grad():
        return model(
            x, torch.tensor([5, 700]), control, ids if told else None, self_condition=earlier, dataset=place
        )


@pytest.mark.parametrize(
    ("layout", "covariates", "semantic"),
    [
        (ReleasedLayout(), ("perturbation", "cell_type", "batch"), {}),
        (ReleasedLayout(batch=False, depth=1, heads=2), ("perturbation", "cell_type"), {}),
        (ReleasedLayout(perturbation="esm2"), ("perturbation", "cell_type", "batch"), {"perturbation": 12}),
        (
            ReleasedLayout(perturbation="genept", cell_type="llm"),
            ("perturbation", "cell_type", "batch"),
            {"perturbation": 12, "cell_type": 12},
        ),
        (
            ReleasedLayout(perturbation="chemberta", batch=False, inner=64),
            ("perturbation", "cell_type"),
            {"perturbation": 12},
        ),
    ],
)
def test_layouts(layout, covariates, semantic):
    weights = layout.weights()
    found = layout_of(weights)
    assert (found.num_genes, found.width, found.depth) == (layout.genes, layout.width, layout.depth)
    assert (found.heads, found.mlp_ratio, found.covariate_width) == (layout.heads, 4, 128)
    assert found.inner_width == (layout.inner or layout.genes)
    assert (found.covariates, found.semantic, found.datasets) == (covariates, semantic, ("all",))
    model = denoiser_of(weights, layout.settings())
    assert run(model).shape == (2, 6, layout.genes)
    assert not model.training
    assert float(model.unit) == 10


def test_rows_of_tables():
    """A learned table of perturbations and ESM2's begin with a row for none; the others have as many as labels."""
    for kind, first in (("onehot", 0), ("esm2", 0), ("genept", 1), ("chemberta", 1)):
        layout = ReleasedLayout(perturbation=kind, cell_type="llm")
        weights = layout.weights()
        model = denoiser_of(weights, layout.settings())
        table = model.covariate_encoder.tables["perturbation"]
        place = "drug_encoder" if kind == "chemberta" else "pert_encoder"
        theirs = weights[f"cov_encoder.{place}.{'weight' if kind == 'onehot' else '0.weight'}"]
        ours = table.weight if kind == "onehot" else table.vectors
        assert len(ours) == 6
        assert torch.equal(ours[first:], theirs[: 6 - first])
        types = model.covariate_encoder.tables["cell_type"].vectors
        assert torch.equal(types[1:], weights["cov_encoder.celltype_encoder.0.weight"])
        assert not types[0].any()
    dose = model.covariate_encoder.dose
    told = dose.weights[1:].argmax(1)
    assert torch.equal(told, weights["cov_encoder.dose_indices"].long())
    assert not dose.weights[0].any()


def test_input_layers_by_data_set():
    """A network with several input layers is, for a data set, the network with that one layer."""
    layout = ReleasedLayout(datasets=BY_NAME)
    weights = layout.weights()
    model = denoiser_of(weights, layout.settings())
    assert model.datasets == BY_NAME
    for index, name in enumerate(BY_NAME):
        alone = {n: t for n, t in weights.items() if "x_embedder." not in n and "control_embedder." not in n}
        for layer in ("x_embedder", "x_control_embedder"):
            for key in ("weight", "bias"):
                alone[f"model.{layer}.{key}"] = weights[f"model.{layer}.{name}.{key}"]
        single = denoiser_of(alone, layout.settings())
        torch.testing.assert_close(run(model, index), run(single), rtol=1e-6, atol=1e-7)


def test_replaced_gene_layers():
    """New genes in and out, the covariates still through a vector as long as the old genes."""
    layout = ReleasedLayout(genes=24, inner=60, datasets=BY_NAME)
    weights = layout.weights()
    old = torch.zeros(layout.width, 120)
    for layer in ("x_embedder", "x_control_embedder"):  # a layer that was not replaced
        weights[f"model.{layer}.cellxgene.weight"] = old
    found = layout_of(weights)
    assert (found.num_genes, found.inner_width, found.datasets) == (24, 60, BY_NAME[:3])
    report = translate(weights, found, SIZES).report()
    assert any("input layers of other genes: cellxgene" in line for line in report)
    model = denoiser_of(weights, layout.settings())
    assert model.covariate_projection.in_features == 60
    assert run(model, 1).shape == (2, 6, 24)


def test_what_is_left_behind():
    layout = ReleasedLayout()
    weights = layout.weights()
    found = translate(weights, layout_of(weights), SIZES)
    held = sum(tensor.numel() for tensor in weights.values())
    model = denoiser_of(weights, layout.settings())
    ours = sum(parameter.numel() for parameter in model.parameters())
    reserved = 2 * layout.covariate_width  # rows for "unknown" of two tables
    assert ours - reserved == held - sum(found.dropped.values())
    assert len(found.report()) == 5


def test_it_is_not_used():
    """What is left behind has no influence: other values there give the same network."""
    layout = ReleasedLayout()
    weights = layout.weights()
    changed = {
        name: torch.full_like(t, 7.0)
        if ".gene_embedding.gene_embedding." in name or "control_final" in name or "blocks.1.block.control_mlp" in name
        else t
        for name, t in weights.items()
    }  # fmt: skip
    one, other = (denoiser_of(w, layout.settings()) for w in (weights, changed))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({"model.extra.weight": torch.zeros(1)}), "no place for the tensors model.extra.weight"),
        (lambda w: w.pop("model.t_embedder.mlp.2.bias"), r"'model.t_embedder.mlp.2.bias' is missing"),
        (lambda w: w.pop("model.final_layer.linear.weight"), "is missing; not a whole released model"),
        (
            lambda w: w.update({"model.blocks.1.block.attn.qkv.weight": torch.zeros(3, 2)}),
            r"has shape \(3, 2\), expected \(96, 32\)",
        ),
        (lambda w: w.update({"cov_encoder.pert_encoder.weight": torch.zeros(9, 128)}), "9 rows for 5 labels"),
        (lambda w: w.update({"cov_encoder.batch_encoder.weight": torch.zeros(9, 128)}), "9 rows for 4 labels"),
        (
            lambda w: w.update({"model.gene_embedding.gene_embedding.weight": torch.zeros(1, 5120)}),
            "adds gene embeddings to its inputs",
        ),
        (lambda w: w.pop("cov_encoder.celltype_encoder.weight"), "no encoder of perturbations and cell types"),
    ],
)  # fmt: skip
def test_other_tensors(change, message):
    layout = ReleasedLayout()
    weights = layout.weights()
    change(weights)
    with pytest.raises(UserError, match=message):
        denoiser_of(weights, layout.settings())


@pytest.mark.parametrize("key", ["noise_schedule", "learn_sigma", "model_type"])
def test_other_mathematics(key):
    layout = ReleasedLayout()
    with pytest.raises(UserError, match=f"{key}='cosine' cannot be imported"):
        denoiser_of(layout.weights(), layout.settings(**{key: "cosine"}))
