"""Sizes that a training prints."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perturbdiff.config.settings import Config, ModelConfig
from perturbdiff.model import Covariates, Denoiser
from perturbdiff.training.network_size import by_group, describe, flops_per_cell, listed

WIDE = {"width": 16, "heads": 4, "covariate_width": 8}


def model(**settings):
    config = ModelConfig(**WIDE | settings)
    sizes = {"num_perturbations": 4, "num_cell_types": 3, "num_batches": 3}
    return Denoiser(config, num_genes=10, **sizes, datasets=("a", "b"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"anchor": "control"},
        {"gene_embedding": "shared"},
        {"fusion": "sum", "covariate_projection": "genes"},
    ],
)
def test_every_parameter_is_in_a_group(settings):
    network = model(**settings)
    groups = by_group(network)
    assert "other" not in groups
    assert sum(groups.values()) == sum(p.numel() for p in network.parameters())


def test_groups_are_what_they_say():
    groups = by_group(model())
    assert groups["input layers"] == 2 * (20 * 16 + 16) + 2 * (10 * 16 + 16)
    network = model()
    assert groups["blocks"] == sum(p.numel() for p in network.blocks.parameters())
    assert listed({"blocks": 1200, "output": 0}) == "1,200 parameters (blocks 1,200)"


def test_work_grows_as_the_products_do():
    def work(size=256, genes=100, *, self_condition=False):
        network = Denoiser(
            ModelConfig(**WIDE, depth=1),
            num_genes=genes,
            num_perturbations=4,
            num_cell_types=3,
            num_batches=3,
        )
        return flops_per_cell(network, size, self_condition=self_condition)

    base = work()
    assert work(genes=200) - base == 2 * 100 * 16 * 3  # x, control and output layers
    assert work(self_condition=True) - base == 2 * 100 * 16  # the earlier estimate's half of the input layer
    # scores and sums of 256 more cells, over both streams' joint width; less of what a set needs once
    assert work(512) - base == pytest.approx(2 * 2 * 256 * 32, rel=0.1)


@pytest.mark.parametrize("self_condition", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"depth": 3, "anchor": "control"}, {"fusion": "sum", "covariate_projection": "genes"}, {"doses": 5}],
)
def test_the_work_is_what_pytorch_counts(settings, self_condition):
    settings = dict(settings)
    doses = settings.pop("doses", 0)
    sizes = {"num_genes": 10, "num_perturbations": 4, "num_cell_types": 3, "num_batches": 3}
    network = Denoiser(ModelConfig(**WIDE | {"depth": 1} | settings), **sizes, num_doses=doses)
    ids, cells = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 7, 10)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        earlier = cells if self_condition else None
        network(cells, ids, cells, Covariates(ids, ids, ids), self_condition=earlier, dataset=ids)
    expected = counter.get_total_flops()
    assert flops_per_cell(network, 7, self_condition=self_condition) == expected // 7


def test_the_description_changes_nothing():
    network, before = model(), torch.get_rng_state()
    lines = describe(network, Config(model=network.config))
    assert lines[0].startswith("network: ")
    assert "MFLOP per cell" in lines[1]
    assert torch.equal(torch.get_rng_state(), before)
