"""The energy distance against geomloss, against closed forms, as an estimate, and its gradient.

Two conventions meet here. The paper's Eq. energy_distance is ED = 2 E|x-y| - E|x-x'| - E|y-y'|; geomloss'
``SamplesLoss("energy")`` and the released code, which calls it, give the squared RKHS norm of the kernel -|x-y|
with a factor 1/2, that is ED / 2. Both keep each cell's zero distance to itself (V-statistic). Squared distances
are kept above 1e-8, as in geomloss, for the gradient of the root is infinite at zero: a self-pair then counts 1e-4
instead of 0, which lowers ED by 1e-4 (1/n + 1/m).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from geomloss import SamplesLoss

from perturbdiff.config import recipes
from perturbdiff.diffusion.losses import (
    cross_energy_distance,
    distances,
    energy_distance,
    hybrid_loss,
    population_energy_distance,
)

ROOT_PI = math.sqrt(math.pi)


def normal_sets(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integer_sets():
    """Cells whose squared distances are exact in float32; no two of them coincide."""
    x = torch.tensor([[0.0, 0, 0], [3, 4, 0], [0, 0, 12], [1, 2, 2]])[None]
    y = torch.tensor([[5.0, 5, 5], [-2, 1, 0], [7, 0, 1]])[None]
    return x, y


def exact(x, y):
    """ED of two sets [n, G], [m, G] in float64, nothing clamped."""
    x, y = x.double(), y.double()

    def mean(a, b):
        return (a[:, None] - b[None]).norm(dim=-1).mean()

    return (2 * mean(x, y) - mean(x, x) - mean(y, y)).item()


# geomloss


@pytest.mark.parametrize("genes", [2, 200])
def test_half_of_the_paper_is_geomloss_with_its_gradient(genes):
    x, y = normal_sets(3, 24, genes), 0.5 * normal_sets(3, 17, genes, seed=1) + 0.4
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    half = energy_distance(mine, y, factor="half")
    reference = SamplesLoss("energy", blur=0.05, backend="tensorized")(theirs, y)
    torch.testing.assert_close(half, reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(energy_distance(x, y), 2 * reference.detach(), rtol=1e-5, atol=2e-6)
    half.sum().backward()
    reference.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_clamping_lowers_the_value_by_what_the_self_pairs_count():
    """As geomloss does, to float32 rounding; the U-statistic has no self-pairs and loses nothing."""
    x, y = integer_sets()
    truth, lost = exact(x[0], y[0]), 1e-4 * (1 / 4 + 1 / 3)
    assert energy_distance(x, y).item() == pytest.approx(truth - lost, abs=4e-6)
    assert 2 * SamplesLoss("energy", backend="tensorized")(x, y).item() == pytest.approx(
        truth - lost, abs=4e-6
    )
    within = [
        (a[:, None] - a[None]).norm(dim=-1).sum().item() / (len(a) * (len(a) - 1)) for a in (x[0], y[0])
    ]
    between = (x[0][:, None] - y[0][None]).norm(dim=-1).mean().item()
    assert energy_distance(x, y, statistic="U").item() == pytest.approx(2 * between - sum(within), abs=4e-6)


@pytest.mark.parametrize(("variant", "factor"), [("paper", 2.0), ("released", 1.0)])
def test_the_objective_of_each_reading_is_written_with_geomloss(variant, factor):
    """Eq. train_objective, mean over sets: the released code has half the paper's energy distance."""
    x, y = normal_sets(3, 16, 5), normal_sets(3, 16, 5, seed=1) + 0.2
    terms = hybrid_loss(x, y, recipes.load(variant).loss)
    mmd = factor * SamplesLoss("energy", blur=0.05, backend="tensorized")(x, y).mean()
    assert terms["mmd"].item() == pytest.approx(mmd.item(), rel=1e-5)
    assert terms["total"].item() == pytest.approx((mmd + (x - y).square().mean()).item(), rel=1e-5)


# closed forms


