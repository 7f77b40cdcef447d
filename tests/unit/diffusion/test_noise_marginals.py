"""What the network is shown first when sampling, beside what it was trained on at that level.

Training shows N(√α x0, 1 - α) at each level; sampling begins with N(0, 1). Started at the last level (``paper``),
where √α is 6.4e-3, the two agree to an entry-wise Kullback-Leibler divergence of α x0² / 2 = 2.0e-5 x0². Started at
level 99 (``released``: the last K = 100 levels of T) training had √α x0 and noise of SD .32, sampling has SD 1.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from perturbdiff.config import recipes
from perturbdiff.diffusion.samplers import normal, sample
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.training.module import TrainingModule

SHAPE = (4, 100, 250)  # sets, cells, genes


class Recorder(torch.nn.Module):
    """In the network's place: remembers what it is shown, and at which level."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.expected = None
        self.unit = torch.ones(())

    def encode(self, log1p):
        return log1p / 10

    def forward(self, x, t, *_, **__):
        self.seen.append((x, t))
        return torch.zeros_like(x)


def clean_cells():
    """Sparse log1p values up to 6.2, model units a tenth of that."""
    generator = torch.Generator().manual_seed(5)
    values = 6.0 * torch.rand(SHAPE, generator=generator) + 0.2
    return values * (torch.rand(SHAPE, generator=generator) < 0.3)


def shown_in_training(config, level):
    """Return what `TrainingModule.objective` shows the network at a level, and the clean cells, model units."""
    network, target = Recorder(), clean_cells()
    module = TrainingModule(network, config)
    ids = torch.ones(SHAPE[0], dtype=torch.int64)
    draws = module.draws(target.shape, 0)._replace(t=torch.full_like(ids, level))
    module.objective(CellSetBatch(target, target, ids, ids, ids, ids, ids), draws)
    x, t = network.seen[-1]
    assert (t == level).all()
    return x, network.encode(target)


def shown_first_in_sampling(config):
    """Return what the sampler shows the network first, and the level it says."""
    seen = []

    def denoise(x, level, previous, conditional):
        seen.append((x, level))
        return torch.zeros_like(x)

    draw = normal(SHAPE, torch.Generator().manual_seed(6))
    sample(denoise, draw, NoiseSchedule(config.schedule.num_steps), config.sample)
    return seen[0]


def by_variant(name):
    return [preset for preset in recipes.presets() if recipes.load(preset).variant == name]


@pytest.mark.parametrize("preset", [*by_variant("paper"), *by_variant("recommended")])
def test_sampling_starts_at_the_last_level(preset):
    config = recipes.load(preset)
    schedule = NoiseSchedule(config.schedule.num_steps)
    levels = schedule.levels(config.sample.num_steps, config.sample.start_level)
    assert levels[0] == config.schedule.num_steps - 1
    assert math.sqrt(schedule.alpha_bar[levels[0]]) < 6.5e-3
    assert 1 - math.sqrt(1 - schedule.alpha_bar[levels[0]]) < 2.1e-5


def test_paper_starts_from_what_it_was_trained_on():
    config = recipes.load("paper")
    start, level = shown_first_in_sampling(config)
    trained, target = shown_in_training(config, level)
    alpha = float(NoiseSchedule(config.schedule.num_steps).alpha_bar[level])
    entries = start.numel()
    for x in (start, trained):  # N(0, 1) to the standard errors of mean and SD; training's mean by its bound
        assert abs(x.mean().item()) < 4 / entries**0.5 + math.sqrt(alpha) * target.mean().item()
        assert abs(x.std().item() - 1) < 4 / (2 * entries) ** 0.5 + alpha
    noise = (trained - math.sqrt(alpha) * target) / math.sqrt(1 - alpha)
    assert abs((noise * target).mean() / target.square().mean().sqrt()) < 4 / entries**0.5
    assert (trained - noise).abs().max() < math.sqrt(alpha) * target.max() + 1e-4
    distance = kolmogorov(start, trained)
    assert distance < 1.95 * math.sqrt(2 / entries) + math.sqrt(alpha) * target.mean().item()


def test_divergence_at_the_start_of_paper():
    """KL of N(√α x0, 1 - α) from N(0, 1), entry by entry and for a whole set of the paper's size."""
    alpha = NoiseSchedule(1000).alpha_bar[-1]
    square = clean_cells().div(10).square()
    divergence = 0.5 * (alpha * square.double() - alpha - math.log1p(-alpha))
    assert divergence.max() < 2.05e-5 * square.max()
    assert divergence.mean() * 256 * 2000 < 1  # nats, of a set of 256 cells and 2,000 genes


@pytest.mark.parametrize("preset", by_variant("released"))
def test_released_presets_start_at_level_99(preset):
    config = recipes.load(preset)
    levels = NoiseSchedule(config.schedule.num_steps).levels(
        config.sample.num_steps, config.sample.start_level
    )
    assert levels.tolist() == list(range(99, -1, -1))


def test_released_starts_from_what_it_was_not_trained_on():
    """Documented, not mended: the released code begins its last 100 levels with noise of SD 1."""
    config = recipes.load("released")
    start, level = shown_first_in_sampling(config)
    assert level == 99
    trained, target = shown_in_training(config, level)
    alpha = float(NoiseSchedule(1000).alpha_bar[level])
    noise = trained - math.sqrt(alpha) * target
    assert math.sqrt(alpha) == pytest.approx(0.947, abs=1e-3)
    assert noise.std().item() == pytest.approx(0.321, abs=2e-3)
    along = (noise * target).mean() / (noise.std() * target.square().mean().sqrt())
    assert abs(along.item()) < 4 / noise.numel() ** 0.5  # nothing of the cells is left in it
    assert start.std().item() == pytest.approx(1.0, abs=0.01)
    assert kolmogorov(start, trained) > 0.2


@pytest.mark.parametrize(("preset", "power"), [("paper", 1), ("released", 1), ("recommended", 4)])
def test_levels_of_training(preset, power):
    """Uniform over 0 .. T-1, both ends included (paper: t ~ Unif{1 .. T}); P(t < k) = (k / T)^power if it leans."""
    module = TrainingModule(Recorder(), recipes.load(preset))
    levels = torch.cat([module.draws(torch.Size((64, 1, 1)), step).t for step in range(200)])
    twins = 2 if module.config.loss.mmd_statistic == "cross" else 1  # which share a level
    bins = np.linspace(0, 1, 11)
    found = np.histogram(levels.numpy() / 1000, (1000 * bins).round() / 1000)[0] / twins
    expected = len(levels) / twins * np.diff(bins**power)
    assert ((found - expected) ** 2 / expected).sum() < 27.9  # .1 % of chi-squared with 9 degrees of freedom
    assert levels.max() >= 998
    assert (levels.min() <= 1) == (power == 1)


def kolmogorov(one, other):
    """Largest difference of the two distribution functions."""
    one, other = one.flatten().sort().values.numpy(), other.flatten().sort().values.numpy()
    both = np.concatenate([one, other])
    below = [np.searchsorted(values, both, side="right") / len(values) for values in (one, other)]
    return np.abs(below[0] - below[1]).max()
