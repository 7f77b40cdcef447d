"""The `released` switches against arrays that the authors' released code computed.

``data/released_onehot.npz`` holds a small network's weights (zero-initialised gates re-randomised, so that a
wrong wiring shows), a batch, and what the released code made of them: B=3 sets, S=16 cells, G=96 genes, D=64,
conditioning per cell.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from perturbdiff import recipes
from perturbdiff.config import SampleConfig, TrainConfig
from perturbdiff.diffusion.losses import energy_distance, hybrid_loss
from perturbdiff.diffusion.samplers import ddim_step, sample
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.model import Covariates, Denoiser
from perturbdiff.training.optim import optimizer, parameter_groups, rate_factor

G, D, DEPTH = 96, 64, 2
SIZES = ["model.width=64", "model.depth=2", "model.heads=4", "model.covariate_width=32"]


@pytest.fixture(scope="module")
def theirs():
    with np.load(Path(__file__).parent / "data" / "released_onehot.npz") as archive:
        return {name: torch.from_numpy(np.asarray(archive[name])) for name in archive.files}


def layer(ours: str, released: str, weights: dict, rows: int | None = None) -> dict:
    """Return a linear layer's tensors under our name; ``rows`` keeps the outputs that are used."""
    return {f"{ours}.{k}": weights[f"{released}.{k}"][:rows] for k in ("weight", "bias")}


def renamed(theirs: dict) -> dict:
    """Translate the released state dict to ours."""
    w = {
        name.removeprefix("weights/"): value for name, value in theirs.items() if name.startswith("weights/")
    }
    ours = {
        **layer("input_layers.layers.0", "model.x_embedder", w),
        **layer("control_layers.layers.0", "model.x_control_embedder", w),
        **layer("time_embedding.expand", "model.t_embedder.mlp.0", w),
        **layer("time_embedding.project", "model.t_embedder.mlp.2", w),
        **layer("covariate_encoder.project", "cov_encoder.transform", w),
        **layer("covariate_projection", "model.class_embedding.emb", w),
        **layer("output_layer", "model.final_layer.linear", w),
        **layer("final_modulation.project", "model.final_layer.adaLN_modulation.1", w),
        "gene_embedding": w["model.gene_embedding.null_emb.weight"][0],
        "null_covariates": w["model.class_embedding.null_emb.weight"][0],
        "covariate_encoder.tables.perturbation.weight": w["cov_encoder.pert_encoder.weight"],
    }
    ours["control_layers.layers.0.weight"] = ours["control_layers.layers.0.weight"][
        :, :G
    ]  # the rest sees zeros
    for kind, name in (("cell_type", "celltype"), ("batch", "batch")):
        table = w[f"cov_encoder.{name}_encoder.weight"]
        ours[f"covariate_encoder.tables.{kind}.weight"] = torch.cat([torch.zeros(1, 32), table])
    for i in range(DEPTH):
        last, their, our = i == DEPTH - 1, f"model.blocks.{i}.block", f"blocks.{i}"
        ours |= layer(f"{our}.attention.qkv", f"{their}.attn.qkv", w)
        ours |= layer(f"{our}.attention.project", f"{their}.attn.proj", w, D if last else None)
        ours |= layer(f"{our}.modulation.project", f"{their}.adaLN_modulation.1", w)
        control = f"{their}.control_adaLN_modulation.1"
        ours |= layer(f"{our}.control_modulation.project", control, w, 2 * D if last else None)
        for mlp in ("mlp",) if last else ("mlp", "control_mlp"):
            ours |= layer(f"{our}.{mlp}.expand", f"{their}.{mlp}.fc1", w)
            ours |= layer(f"{our}.{mlp}.contract", f"{their}.{mlp}.fc2", w)
        ours[f"{our}.attention.query_norm.weight"] = w[f"{their}.attn.q_norm.weight"]
        ours[f"{our}.attention.key_norm.weight"] = w[f"{their}.attn.k_norm.weight"]
    return ours


@pytest.fixture
def model(theirs):
    config = recipes.load("released", SIZES).model
    denoiser = Denoiser(config, num_genes=G, num_perturbations=7, num_cell_types=4, num_batches=5)
    found = denoiser.load_state_dict(renamed(theirs), strict=False)
    assert set(found.missing_keys) == {"unit", "gate_threshold", "maximum"}
    assert not found.unexpected_keys
    return denoiser


@pytest.fixture(scope="module")
def covariates(theirs):
    return Covariates(theirs["pert"] + 1, theirs["celltype"] + 1, theirs["batch"] + 1)


def close(ours, expected, tolerance):
    assert (ours.detach() - expected).abs().max().item() < tolerance


def test_schedule(theirs):
    np.testing.assert_allclose(
        NoiseSchedule(1000).alpha_bar[[0, 1, 9, 99, 499, 999]],
        theirs["sched_alphas_cumprod"].numpy(),
        rtol=1e-14,
    )
    noised = NoiseSchedule(1000).add_noise(theirs["x0"], theirs["t"], theirs["noise"])
    close(noised, theirs["x_t"], 1e-6)


