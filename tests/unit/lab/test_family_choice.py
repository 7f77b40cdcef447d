"""What the study of the family's settings changes in the code does what its text says, and is undone."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from perturbdiff.config.settings import ModelConfig
from perturbdiff.diffusion import losses
from perturbdiff.model import Denoiser


@pytest.fixture(scope="module")
def choice() -> ModuleType:
    return importlib.import_module("family_choice")


def test_pooled_adds_the_squared_distance_to_the_loss(choice):
    x, y = torch.rand(4, 5, 3), torch.rand(2, 5, 3)
    alone, squared = (losses.set_energy_score(x, y, power=power) for power in (1.0, 2.0))
    with choice.pooled():
        assert torch.allclose(losses.set_energy_score(x, y), alone + squared, atol=1e-6)
    assert torch.equal(losses.set_energy_score(x, y), alone)


def test_token_adds_the_noise_of_a_set_at_full_size_to_each_of_its_cells(choice):
    sizes = {"num_genes": 3, "num_perturbations": 2, "num_cell_types": 1, "num_batches": 1}
    config = ModelConfig(width=8, depth=1, heads=2, covariate_width=8)
    noise = torch.randn(2, 5, 3)
    with choice.token():
        network = Denoiser(config, **sizes)
        told = network.embed(noise, None, None)
    added = told - network.embed(noise, None, None)
    expected = network.token(noise.sum(dim=1, keepdim=True) / 5**0.5)  # standard normal for noise of its own
    assert torch.allclose(added, expected.expand_as(added), atol=1e-5)
    assert not hasattr(Denoiser(config, **sizes), "token")
