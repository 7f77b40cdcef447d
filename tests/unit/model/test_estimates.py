"""Estimates of one batch: the denoiser's own values, with the shared work done once."""

from __future__ import annotations

import pytest
import torch

from perturbdiff.config.settings import ModelConfig, SampleConfig
from perturbdiff.diffusion.samplers import sample
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.model import Covariates, Denoiser, Estimates

B, S, G = 3, 6, 10


@pytest.fixture(params=["none", "shared", "anchored", "table"])
def model(request):
    torch.manual_seed(0)
    changes = (
        {"anchor": "control", "gene_noise": True}
        if request.param == "anchored"
        else {"gene_embedding": request.param}
    )
    semantic = {"gene": 4} if request.param == "table" else None
    found = Denoiser(
        ModelConfig(width=16, depth=2, heads=4, covariate_width=8, **changes),
        num_genes=G, num_perturbations=5, num_cell_types=4, num_batches=3, datasets=("a", "b"), semantic=semantic,
    )  # fmt: skip
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if found.gene_table is not None:
        found.gene_table.vectors.normal_()
    return found


@pytest.fixture
def given():
    torch.manual_seed(1)
    control, start = torch.rand(2, B, S, G)
    return (
        control,
        start,
        Covariates(*(torch.randint(1, n, (B,)) for n in (5, 4, 3))),
        torch.tensor([0, 1, 1]),
    )


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("per_cell", [False, True])
def test_each_estimate_is_the_denoisers(model, given, guided, per_cell):
    control, x, covariates, dataset = given
    if per_cell:
        covariates = Covariates(*(torch.randint(1, n, (B, S)) for n in (5, 4, 3)))
    estimates = Estimates(model, control, covariates, dataset, guided=guided)
    previous = None
    for level in (900, 500, 20):
        t = torch.full((B,), level)
        for told in (True, False):
            expected = model(
                x, t, control, covariates if told else None, self_condition=previous, dataset=dataset
            )
            torch.testing.assert_close(
                estimates(x, level, previous, told), expected.detach(), rtol=1e-5, atol=1e-4
            )
        x, previous = x + 0.1, expected.detach()


def test_a_reverse_process_embeds_control_cells_once_and_noised_cells_once_a_step(model, given):
    control, start, covariates, dataset = given
    calls = {"embed": 0, "embed_control": 0}
    for name in calls:
        original = getattr(model, name)

        def counted(*given, name=name, original=original):
            calls[name] += 1
            return original(*given)

        setattr(model, name, counted)
    settings = SampleConfig(num_steps=4, guidance=1.0, self_condition=True, sampler="ddim")
    estimates = Estimates(model, control, covariates, dataset, guided=True)
    sample(estimates, lambda: start, NoiseSchedule(1000), settings)
    assert calls == {"embed": 4, "embed_control": 1}


def test_other_tensors_get_their_own_estimate(model, given):
    control, x, covariates, dataset = given
    estimates = Estimates(model, control, covariates, dataset, guided=True)
    estimates(x, 500, None, True)
    other = x + 1
    expected = model(other, torch.full((B,), 500), control, None, dataset=dataset).detach()
    torch.testing.assert_close(estimates(other, 500, None, False), expected, rtol=1e-5, atol=1e-4)


def test_no_graph_is_kept(model, given):
    control, x, covariates, dataset = given
    assert not Estimates(model, control, covariates, dataset)(x, 10, None, True).requires_grad
