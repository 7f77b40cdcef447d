"""Samplers against the exact denoiser of a Gaussian, whose reverse process is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbdiff.config.settings import SampleConfig
from perturbdiff.diffusion.samplers import guided, normal, sample
from perturbdiff.diffusion.schedule import NoiseSchedule

SCHEDULE = NoiseSchedule(1000)
MEAN, SD = 1.5, 0.4


def exact(mean=MEAN, sd=SD):
    """E[x0 | x_t] for x0 ~ N(mean, sd²)."""

    def denoise(x, level, previous, conditional):
        alpha = float(SCHEDULE.alpha_bar[level])
        gain = alpha**0.5 * sd**2 / (alpha * sd**2 + 1 - alpha)
        return mean + gain * (x - alpha**0.5 * mean)

    return denoise


def draw(shape=(4, 64, 100), seed=0):
    return normal(shape, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"num_steps": 200}, 0.02),
        ({"num_steps": 1000}, 0.01),
        ({"num_steps": 200, "eta": 1.0}, 0.03),
        ({"num_steps": 400, "sampler": "ddpm"}, 0.03),
        ({"num_steps": 1000, "sampler": "ddpm", "ddpm_variance": "beta"}, 0.02),
    ],
)
def test_recovers_a_gaussian(settings, tolerance):
    cells = sample(exact(), draw(), SCHEDULE, SampleConfig(**settings))
    assert cells.mean().item() == pytest.approx(MEAN, abs=tolerance)
    assert cells.std().item() == pytest.approx(SD, abs=tolerance)


def test_ddim_is_a_function_of_its_start_noise():
    first = sample(exact(), draw(), SCHEDULE, SampleConfig(num_steps=20))
    assert torch.equal(first, sample(exact(), draw(), SCHEDULE, SampleConfig(num_steps=20)))
    assert not torch.equal(first, sample(exact(), draw(seed=1), SCHEDULE, SampleConfig(num_steps=20)))


def test_no_guidance_means_one_conditional_pass_a_step():
    calls = []

    def denoise(x, level, previous, conditional):
        calls.append((level, conditional))
        return exact()(x, level, previous, conditional)

    sample(denoise, draw((1, 2, 3)), SCHEDULE, SampleConfig(num_steps=3, guidance=0.0))
    assert calls == [(999, True), (500, True), (0, True)]
    calls.clear()
    sample(denoise, draw((1, 2, 3)), SCHEDULE, SampleConfig(num_steps=2, guidance=1.0))
    assert calls == [(999, True), (999, False), (0, True), (0, False)]


@pytest.mark.parametrize("arithmetic", ["double", "single"])
@pytest.mark.parametrize("level", [5, 300, 999])
def test_guidance_in_noise_space(level, arithmetic):
    x, conditional, unconditional = torch.rand(3, 2, 4, 5, dtype=torch.float64)
    step = SCHEDULE.reverse(np.array([level, 0]), arithmetic=arithmetic)[0]
    found = guided(lambda *a: conditional if a[3] else unconditional, x, step, None, 1.5)
    torch.testing.assert_close(found, 2.5 * conditional - 1.5 * unconditional)
    weight = torch.tensor([0.0, 1.5], dtype=torch.float64)[:, None, None]
    each = guided(lambda *a: conditional if a[3] else unconditional, x, step, None, weight)
    torch.testing.assert_close(each[1], found[1])
    assert torch.equal(each[0], conditional[0])


@pytest.mark.parametrize("weight", [0.3, 0.5, 1.0, 2.0, torch.tensor([0.5, 2.0])[:, None, None]])
@pytest.mark.parametrize("level", [5, 300, 999])
def test_guidance_keeps_zeros(level, weight):
    """Rounding on the way through the noise made twice as many non-zero values of w = 0.5 as of w = 1."""
    step = SCHEDULE.reverse(np.array([level, 0]))[0]
    estimate = torch.rand(2, 40, 5).clamp(min=0.5) - 0.5
    found = guided(lambda *a: estimate, torch.randn(2, 40, 5), step, None, weight)
    assert torch.equal(found == 0, estimate == 0)
    assert (estimate == 0).any()
    torch.testing.assert_close(found, estimate)


def test_cleaning_and_self_conditioning_use_each_estimate():
    seen = []

    def denoise(x, level, previous, conditional):
        seen.append(previous)
        return torch.full_like(x, -1.0)

    def clean(x):
        return x.clamp_min(0.25)

    cells = sample(denoise, draw((1, 2, 3)), SCHEDULE, SampleConfig(num_steps=3), clean=clean)
    assert (cells == 0.25).all()
    assert seen[0] is None
    assert (seen[1] == 0.25).all()
    seen.clear()
    sample(denoise, draw((1, 2, 3)), SCHEDULE, SampleConfig(num_steps=3, self_condition=False))
    assert seen == [None, None, None]


def test_the_last_levels_start_below_full_noise():
    levels = []

    def denoise(x, level, previous, conditional):
        levels.append(level)
        return x

    sample(denoise, draw((1, 2, 3)), SCHEDULE, SampleConfig(num_steps=4, start_level=4))
    assert levels == [3, 2, 1, 0]