def test_point_masses():
    """δ_a against δ_b: 2 |a - b|; half of the mass moved by d: d / 2 (both less 2e-4 of clamped pairs or less)."""
    a, b = torch.tensor([0.0, 0.0]).expand(4, 2), torch.tensor([3.0, 4.0]).expand(4, 2)
    assert energy_distance(a[None], b[None]).item() == pytest.approx(2 * 5.0, abs=2.1e-4)
    assert energy_distance(a[None], b[None], factor="half").item() == pytest.approx(5.0, abs=1.1e-4)
    some = torch.cat([a[:2], b[:2]])
    assert energy_distance(a[None], some[None]).item() == pytest.approx(5.0 / 2, abs=2.1e-4)


@pytest.mark.parametrize(("shift", "sd"), [(0.0, 2.0), (1.0, 1.0), (2.5, 0.5)])
def test_two_gaussians_in_one_dimension(shift, sd):
    """E|Z| of Z ~ N(d, s²) is s √(2/π) exp(-d²/2s²) + d erf(d / s√2); sets are quantiles of the two."""

    def absolute(d, s):
        return s * math.sqrt(2 / math.pi) * math.exp(-(d**2) / (2 * s**2)) + d * math.erf(
            d / (s * math.sqrt(2))
        )

    n = 1500
    quantiles = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(n, dtype=torch.float64) + 0.5) / n)
    x, y = quantiles.float()[None, :, None], (shift + sd * quantiles).float()[None, :, None]
    truth = 2 * absolute(shift, math.hypot(1, sd)) - 2 / ROOT_PI - 2 * sd / ROOT_PI
    assert energy_distance(x, y).item() == pytest.approx(truth, rel=2e-3)
    assert energy_distance(x, y, factor="half").item() == pytest.approx(truth / 2, rel=2e-3)


def test_on_a_line_it_is_the_integral_between_distribution_functions():
    """On the line ED = 2 ∫ (F - G)² (Székely and Rizzo); here on a line through five dimensions, any two sets."""
    x, y = normal_sets(30).sort().values, (0.7 * normal_sets(20, seed=1) + 0.3).sort().values
    ends = torch.cat([x, y]).sort().values.double()
    f = torch.searchsorted(x.double(), ends[:-1], right=True) / len(x)
    g = torch.searchsorted(y.double(), ends[:-1], right=True) / len(y)
    truth = 2 * ((f - g) ** 2 * ends.diff()).sum().item()
    line = torch.nn.functional.normalize(normal_sets(5, seed=2), dim=0)
    found = energy_distance((x[:, None] * line)[None], (y[:, None] * line)[None]).item()
    assert found == pytest.approx(truth, abs=1e-4)


# as an estimate of the distance between populations

CELLS, GENES, SETS, WIDE = 5, 3, 4000, 1.6


def mean_distance(sd):
    """E|X - X'| of X ~ N(0, sd² I) in GENES dimensions."""
    return 2 * sd * math.gamma((GENES + 1) / 2) / math.gamma(GENES / 2)


TRUTH = 2 * mean_distance(math.sqrt((1 + WIDE**2) / 2)) - mean_distance(1.0) - mean_distance(WIDE)


def two_populations(sets=SETS):
    return normal_sets(sets, CELLS, GENES), WIDE * normal_sets(sets, CELLS, GENES, seed=1)


def assert_mean(values, expected, width=3.5):
    assert values.mean().item() == pytest.approx(
        expected, abs=width * values.std().item() / len(values) ** 0.5
    )


def test_u_statistic_is_unbiased_and_v_is_off_by_its_self_pairs():
    x, y = two_populations()
    assert_mean(energy_distance(x, y, statistic="U"), TRUTH)
    assert_mean(energy_distance(x, y), TRUTH + (mean_distance(1.0) + mean_distance(WIDE)) / CELLS)


def test_cross_statistic_is_unbiased_also_for_cells_that_belong_together():
    """Cells of a set share a shift: the population is wider than any set, which the U-statistic cannot see."""
    x, y = two_populations()
    assert_mean(cross_energy_distance(x, y), TRUTH)
    shift = math.sqrt(WIDE**2 - 1)
    together = normal_sets(SETS, CELLS, GENES, seed=2) + shift * normal_sets(SETS, 1, GENES, seed=3)
    assert_mean(cross_energy_distance(x, together), TRUTH)
    by_sets = energy_distance(x, together, statistic="U")
    assert by_sets.mean() > TRUTH + 10 * by_sets.std() / SETS**0.5