@pytest.mark.parametrize("told", ["cond", "null"])
@pytest.mark.parametrize("self_conditioned", [0, 1])
def test_forward_pass(model, theirs, covariates, told, self_conditioned):
    estimate = model(
        theirs["x_t"], theirs["t"], theirs["control"], covariates if told == "cond" else None,
        self_condition=theirs["selfcond_in"] if self_conditioned else None,
    )  # fmt: skip
    close(estimate, theirs[f"fwd_{told}_sc{self_conditioned}_x"], 1e-5)


def test_conditioning_and_a_block(model, theirs, covariates):
    close(model.conditioning(theirs["t"], covariates), theirs["t_emb"] + theirs["class_emb"], 1e-5)
    x, control = model.blocks[0](theirs["block_in_x"], theirs["block_in_control"], theirs["block_in_c"])
    close(x, theirs["block_out_x"], 1e-5)
    close(control, theirs["block_out_control"], 1e-5)


def loss(model, theirs, covariates, self_condition=None):
    estimate = model(theirs["x_t"], theirs["t"], theirs["control"], covariates, self_condition=self_condition)
    return hybrid_loss(estimate, theirs["x0"], recipes.load("released").loss)["total"]


def test_loss_and_gradients(model, theirs, covariates):
    estimate = theirs["fwd_cond_sc0_x"]
    each = energy_distance(estimate, theirs["x0"], factor="half")
    torch.testing.assert_close(each, theirs["loss_sc0_mmd_per_set"], rtol=1e-6, atol=1e-6)
    total = loss(model, theirs, covariates, theirs["selfcond_in"])
    assert total.item() == pytest.approx(theirs["loss_sc1_total"].item(), rel=1e-6)
    total.backward()
    for name, parameter in (
        ("model.x_embedder.weight", model.input_layers.layers[0].weight),
        ("model.blocks.0.block.attn.qkv.bias", model.blocks[0].attention.qkv.bias),
        ("model.blocks.1.block.adaLN_modulation.1.bias", model.blocks[1].modulation.project.bias),
        ("model.final_layer.linear.bias", model.output_layer.bias),
        ("cov_encoder.transform.bias", model.covariate_encoder.project.bias),
        ("model.t_embedder.mlp.0.bias", model.time_embedding.expand.bias),
    ):
        close(parameter.grad, theirs[f"grad_sc1/{name}"], 5e-6)


def test_learning_rates(theirs):
    settings = TrainConfig(warmup_steps=3, max_steps=40, plateau_fraction=0.1, final_rate=0.1)
    expected = torch.cat([theirs["opt3_lrs"], theirs["lr_from_step3"]])
    ours = torch.tensor([2e-4 * rate_factor(step, settings) for step in range(43)])
    torch.testing.assert_close(ours, expected, check_dtype=False, rtol=1e-6, atol=0)


def test_three_optimiser_steps(model, theirs, covariates):
    settings = TrainConfig(
        warmup_steps=3, max_steps=40, plateau_fraction=0.1, final_rate=0.1, learning_rate=2e-4
    )
    adam, losses = optimizer(model, settings), []
    for step in range(3):
        for group in adam.param_groups:
            group["lr"] = settings.learning_rate * rate_factor(step, settings)
        adam.zero_grad()
        total = loss(model, theirs, covariates)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        adam.step()
        losses.append(total.item())
    assert losses == pytest.approx(theirs["opt3_losses"].tolist(), rel=1e-5)
    assert norm.item() == pytest.approx(theirs["grad_total_norm_clip"].item(), rel=1e-4)
    for name, parameter in (
        ("model.x_embedder.weight", model.input_layers.layers[0].weight),
        ("model.blocks.0.block.attn.q_norm.weight", model.blocks[0].attention.query_norm.weight),
        ("model.class_embedding.emb.weight", model.covariate_projection.weight),
        ("model.class_embedding.emb.bias", model.covariate_projection.bias),
        ("cov_encoder.transform.weight", model.covariate_encoder.project.weight),
    ):
        close(parameter, theirs[f"opt3_param/{name}"], 1e-5)
    assert len(parameter_groups(model, 0.01)[0]["params"]) > 0


@pytest.mark.parametrize(("steps", "guidance", "name"), [(10, 0.0, "ddim10_w0"), (50, 1.5, "ddim50_w1.5")])
def test_sampling(model, theirs, covariates, steps, guidance, name):
    settings = SampleConfig(num_steps=steps, start_level=steps, guidance=guidance)

    @torch.no_grad()
    def denoise(x, level, previous, conditional):
        told = covariates if conditional else None
        return model(x, torch.full((3,), level), theirs["control"], told, self_condition=previous)

    cells = sample(
        denoise,
        lambda: theirs["x_T"],
        NoiseSchedule(1000),
        settings,
        clean=lambda x: torch.where(x < 1e-4, 0.0, x),
    )
    close(cells, theirs[f"{name}_final"], 1e-3)  # the released code gathers its tables in float32


def test_stochastic_step(theirs):
    step = NoiseSchedule(1000).reverse(np.array([99, 98]))[0]
    x, estimate = theirs["x_t"], theirs["p_pred_w0_t99"]
    ours = ddim_step(x, estimate, step, 1.0, lambda: theirs["step_noise"])
    close(ours, theirs["ddim_step_w0_t99_eta1"], 1e-4)
