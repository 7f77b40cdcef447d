"""Model, losses and optimiser against arrays that the authors' released code computed, through our import.

A difference is relative: the largest absolute difference over the largest absolute value of the array. Tolerances
are 1e-5; gradients and updated weights, which are sums of many more terms, have theirs said beside them.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from parity.released import FIXTURES, relative, released

from perturbdiff.diffusion.losses import energy_distance, hybrid_loss
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.model import Denoiser
from perturbdiff.model.layers import sinusoid
from perturbdiff.released.released_weights import UNUSED
from perturbdiff.training.optimizer import Optimizer, parameter_groups, rate_factor

TOLERANCE = 1e-5
OF_GRADIENTS = 2e-5
OF_ANGLES = 999 * 2**-24  # a frequency near 1 rounded differently by another exp, times t


@pytest.fixture(scope="module", params=FIXTURES)
def theirs(request):
    return released(request.param)


@pytest.fixture(scope="module")
def model(theirs):
    """The fixture's network; tests here do not change its weights."""
    return theirs.denoiser()


def estimate(model, theirs, told="cond", self_conditioned=0):
    return model(
        theirs["x_t"], theirs["t"], theirs["control_used"], theirs.covariates if told == "cond" else None,
        self_condition=theirs["selfcond_in"] if self_conditioned else None,
    )  # fmt: skip


def test_the_recipe_of_each_fixture(theirs):
    config = theirs.config
    assert (config.model.width, config.model.depth, config.model.heads) == (64, 2, 4)
    assert (config.model.covariate_width, config.model.projection_width) == (32, 96)
    expected = ("sum", "beta", 3) if theirs.name == "onehot" else ("sum-silu", "posterior", 2)
    found = (config.model.fusion, config.sample.ddpm_variance, len(config.model.covariates))
    assert found == expected
    if theirs.name == "onehot":
        assert config.variant == "released"


def test_noised_cells(theirs):
    noised = NoiseSchedule(1000).add_noise(theirs["x0"], theirs["t"], theirs["noise"])
    assert relative(noised, theirs["x_t"]) < TOLERANCE


def test_embeddings(model, theirs):
    assert relative(model.covariate_encoder(theirs.covariates), theirs["cov_emb"]) < TOLERANCE
    assert relative(sinusoid(theirs["t"])[:, None], theirs["t_freq_emb"]) < OF_ANGLES
    time = model.time_embedding(theirs["t"])[:, None]
    assert relative(time, theirs["t_emb"]) < TOLERANCE
    label = model.covariate_projection(torch.nn.functional.silu(theirs["cov_emb"]))
    assert relative(label, theirs["class_emb"]) < TOLERANCE
    assert relative(model.null_covariates.expand(3, 1, -1), theirs["class_emb_null"]) == 0
    for covariates, name in ((theirs.covariates, "class_emb"), (None, "class_emb_null")):
        whole = theirs["t_emb"] + theirs[name]
        whole = torch.nn.functional.silu(whole) if theirs.name == "drug_dose" else whole
        assert relative(model.conditioning(theirs["t"], covariates), whole) < TOLERANCE


def test_a_block(model, theirs):
    x, control = model.blocks[0](theirs["block_in_x"], theirs["block_in_control"], theirs["block_in_c"])
    assert relative(x, theirs["block_out_x"]) < TOLERANCE
    assert relative(control, theirs["block_out_control"]) < TOLERANCE


@pytest.mark.parametrize("told", ["cond", "null"])
@pytest.mark.parametrize("self_conditioned", [0, 1])
def test_forward_pass(model, theirs, told, self_conditioned):
    hidden = []
    hook = model.blocks[-1].register_forward_hook(lambda *given: hidden.append(given[2][0]))
    with torch.no_grad():
        cells = estimate(model, theirs, told, self_conditioned)
    hook.remove()
    assert relative(cells, theirs[f"fwd_{told}_sc{self_conditioned}_x"]) < TOLERANCE
    assert relative(hidden[0], theirs[f"fwd_{told}_sc{self_conditioned}_hidden"]) < TOLERANCE


@pytest.mark.parametrize("self_conditioned", [0, 1])
def test_losses(model, theirs, self_conditioned):
    with torch.no_grad():
        cells, target = estimate(model, theirs, "cond", self_conditioned), theirs["x0"]
    name, settings = f"loss_sc{self_conditioned}", theirs.config.loss
    each = energy_distance(cells, target, factor="half")
    assert relative(each, theirs[f"{name}_mmd_per_set"]) < TOLERANCE
    # On the very same cells nothing but the formula is compared. On ours, a cell's distance to itself is the root
    # of other rounding noise.
    same = energy_distance(theirs[f"fwd_cond_sc{self_conditioned}_x"], target, factor="half")
    assert relative(same, theirs[f"{name}_mmd_per_set"]) < TOLERANCE / 10
    assert relative((cells - target).square().mean((1, 2)), theirs[f"{name}_mse_per_set"]) < TOLERANCE
    terms = hybrid_loss(cells, target, settings)
    assert relative(terms["mmd"], theirs[f"{name}_mmd_mean"]) < TOLERANCE
    assert relative(terms["mse"], theirs[f"{name}_mse_per_set"].mean()) < TOLERANCE
    assert relative(terms["total"], theirs[f"{name}_total"]) < TOLERANCE


