"""The reverse process: DDIM and DDPM over a decreasing sequence of levels, with guidance in noise space.

The sampler knows no network: it calls ``denoise(x, level, previous, conditional)`` and gets an estimate of the
clean cells. Paper, App. Diffusion Implementation Details, "Sampling".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from perturbdiff.diffusion.schedule import NoiseSchedule

Denoise = Callable[[Tensor, int, Tensor | None, bool], Tensor]
"""x [B, S, G], level, previous estimate or None, whether the covariates are told → clean estimate [B, S, G]."""

Draw = Callable[[], Tensor]
"""Returns fresh standard normal noise [B, S, G] at each call."""


class SamplerSettings(Protocol):
    """What `sample` reads of the configuration."""

    @property
    def sampler(self) -> Literal["ddim", "ddpm"]: ...  # noqa: D102
    @property
    def num_steps(self) -> int: ...  # noqa: D102
    @property
    def start_level(self) -> int | None: ...  # noqa: D102
    @property
    def eta(self) -> float: ...  # noqa: D102
    @property
    def guidance(self) -> float: ...  # noqa: D102
    @property
    def self_condition(self) -> bool: ...  # noqa: D102
    @property
    def ddpm_variance(self) -> Literal["posterior", "beta"]: ...  # noqa: D102


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Draw:
    """Return a `Draw` of one shape from one generator, on the generator's device."""
    return lambda: torch.randn(shape, generator=generator, device=generator.device)


def identity(x: Tensor) -> Tensor:
    """Return ``x``: the `clean` of an unbounded space."""
    return x


def sample(
    denoise: Denoise,
    draw: Draw,
    schedule: NoiseSchedule,
    settings: SamplerSettings,
    *,
    clean: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Draw clean cells, starting from noise.

    Parameters
    ----------
    denoise
        Estimates the clean cells; see `Denoise`.
    draw
        Gives the start noise, and the noise of each stochastic step; see `Draw`.
    schedule, settings
        Noise levels; number and spacing of the steps, η, guidance w, self-conditioning.
    clean
        Applied to each estimate of the clean cells before it is used (non-negativity, range, exact zeros).

    Returns
    -------
    The last, cleaned estimate [B, S, G].
    """
    levels = schedule.levels(settings.num_steps, settings.start_level)
    x, previous = draw(), None
    for index, level in enumerate(levels):
        estimate = clean(guided(denoise, x, int(level), previous, schedule, settings.guidance))
        if index + 1 == len(levels):
            return estimate
        if settings.self_condition:
            previous = estimate
        below = float(schedule.alpha_bar[levels[index + 1]])
        here = float(schedule.alpha_bar[level])
        if settings.sampler == "ddim":
            x = ddim_step(x, estimate, here, below, settings.eta, draw)
        else:
            x = ddpm_step(x, estimate, here, below, settings.ddpm_variance, draw)
    raise AssertionError("a schedule has at least one level")


def guided(
    denoise: Denoise, x: Tensor, level: int, previous: Tensor | None, schedule: NoiseSchedule, weight: float
) -> Tensor:
    """Return the estimate under classifier-free guidance (paper, Eq. cfg_eps).

    ε = (1 + w) ε_c - w ε_u; the unconditional pass drops the covariates and keeps the control cells.
    """
    conditional = denoise(x, level, previous, True)
    if weight == 0:
        return conditional
    unconditional = denoise(x, level, previous, False)
    alpha_bar = schedule.alpha_bar[level]
    noise = (1 + weight) * noise_of(x, conditional, alpha_bar) - weight * noise_of(
        x, unconditional, alpha_bar
    )
    return float(np.sqrt(1 / alpha_bar)) * x - float(np.sqrt(1 / alpha_bar - 1)) * noise


def noise_of(x: Tensor, estimate: Tensor, alpha_bar: float) -> Tensor:
    """Return the noise that an estimate of the clean cells implies (paper, Eq. eps_from_x0)."""
    return (float(np.sqrt(1 / alpha_bar)) * x - estimate) / float(np.sqrt(1 / alpha_bar - 1))


def ddim_step(x: Tensor, estimate: Tensor, here: float, below: float, eta: float, draw: Draw) -> Tensor:
    """Go from level α = ``here`` to ``below`` by DDIM (paper, Eq. ddim_eta0; η > 0 adds noise)."""
    sigma = eta * float(np.sqrt((1 - below) / (1 - here)) * np.sqrt(1 - here / below))
    along = float(np.sqrt(max(1 - below - sigma**2, 0.0)))
    x = float(np.sqrt(below)) * estimate + along * noise_of(x, estimate, here)
    return x + sigma * draw() if sigma > 0 else x


def ddpm_step(
    x: Tensor,
    estimate: Tensor,
    here: float,
    below: float,
    variance: Literal["posterior", "beta"],
    draw: Draw,
) -> Tensor:
    """Go from level α = ``here`` to ``below`` by ancestral sampling from q(x_below | x_here, x0 = estimate)."""
    beta = 1 - here / below
    mean = float(np.sqrt(below) * beta / (1 - here)) * estimate
    mean = mean + float(np.sqrt(1 - beta) * (1 - below) / (1 - here)) * x
    spread = beta if variance == "beta" else beta * (1 - below) / (1 - here)
    return mean + float(np.sqrt(spread)) * draw()
