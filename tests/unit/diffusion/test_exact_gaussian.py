"""The reverse process with the exact denoiser of a Gaussian N(μ, Σ), all of whose marginals are known.

The posterior mean is E[x0 | x_t] = μ + √α Σ (α Σ + (1 - α) I)⁻¹ (x_t - √α μ), and x_t ~ N(√α μ, α Σ + (1 - α) I).
It is affine in x_t, so a whole DDIM trajectory is, and its matrix is read off from the images of a few points.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from perturbdiff.config.settings import SampleConfig
from perturbdiff.diffusion.samplers import normal, sample
from perturbdiff.diffusion.schedule import NoiseSchedule

SCHEDULE = NoiseSchedule(1000)
CELLS = 40_000
MEAN = torch.tensor([0.8, -0.3, 1.5], dtype=torch.float64)
ROOT = torch.tensor([[0.5, 0.0, 0.0], [0.3, 0.4, 0.0], [-0.2, 0.1, 0.9]], dtype=torch.float64)
COVARIANCE = ROOT @ ROOT.T
UNIT = torch.eye(3, dtype=torch.float64)
ALPHA = torch.from_numpy(SCHEDULE.alpha_bar)[:, None, None]
GAINS = ALPHA.sqrt() * COVARIANCE @ torch.linalg.inv(ALPHA * COVARIANCE + (1 - ALPHA) * UNIT)


def marginal(level, mean=MEAN):
    """Mean and covariance of x_t."""
    alpha = float(SCHEDULE.alpha_bar[level])
    return alpha**0.5 * mean, alpha * COVARIANCE + (1 - alpha) * UNIT


def exact(conditional_mean=MEAN, unconditional_mean=MEAN, seen=None):
    """Return the posterior mean as a `Denoise`."""

    def denoise(x, level, previous, conditional):
        if seen is not None and conditional:
            seen[int(level)] = x
        mean = conditional_mean if conditional else unconditional_mean
        centre, gain = marginal(level, mean)[0].to(x.dtype), GAINS[level].T.to(x.dtype)
        return mean.to(x.dtype) + (x - centre) @ gain

    return denoise


def affine(settings, denoise=None):
    """Return mean and covariance of DDIM's result, exactly: its affine map applied to N(0, I)."""
    points = torch.cat([torch.zeros(1, 3, dtype=torch.float64), UNIT])[None]
    images = sample(denoise or exact(), lambda: points, SCHEDULE, settings)[0]
    linear = (images[1:] - images[0]).T
    return images[0], linear @ linear.T


def moments(cells):
    cells = cells.reshape(-1, 3).double()
    return cells.mean(0), cells.T.cov()


def drawn(seed=0, cells=CELLS):
    return normal((1, cells, 3), torch.Generator().manual_seed(seed))


def standard_errors(covariance=COVARIANCE, cells=CELLS):
    """Standard errors of the mean and of the covariance of a Gaussian sample."""
    diagonal = covariance.diagonal()
    return (diagonal / cells).sqrt(), ((covariance**2 + diagonal[:, None] * diagonal) / cells).sqrt()


def assert_moments(cells, mean=MEAN, covariance=COVARIANCE, *, discretisation):
    """Within 4.5 standard errors and the error that K steps have even without chance (relative, in Σ)."""
    mean_error, covariance_error = standard_errors(covariance)
    found_mean, found_covariance = moments(cells)
    scale = covariance.diagonal().sqrt()
    assert ((found_mean - mean).abs() < 4.5 * mean_error + discretisation * scale).all()
    allowed = 4.5 * covariance_error + discretisation * scale[:, None] * scale
    assert ((found_covariance - covariance).abs() < allowed).all()


def test_ddim_turns_the_standard_normal_into_the_target():
    """Its covariance up to an error of order 1/K; its mean up to what the start N(0, I) lacks of x_T's mean."""
    errors = []
    for steps in (200, 1000):
        mean, covariance = affine(SampleConfig(num_steps=steps))
        errors.append((covariance - COVARIANCE).abs().max().item())
        lacking = marginal(999)[0].norm() * COVARIANCE.diagonal().max().sqrt()
        assert 0 < (mean - MEAN).norm() < 1.05 * lacking < 0.02
    assert errors[0] < 0.02
    assert errors[1] < 0.004
    assert 4 < errors[0] / errors[1] < 6


