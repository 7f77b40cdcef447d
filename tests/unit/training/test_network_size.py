"""Sizes that a training prints."""

from __future__ import annotations

import pytest
import torch

from perturbdiff.config.settings import Config, ModelConfig
from perturbdiff.model import Denoiser
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


def test_the_description_changes_nothing():
    network, before = model(), torch.get_rng_state()
    lines = describe(network, Config(model=network.config))
    assert lines[0].startswith("network: ")
    assert "MFLOP per cell" in lines[1]
    assert torch.equal(torch.get_rng_state(), before)