def test_distance_of_populations_is_unbiased():
    x, y = two_populations(sets=900)
    pairs = zip(x.split(3), y.split(3), strict=True)
    assert_mean(torch.stack([population_energy_distance(a, b) for a, b in pairs]), TRUTH)


# invariances


@pytest.mark.parametrize("statistic", ["V", "U"])
def test_invariances(statistic):
    x, y = normal_sets(2, 12, 6), 0.8 * normal_sets(2, 9, 6, seed=1) + 0.3
    value = energy_distance(x, y, statistic=statistic)
    turn = torch.linalg.qr(normal_sets(6, 6, seed=2)).Q
    for name, other in {
        "symmetry": energy_distance(y, x, statistic=statistic),
        "translation": energy_distance(x + 2, y + 2, statistic=statistic),
        "rotation": energy_distance(x @ turn, y @ turn, statistic=statistic),
        "order": energy_distance(x.flip(1), y.roll(4, 1), statistic=statistic),
        "scale": energy_distance(3 * x, 3 * y, statistic=statistic) / 3,
    }.items():
        # a translated self-pair's distance is the root of a rounding error, hence 1e-3
        torch.testing.assert_close(other, value, rtol=0, atol=1e-3, msg=name)


def test_cross_statistic_is_symmetric_in_its_sets_and_its_twins():
    x, y = normal_sets(4, 7, 3), normal_sets(4, 7, 3, seed=1) + 0.3
    value = cross_energy_distance(x, y)
    swapped = torch.tensor([1, 0, 3, 2])
    torch.testing.assert_close(cross_energy_distance(y, x), value)
    torch.testing.assert_close(cross_energy_distance(x[swapped], y[swapped]), value)


def test_v_statistic_is_a_squared_norm():
    x, y = normal_sets(50, 6, 4), normal_sets(50, 6, 4, seed=1)
    assert (energy_distance(x, y) > 0).all()


# gradient


def test_gradient_of_distances_is_that_of_finite_differences():
    x, y = normal_sets(4, 3).double().requires_grad_(), normal_sets(5, 3, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(distances, (x, y), eps=1e-6, atol=1e-7)


def test_gradient_is_that_of_finite_differences():
    x, y = normal_sets(1, 5, 3), normal_sets(1, 4, 3, seed=1) + 0.5
    x.requires_grad_()
    energy_distance(x, y).sum().backward()
    step, found = 1e-6, torch.zeros(5, 3)
    for i, g in np.ndindex(5, 3):
        ends = [x[0].detach().double() for _ in range(2)]
        for sign, end in zip((1, -1), ends, strict=True):
            end[i, g] += sign * step
        found[i, g] = (exact(ends[0], y[0]) - exact(ends[1], y[0])) / (2 * step)
    torch.testing.assert_close(x.grad[0], found, atol=2e-5, rtol=1e-4)


def test_coinciding_cells_pull_nowhere():
    """|h| has the central difference 0 at 0: a clamped pair has no gradient, all others have theirs."""
    x, y = integer_sets()
    y = torch.cat([x[:, 1:2], y[:, 1:]], 1)  # its first cell lies on the second of x
    x = torch.cat([x, x[:, 3:]], 1)  # its last two cells coincide
    x.requires_grad_()
    energy_distance(x, y).sum().backward()

    def pull(cells):  # sum of unit vectors towards each cell of x, nothing from a coinciding one
        apart = x.detach()[0][:, None] - cells[None]
        return torch.nn.functional.normalize(apart, dim=-1).sum(1)

    expected = 2 * pull(y[0]) / (5 * 3) - 2 * pull(x.detach()[0]) / 5**2
    torch.testing.assert_close(x.grad[0], expected, atol=2e-6, rtol=1e-5)


def test_equal_sets_are_a_stationary_point():
    """The first-order term of the squared MMD vanishes at equal sets (paper, App. score matching)."""
    x = normal_sets(1, 8, 3).requires_grad_()
    energy_distance(x, x.detach().flip(1)).sum().backward()
    assert x.grad.abs().max() < 1e-3
