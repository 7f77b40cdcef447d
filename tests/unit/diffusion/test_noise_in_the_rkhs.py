"""What noise on cells is in the RKHS: the paper's Prop. exact_covariance_form, by Monte Carlo.

The proposition (App. Tractable Training and Sampling): let μ0 = 1/m Σ_j k(x_j, ·) be the mean embedding of m cells
and μ̃ that of x_j + σ ε_j, ε_j ~ N(0, I). To first order in σ, μ̃ - μ0 is a Gaussian random element with covariance
operator σ² C, C = 1/m² Σ_j T_j T_j*, T_j v = ∇k(x_j, ·)ᵀ v. Since T_j* f = ∇f(x_j), that says

    Cov(⟨μ̃ - μ0, f⟩, ⟨μ̃ - μ0, g⟩) = σ² / m² Σ_j ∇f(x_j)·∇g(x_j)        for f, g in the RKHS.

Test functions here are f = Σ_i a_i k(z_i, ·), for which ⟨μ, f⟩ = Σ_i a_i μ(z_i). The forward process shrinks cells
by √α besides noising them, so the statement is about √α x_j with σ = √(1 - α).

What the proposition needs is a derivative of k that is bounded in the RKHS norm. Smooth kernels have it. The energy
distance kernel k(x, y) = |x - o| + |y - o| - |x - y| does not: |k(x + h, ·) - k(x, ·)|² = 2 |h|, of the order of
h and not of h². For it the statement holds for test functions that are smooth at the cells, as below, while the
norm of μ̃ - μ0 is of another order; the last test shows both.
"""

from __future__ import annotations

import math

import pytest
import torch

from perturbdiff.diffusion.schedule import NoiseSchedule

SCHEDULE = NoiseSchedule(1000)
DRAWS, CELLS, GENES, LENGTH = 40_000, 4, 3, 1.5
X = torch.tensor([[0.9, 0.2, 1.4], [0.1, 1.1, 0.6], [1.6, 0.8, 0.3], [0.5, 0.4, 0.9]], dtype=torch.float64)
ORIGIN = torch.full((GENES,), -1.0, dtype=torch.float64)
# centres of the test functions [functions, points, genes]: none near a cell, where the energy kernel has its kink
CENTRES = torch.tensor(
    [[[2.5, 0.0, 2.0], [-1.0, 1.5, 0.0]], [[0.0, -1.5, 1.0], [2.0, 2.5, 1.5]]], dtype=torch.float64
)
WEIGHTS = torch.tensor([[1.0, -0.6], [0.8, 0.5]], dtype=torch.float64)


def rbf(x, z):
    return torch.exp(-(torch.cdist(x, z) ** 2) / (2 * LENGTH**2))


def energy(x, z):
    return (
        (x - ORIGIN).norm(dim=-1)[..., :, None] + (z - ORIGIN).norm(dim=-1)[..., None, :] - torch.cdist(x, z)
    )


def functions(kernel, x):
    """Values of the test functions at the cells [..., m, G]: [..., m, functions]."""
    values = [
        (kernel(x, centres) * weights).sum(-1) for centres, weights in zip(CENTRES, WEIGHTS, strict=True)
    ]
    return torch.stack(values, -1)


def gradients(kernel, x):
    """T_j* f = ∇f(x_j): [functions, m, G]."""
    x = x.clone().requires_grad_()
    values = functions(kernel, x).sum(0)
    return torch.stack([torch.autograd.grad(value, x, retain_graph=True)[0] for value in values])