def test_ddim_from_the_true_noised_cells_has_the_exact_mean():
    centre, spread = marginal(999)
    points = centre + torch.cat([torch.zeros(1, 3, dtype=torch.float64), torch.linalg.cholesky(spread).T])
    images = sample(exact(), lambda: points[None], SCHEDULE, SampleConfig(num_steps=1000))[0]
    linear = (images[1:] - images[0]).T
    torch.testing.assert_close(images[0], MEAN, rtol=0, atol=1e-9)
    torch.testing.assert_close(linear @ linear.T, COVARIANCE, rtol=0, atol=0.004)


@pytest.mark.parametrize(("steps", "discretisation"), [(200, 0.03), (1000, 0.011)])
def test_ddim_of_many_cells(steps, discretisation):
    cells = sample(exact(), drawn(), SCHEDULE, SampleConfig(num_steps=steps))
    assert_moments(cells, discretisation=discretisation)


@pytest.mark.parametrize(("steps", "discretisation"), [(200, 0.075), (1000, 0.015)])
def test_ddpm_of_many_cells(steps, discretisation):
    settings = SampleConfig(sampler="ddpm", num_steps=steps)
    assert_moments(sample(exact(), drawn(), SCHEDULE, settings), discretisation=discretisation)


def test_the_two_variances_of_ddpm_bracket_the_truth():
    """The variance of q(x_s | x_t) of data narrower than N(0, I) lies between the posterior's and β."""
    spreads = []
    for variance in ("posterior", "beta"):
        settings = SampleConfig(sampler="ddpm", num_steps=100, ddpm_variance=variance)
        spreads.append(moments(sample(exact(), drawn(), SCHEDULE, settings))[1].trace())
    width = 4.5 * standard_errors()[1].diagonal().norm()
    assert spreads[0] < COVARIANCE.trace() - width < COVARIANCE.trace() + 0.2 * width < spreads[1]


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_every_visited_level_has_its_trained_marginal(sampler):
    """What the denoiser is shown on the way is what it was trained on."""
    seen = {}
    sample(exact(seen=seen), drawn(), SCHEDULE, SampleConfig(sampler=sampler, num_steps=400))
    assert len(seen) == 400
    for level in (seen_levels := list(seen))[:: len(seen_levels) // 8]:
        mean, covariance = marginal(level)
        assert_moments(seen[level], mean, covariance, discretisation=0.04)


def one_step(level, estimate, **settings):
    """Go from one level to the one below, with a given estimate; returns the cells below."""
    seen, generator = [], torch.Generator().manual_seed(0)

    def denoise(x, level, previous, conditional):
        seen.append(x)
        return estimate

    def draw():
        return torch.randn(estimate.shape, generator=generator, dtype=torch.float64)

    sample(denoise, draw, SCHEDULE, SampleConfig(num_steps=level + 1, start_level=level + 1, **settings))
    return seen[1]


@pytest.mark.parametrize("level", [999, 500, 30, 1])
def test_ddim_with_full_noise_is_ddpm_with_the_posterior_variance(level):
    estimate = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ddim = one_step(level, estimate, eta=1.0)
    torch.testing.assert_close(ddim, one_step(level, estimate, sampler="ddpm"), rtol=1e-9, atol=1e-9)
    other = one_step(level, estimate, sampler="ddpm", ddpm_variance="beta")
    assert not torch.allclose(ddim, other, rtol=0, atol=1e-8)


def test_whole_trajectories_of_the_two_agree():
    ddim = sample(exact(), drawn(cells=50), SCHEDULE, SampleConfig(num_steps=60, eta=1.0))
    ddpm = sample(exact(), drawn(cells=50), SCHEDULE, SampleConfig(num_steps=60, sampler="ddpm"))
    torch.testing.assert_close(ddim, ddpm, rtol=1e-4, atol=1e-4)


# guidance


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_guided_gaussians_of_one_covariance_give_the_extrapolated_mean(weight):
    """(1 + w) score_c - w score_u of N(μ_c, Σ_t) and N(μ_u, Σ_t) is the score of mean (1 + w) μ_c - w μ_u."""
    other = torch.tensor([0.2, 0.1, 1.0], dtype=torch.float64)
    settings = SampleConfig(num_steps=400, guidance=weight)
    mean, covariance = affine(settings, exact(MEAN, other))
    torch.testing.assert_close(mean, (1 + weight) * MEAN - weight * other, rtol=0, atol=0.02)
    unguided = affine(SampleConfig(num_steps=400))[1]
    torch.testing.assert_close(covariance, unguided, rtol=1e-9, atol=1e-9)


def test_no_guidance_is_conditional_sampling():
    other = torch.zeros(3, dtype=torch.float64)
    guided = sample(exact(MEAN, other), drawn(cells=20), SCHEDULE, SampleConfig(num_steps=30, guidance=0.0))
    alone = sample(exact(MEAN, MEAN), drawn(cells=20), SCHEDULE, SampleConfig(num_steps=30))
    assert torch.equal(guided, alone)
    more = sample(exact(MEAN, other), drawn(cells=20), SCHEDULE, SampleConfig(num_steps=30, guidance=1e-3))
    torch.testing.assert_close(more, alone, rtol=0, atol=5e-3)
    assert not torch.equal(more, alone)


@pytest.mark.parametrize("weight", [0.5, 1.0, 7.0])
def test_guidance_by_equal_estimates_changes_nothing(weight):
    plain = sample(exact(), drawn(cells=20), SCHEDULE, SampleConfig(num_steps=30))
    found = sample(exact(), drawn(cells=20), SCHEDULE, SampleConfig(num_steps=30, guidance=weight))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


# respacing


def mixture(x, level, previous, conditional):
    """Posterior mean of an equal mixture of N(-1, 0.2²) and N(1, 0.2²) in each gene: not affine."""
    alpha = float(SCHEDULE.alpha_bar[level])
    variance = alpha * 0.04 + 1 - alpha
    side = torch.tanh(alpha**0.5 * x / variance)
    return side + alpha**0.5 * 0.04 / variance * (x - alpha**0.5 * side)


def test_all_levels_are_the_full_chain_of_the_paper():
    """Eq. ddim_eta0, written out over t = T .. 1."""
    x = start = torch.linspace(-2.5, 2.5, 41, dtype=torch.float64)[None, :, None]
    alpha = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    for t in range(999, 0, -1):
        estimate = mixture(x, t, None, True)
        noise = (x - alpha[t] ** 0.5 * estimate) / (1 - alpha[t]) ** 0.5
        x = alpha[t - 1] ** 0.5 * estimate + (1 - alpha[t - 1]) ** 0.5 * noise
    found = sample(mixture, lambda: start, SCHEDULE, SampleConfig(num_steps=1000))
    torch.testing.assert_close(found, mixture(x, 0, None, True), rtol=1e-9, atol=1e-9)


def test_fewer_steps_converge_to_the_full_chain():
    """The end points of a deterministic trajectory, at a rate of about 1/K."""
    start = torch.linspace(-2.5, 2.5, 40, dtype=torch.float64)[None, :, None]

    def end(steps):
        return sample(mixture, lambda: start, SCHEDULE, SampleConfig(num_steps=steps))

    full = end(1000)
    errors = [(end(steps) - full).square().mean().sqrt().item() for steps in (10, 20, 50, 100, 250, 500)]
    assert all(later < 0.75 * former for former, later in itertools.pairwise(errors))
    assert errors[3] < 0.02
    assert errors[-1] < 0.003


def test_fewer_stochastic_steps_converge_in_distribution():
    """DDPM's spread misses the target's by an error of order 1/K."""
    errors = []
    for steps in (25, 100, 400):
        settings = SampleConfig(sampler="ddpm", num_steps=steps)
        errors.append((COVARIANCE - moments(sample(exact(), drawn(), SCHEDULE, settings))[1]).trace().item())
    assert errors[0] > 2.5 * errors[1] > 2.5 * 2.5 * errors[2] > 0
