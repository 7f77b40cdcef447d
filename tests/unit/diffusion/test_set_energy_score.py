"""The energy score whose points are sets: what it is least at, its identities, its slope; and the noise of a set."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from perturbdiff.config.settings import LossConfig
from perturbdiff.diffusion.losses import (
    cross_energy_distance,
    energy_distance,
    hybrid_loss,
    set_energy_score,
)
from perturbdiff.diffusion.samplers import set_noise
from perturbdiff.diffusion.schedule import NoiseSchedule


def cells(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_place_sets(size):
    """Set j of size + 1 has j cells in one place and the others in another, both of two genes."""
    places = torch.tensor([[0.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    return torch.stack([places[(torch.arange(size) < j).long()] for j in range(size + 1)])


def expected_scores(size, power):
    """Score of predicting sets j and l where set k is true, [sets, sets, sets]."""
    sets = two_place_sets(size)
    triples = list(itertools.product(range(size + 1), repeat=3))
    pairs = torch.stack([sets[i] for j, k, _ in triples for i in (j, k)])
    true = torch.stack([sets[t] for _, _, t in triples])
    return set_energy_score(pairs, true, power=power).reshape((size + 1,) * 3).numpy()


def score_of(table, predicted, true):
    """Mean score of independent sets of the law ``predicted`` where sets have the law ``true``."""
    return float(np.einsum("j,l,k,jlk->", predicted, predicted, true, table))


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
def test_the_law_of_the_sets_is_the_only_minimum(power):
    """A family of two points, .3 of one and .7 of the other; and what m cells of a family of two distributions are."""
    size = 5
    table, rng = expected_scores(size, power), np.random.default_rng(0)
    points = np.eye(size + 1)[0] * 0.3 + np.eye(size + 1)[size] * 0.7
    of_cells = np.array(
        [
            math.comb(size, j) * sum(0.5 * q**j * (1 - q) ** (size - j) for q in (0.1, 0.8))
            for j in range(size + 1)
        ]
    )
    for true in (points, of_cells):
        least = score_of(table, true, true)
        others = rng.dirichlet(np.full(size + 1, 0.5), 300)
        assert min(score_of(table, one, true) for one in others) > least
        for step in others - true:  # convex: no better law in any direction, however near
            assert score_of(table, true + 1e-3 * step, true) > least
    mean = np.arange(size + 1) @ of_cells / size
    pooled = np.array([math.comb(size, j) * mean**j * (1 - mean) ** (size - j) for j in range(size + 1)])
    assert score_of(table, pooled, of_cells) > score_of(table, of_cells, of_cells) + 0.01


def test_the_square_knows_the_pooled_cells_only():
    size = 5
    sets, table = two_place_sets(size), expected_scores(size, 2.0)
    points = np.eye(size + 1)[0] * 0.4 + np.eye(size + 1)[size] * 0.6
    pooled = np.eye(size + 1)[3]  # 3 of 5 cells in the one place, as in all sets together
    assert score_of(table, pooled, points) == pytest.approx(score_of(table, points, points), abs=1e-3)
    errors = energy_distance(sets[:, None].float(), sets[None, [0, size]].float()) @ torch.tensor([0.4, 0.6])
    assert int(errors.argmin()) == 3, "today's loss is least at the pooled cells"
    one = expected_scores(size, 1.0)
    assert score_of(one, pooled, points) > score_of(one, points, points) + 0.1


@pytest.mark.parametrize("factor", ["paper", "half"])
def test_identities_of_the_square(factor):
    x, y = cells(6, 7, 4), cells(3, 5, 4, seed=1) + 0.3
    square = set_energy_score(x, y, power=2, factor=factor).float()
    own_twin = cross_energy_distance(x, y.repeat_interleave(2, 0), factor=factor)
    torch.testing.assert_close(
        square, own_twin, atol=2e-4, rtol=1e-5
    )  # where a cell's distance to itself counts 1e-4
    far = energy_distance(x, y.repeat_interleave(2, 0), factor=factor).unflatten(0, (-1, 2)).mean(1)
    spread = energy_distance(x[::2], x[1::2], factor=factor)
    torch.testing.assert_close(square, far - 0.5 * spread, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("power", [0.7, 1.0, 2.0])
def test_order_of_cells_and_of_twins_does_not_matter(power):
    x, y = cells(4, 6, 3), cells(2, 8, 3, seed=1)
    score = set_energy_score(x, y, power=power)
    assert score.shape == (2,)
    shuffled = x[:, [3, 1, 5, 0, 2, 4]].unflatten(0, (2, 2)).flip(1).flatten(0, 1)
    torch.testing.assert_close(set_energy_score(shuffled, y.flip(1), power=power), score)
    torch.testing.assert_close(set_energy_score(x[2:], y[1:], power=power), score[1:])
    assert set_energy_score(x.bfloat16(), y.bfloat16(), power=power).dtype == torch.float32


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_the_slope_is_that_of_finite_differences(power):
    x, y = cells(4, 3, 2).requires_grad_(), cells(2, 4, 2, seed=1)
    assert torch.autograd.gradcheck(lambda sets: set_energy_score(sets, y, power=power), x)
    equal = cells(1, 3, 2).float().expand(2, 3, 2).clone().requires_grad_()
    set_energy_score(equal, equal.detach()[:1], power=power).sum().backward()
    assert equal.grad is not None
    assert torch.isfinite(equal.grad).all(), "also where all three sets are equal"


def test_the_objective_has_two_predicted_sets_for_each_true_one():
    x, y = cells(6, 5, 4).float(), cells(3, 5, 4, seed=1).float()
    settings = LossConfig(mmd_statistic="set", set_power=1.5, mse_weight=0.5)
    terms = hybrid_loss(x, y, settings)
    torch.testing.assert_close(terms["mmd"], set_energy_score(x, y, power=1.5).mean())
    torch.testing.assert_close(terms["mse"], (x - y.repeat_interleave(2, 0)).square().mean())
    torch.testing.assert_close(terms["total"], terms["mmd"] + 0.5 * terms["mse"])


def test_two_generated_sets_have_one_cleaner_view_of_the_true_set():
    schedule, levels = NoiseSchedule(), torch.tensor([10, 300, 600, 999])
    rng = torch.Generator().manual_seed(0)
    own, common = torch.randn(8, 400, 50, generator=rng), torch.randn(4, 400, 50, generator=rng)
    noise = schedule.twin_noise(own, common, levels)
    assert noise.var((1, 2)).sub(1).abs().max() < 0.05, "each is standard normal"
    found = (noise[::2] * noise[1::2]).mean((1, 2))
    signal = schedule.alpha_bar[levels.numpy()]
    view = np.sqrt(signal)  # α of the cleaner level; the correlation is the ratio of signal to noise ratios
    expected = (signal / (1 - signal)) / (view / (1 - view))
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert expected[-1] < 0.01, "nothing is shared where sampling starts"
    # a family of one number, standard normal, and the estimate k · x_t: the score is least at k = 1, the true spread
    k = np.linspace(0.5, 1.5, 1001)[:, None]
    a, b = np.sqrt(signal), np.sqrt(1 - signal)
    score = np.sqrt(k**2 - 2 * k * a + 1) - k * b * np.sqrt((1 - expected) / 2)
    np.testing.assert_allclose(k[score.argmin(0)][:, 0], 1, atol=2e-3)


def test_the_noise_of_a_cell_is_the_same_and_cells_of_a_set_share_a_part():
    def drawn(shared):
        return set_noise((4000, 3, 5), torch.Generator().manual_seed(2), shared)

    assert torch.equal(drawn(0.0), torch.randn(4000, 3, 5, generator=torch.Generator().manual_seed(2)))
    noise = drawn(0.3)
    assert noise.mean().abs() < 0.02
    assert noise.var(0).sub(1).abs().max() < 0.1
    assert (noise**4).mean().item() == pytest.approx(3, abs=0.1), "normal"
    among = torch.corrcoef(noise.transpose(0, 1).flatten(1))[0, 1:]
    assert (among - 0.3).abs().max() < 0.03
    genes = torch.corrcoef(noise.flatten(0, 1).T)[0, 1:]
    assert genes.abs().max() < 0.05, "nothing is shared between genes"
    assert (noise[:-1] * noise[1:]).mean().abs() < 0.02, "or between sets"