def noised(level):
    """Return cells after the forward process, where they would be without noise, its SD, and the noise."""
    noise = torch.randn(DRAWS, CELLS, GENES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha = float(SCHEDULE.alpha_bar[level])
    cells = SCHEDULE.add_noise(X.expand(DRAWS, -1, -1), torch.full((DRAWS,), level), noise)
    return cells, math.sqrt(alpha) * X, math.sqrt(1 - alpha), noise


def covariance(values):
    """Second moments about 0 of [draws, functions], and their standard errors."""
    products = values[:, :, None] * values[:, None, :]
    return products.mean(0), products.std(0) / DRAWS**0.5


def stated(kernel, x, sd):
    """The proposition's σ² ⟨C f, g⟩ for all pairs of test functions."""
    slopes = gradients(kernel, x)
    return sd**2 / CELLS**2 * torch.einsum("fjg,hjg->fh", slopes, slopes)


@pytest.mark.parametrize("kernel", [rbf, energy])
def test_covariance_is_the_stated_one(kernel):
    cells, clean, sd, _ = noised(level=2)
    change = (functions(kernel, cells) - functions(kernel, clean)).mean(1)  # ⟨μ̃ - μ0, f⟩
    found, error = covariance(change)
    expected = stated(kernel, clean, sd)
    assert (expected.diagonal() > 20 * error.diagonal()).all()
    assert ((found - expected).abs() < 4 * error + 2e-3 * expected.diagonal().max()).all()


@pytest.mark.parametrize("kernel", [rbf, energy])
def test_it_is_exact_for_the_first_order_term(kernel):
    """⟨Δ, f⟩ = 1/m Σ_j ∇f(x_j)·σ ε_j: centred, and Gaussian with the stated covariance at any noise level."""
    _, clean, sd, noise = noised(level=300)
    linear = sd * torch.einsum("fjg,djg->df", gradients(kernel, clean), noise) / CELLS
    found, error = covariance(linear)
    assert ((found - stated(kernel, clean, sd)).abs() < 4 * error).all()
    assert (linear.mean(0).abs() < 4 * linear.std(0) / DRAWS**0.5).all()
    kurtosis = (linear / linear.std(0)).pow(4).mean(0)
    assert ((kurtosis - 3).abs() < 4 * math.sqrt(24 / DRAWS)).all()


@pytest.mark.parametrize("kernel", [rbf, energy])
def test_what_the_first_order_leaves_out_shrinks_with_the_noise(kernel):
    """The same draws through the kernel and through Δ: the relative error of the covariance falls as σ²."""
    errors, spreads = [], []
    for level in (1, 6, 20, 60):
        cells, clean, sd, noise = noised(level)
        change = (functions(kernel, cells) - functions(kernel, clean)).mean(1)
        linear = sd * torch.einsum("fjg,djg->df", gradients(kernel, clean), noise) / CELLS
        # cross moments of odd order vanish in expectation; the mirrored noise removes them from the draws
        mirrored = (functions(kernel, 2 * clean - cells) - functions(kernel, clean)).mean(1)
        found = (covariance(change)[0] + covariance(mirrored)[0]) / 2
        first = covariance(linear)[0]
        errors.append(((found - first).norm() / first.norm()).item())
        spreads.append(sd)
    assert errors[0] < 1e-3
    assert errors[-1] > 1e-2
    rates = [
        math.log(errors[i + 1] / errors[i]) / math.log(spreads[i + 1] / spreads[i])
        for i in range(len(errors) - 1)
    ]
    assert all(1.7 < rate < 2.3 for rate in rates)


def test_its_norm_is_of_second_order_for_a_smooth_kernel_only():
    """E|μ̃ - μ0|²: σ² tr C = σ² G / (m ℓ²) for the RBF; for the energy kernel 2 σ E|ε| / m, of first order."""
    length = math.sqrt(2) * math.gamma((GENES + 1) / 2) / math.gamma(GENES / 2)  # E|ε|
    for level in (0, 10):
        cells, clean, sd, _ = noised(level)
        expected = {rbf: sd**2 * GENES / (CELLS * LENGTH**2), energy: 2 * sd * length / CELLS}
        for kernel, value in expected.items():
            squares = kernel(cells, cells) - 2 * kernel(cells, clean) + kernel(clean, clean)
            assert squares.mean().item() == pytest.approx(value, rel=0.04)
