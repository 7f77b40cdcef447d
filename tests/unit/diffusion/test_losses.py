"""Energy distance and hybrid loss against brute force."""

from __future__ import annotations

import pytest
import torch

from perturbdiff.config.settings import LossConfig
from perturbdiff.diffusion.losses import (
    cross_energy_distance,
    energy_distance,
    hybrid_loss,
    population_energy_distance,
)
from perturbdiff.runtime.errors import UserError


def brute_force(x, y, statistic):
    def mean(a, b, skip):
        pairs = [
            (a[i] - b[j]).double().norm()
            for i in range(len(a))
            for j in range(len(b))
            if not (skip and i == j)
        ]
        return torch.stack(pairs).mean()

    skip = statistic == "U"
    return 2 * mean(x, y, False) - mean(x, x, skip) - mean(y, y, skip)


@pytest.mark.parametrize("statistic", ["V", "U"])
def test_matches_brute_force(statistic):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 5, 7, generator=generator), torch.rand(2, 4, 7, generator=generator) + 0.3
    expected = torch.stack([brute_force(a, b, statistic) for a, b in zip(x, y, strict=True)])
    full = energy_distance(x, y, statistic=statistic)
    torch.testing.assert_close(full, expected.float(), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(energy_distance(x, y, statistic=statistic, factor="half"), 0.5 * full)


def test_zero_for_equal_sets_and_positive_otherwise():
    x = torch.rand(3, 8, 20, generator=torch.Generator().manual_seed(0))
    assert energy_distance(x, x).abs().max() < 1e-6
    assert energy_distance(x, x[:, torch.randperm(8)]).abs().max() < 1e-4
    assert (energy_distance(x, x + 0.5) > 0.1).all()


def test_the_u_statistic_is_unbiased_and_the_v_statistic_is_not():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3000, 6, 4, generator=generator)
    unbiased, biased = energy_distance(x, y, statistic="U"), energy_distance(x, y)
    error = unbiased.std() / 3000**0.5
    assert unbiased.mean().abs() < 3 * error
    assert biased.mean() > 20 * error


def test_float32_even_under_autocast_and_for_far_away_cells():
    x = torch.rand(1, 6, 2000) * 0.1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = energy_distance(x.bfloat16(), x.bfloat16() + 0.1)
    assert value.dtype == torch.float32


def test_gradient_is_finite_at_coinciding_cells():
    x = torch.zeros(1, 4, 3, requires_grad=True)
    energy_distance(x, torch.zeros(1, 4, 3), statistic="U").sum().backward()
    assert x.grad.isfinite().all()


def test_hybrid_loss_terms():
    x, y = torch.rand(2, 2, 5, 7)
    mean = hybrid_loss(x, y, LossConfig(mmd_weight=2.0, mse_weight=3.0))
    assert mean["mse"] == pytest.approx(((x - y) ** 2).mean().item(), rel=1e-5)
    assert mean["total"] == pytest.approx((2 * mean["mmd"] + 3 * mean["mse"]).item(), rel=1e-6)
    summed = hybrid_loss(x, y, LossConfig(mse_reduction="sum"))
    assert summed["mse"] == pytest.approx(7 * mean["mse"].item(), rel=1e-5)
    only = hybrid_loss(x, y, LossConfig(mse_weight=0.0))
    assert only == {"total": only["mmd"], "mmd": only["mmd"]}
    only = hybrid_loss(x, y, LossConfig(mmd_weight=0.0))
    assert only == {"total": only["mse"], "mse": only["mse"]}
    with pytest.raises(UserError, match="nothing to learn from"):
        hybrid_loss(x, y, LossConfig(mmd_weight=0.0, mse_weight=0.0))


def test_one_cell_is_not_a_set():
    with pytest.raises(ValueError, match="at least two"):
        energy_distance(torch.rand(1, 1, 3), torch.rand(1, 4, 3))


def test_cross_statistic_is_the_mean_over_pairs_across_twins():
    x, y = torch.randn(4, 5, 3), torch.randn(4, 5, 3) + 0.3
    found = cross_energy_distance(x, y)
    expected = [
        torch.cdist(x[i], y[i + 1]).mean() + torch.cdist(x[i + 1], y[i]).mean()
        - torch.cdist(x[i], x[i + 1]).mean() - torch.cdist(y[i], y[i + 1]).mean()
        for i in (0, 2)
    ]  # fmt: skip
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(cross_energy_distance(x, y, factor="half"), found / 2)


def test_spread_within_a_set_pays_in_the_u_statistic_but_not_across_twins():
    """Cells on a grid inside each set: too narrow a population, yet far from each other."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(400, 8, 1, generator=generator)
    quantiles = torch.distributions.Normal(0, 1).icdf((torch.arange(8) + 0.5) / 8)[None, :, None]
    spread = quantiles.expand(400, 8, 1)
    assert energy_distance(spread, truth, statistic="U").mean() < -0.05
    assert cross_energy_distance(spread, truth).mean() > 0


def test_populations_are_compared_across_sets():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(3, 4, 5, generator=generator), torch.rand(3, 4, 5, generator=generator) + 0.2

    def mean(a, b, skip):
        pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if not (skip and i == j)]
        return torch.stack([(p - q).norm() for i, j in pairs for p in a[i] for q in b[j]]).mean()

    expected = 2 * mean(x, y, False) - mean(x, x, True) - mean(y, y, True)
    assert population_energy_distance(x, y).item() == pytest.approx(expected.item(), rel=1e-4)
    single = energy_distance(x[:1], y[:1], statistic="U").item()
    assert population_energy_distance(x[:1], y[:1]).item() == pytest.approx(single)
    with pytest.raises(ValueError, match="several sets"):
        population_energy_distance(x[:1], y)


def test_sets_that_only_look_right_together_do_not_deceive():
    """Cells spread evenly in every set, the same in each: right by sets, wrong as a population."""
    real = torch.randn(40, 4, 2, generator=torch.Generator().manual_seed(0))
    angle = torch.arange(4) * (torch.pi / 2)
    even = 0.9 * torch.stack([angle.cos(), angle.sin()], -1).expand(40, 4, 2)
    by_sets = energy_distance(even, real, statistic="U").mean()
    assert by_sets < 0
    assert population_energy_distance(even, real) > by_sets + 0.3