@pytest.mark.parametrize("self_conditioned", [0, 1])
def test_gradients(theirs, self_conditioned):
    model = theirs.denoiser()
    cells = estimate(model, theirs, "cond", self_conditioned)
    hybrid_loss(cells, theirs["x0"], theirs.config.loss)["total"].backward()
    norm, whole = f"gradnorm_sc{self_conditioned}/", f"grad_sc{self_conditioned}/"
    names = theirs.names()
    expected = {name.removeprefix(norm) for name in theirs.arrays if name.startswith(norm)}
    dropped = "model.class_embedding.null_emb.weight"  # no set is without covariates
    assert set(names.values()) == expected | {dropped}  # what has a gradient there is here, and nothing else
    largest = max(theirs[norm + name].item() for name in expected)
    for ours, parameter in model.named_parameters():
        name, gradient = names[ours], parameter.grad
        if name == dropped:
            assert gradient is None
            continue
        difference = abs(gradient.norm().item() - theirs[norm + name].item())
        assert difference < OF_GRADIENTS * max(theirs[norm + name].item(), 1e-3 * largest), name
        if whole + name in theirs:
            assert relative(gradient, theirs[whole + name]) < OF_GRADIENTS, name


def test_who_decays(model, theirs):
    """Ours are theirs without the tensors that never get a gradient."""
    last = model.config.depth - 1
    unused = [
        name
        for name in theirs.weights
        if any(re.match(pattern.replace("{last}", str(last)), name) for pattern in UNUSED.values())
    ]
    kept = [name for name in unused if "bias" not in name and "layer_norm" not in name]
    decay, other = (len(group["params"]) for group in parameter_groups(model, 0.01))
    assert decay + len(kept) == theirs["n_params_decay"].item()
    assert other + len(unused) - len(kept) == theirs["n_params_nodecay"].item()


def test_learning_rates(theirs):
    settings = theirs.config.train
    expected = torch.cat([theirs["opt3_lrs"], theirs["lr_from_step3"]])
    rates = [settings.learning_rate * rate_factor(step, settings) for step in range(len(expected))]
    assert relative(torch.tensor(rates), expected) < 1e-6


def test_three_optimiser_steps(theirs):
    model, config = theirs.denoiser(), theirs.config
    optimizer, losses = Optimizer(model, config.train), []
    norm = math.nan
    for step in range(3):
        total = hybrid_loss(estimate(model, theirs), theirs["x0"], config.loss)["total"]
        total.backward()
        for one in model.parameters():
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad  # the covariates' null vector
        norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        optimizer.step(step)
        losses.append(total.item())
    assert relative(torch.tensor(losses), theirs["opt3_losses"]) < TOLERANCE
    assert relative(torch.as_tensor(norm), theirs["grad_total_norm_clip"]) < OF_GRADIENTS
    names = {theirs_name: ours for ours, theirs_name in theirs.names().items()}
    state = model.state_dict()
    for name in (n.removeprefix("opt3_param/") for n in theirs.arrays if n.startswith("opt3_param/")):
        assert relative(state[names[name]], theirs[f"opt3_param/{name}"]) < TOLERANCE, name


def test_a_fresh_network_is_as_spread(theirs):
    """Mean and standard deviation of every tensor, within five standard errors of both samples."""
    torch.manual_seed(0)
    trained = theirs.denoiser()
    table = trained.covariate_encoder.tables["perturbation"]
    fresh = Denoiser(
        theirs.config.model, num_genes=96, num_perturbations=7, num_cell_types=4, num_batches=5,
        semantic={"perturbation": table.vectors.shape[1], "cell_type": 24} if theirs.name == "drug_dose" else {},
        num_doses=4 if theirs.name == "drug_dose" else 0,
    )  # fmt: skip
    names, expected = theirs.names(), theirs.settings["init_mean_std"]
    for ours, parameter in fresh.named_parameters():
        mean, std = expected[names[ours]]
        values = parameter[1:] if ours.endswith("tables.perturbation.weight") else parameter
        values = values[1:] if ours.endswith(("cell_type.weight", "batch.weight")) else values
        n = values.numel()
        own = values.std(correction=0).item()
        assert abs(own - std) <= 5 * std / math.sqrt(n), ours
        assert abs(values.mean().item() - mean) <= 5 * std * math.sqrt(2 / n), ours
