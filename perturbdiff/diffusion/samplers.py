"""The reverse process: DDIM and DDPM over a decreasing sequence of levels, with guidance.

The sampler does not know the network. It calls ``denoise(x, level, previous, conditional)``, which returns an estimate
of the clean cells. Paper, App. Diffusion Implementation Details, "Sampling".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from perturbdiff.diffusion.schedule import NoiseSchedule, ReverseStep

Denoise = Callable[[Tensor, int, Tensor | None, bool], Tensor]
"""Maps x [B, S, G], the level, the previous estimate or None, and whether to use the covariates to an estimate of the
clean cells [B, S, G].

A call without the covariates follows the call with them, and gets the same tensor objects."""

Draw = Callable[[], Tensor]
"""Returns fresh standard normal noise [B, S, G] at each call."""


class SamplerSettings(Protocol):
    """The settings that `sample` reads."""

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
    @property
    def arithmetic(self) -> Literal["double", "single"]: ...  # noqa: D102


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Draw:
    """Return a `Draw` of noise with this shape, on the generator's device."""
    return lambda: set_noise(shape, generator)


def set_noise(shape: tuple[int, ...], generator: torch.Generator, shared: float = 0.0) -> Tensor:
    """Return standard normal noise of sets, of ``shape`` [..., S, G], on the generator's device.

    ``shared`` is the share of the variance that all cells of a set have in common (ρ): √(1-ρ) e + √ρ s with one s for
    the set. Each cell's noise is standard normal for every ρ, and two cells of a set have the correlation ρ.
    """
    own = torch.randn(shape, generator=generator, device=generator.device)
    if shared == 0:
        return own
    common = torch.randn((*shape[:-2], 1, shape[-1]), generator=generator, device=generator.device)
    return math.sqrt(1 - shared) * own + math.sqrt(shared) * common


def identity(x: Tensor) -> Tensor:
    """Return ``x``. This is the argument `clean` of an unbounded space."""
    return x


def sample(
    denoise: Denoise,
    draw: Draw,
    schedule: NoiseSchedule,
    settings: SamplerSettings,
    *,
    guidance: Tensor | None = None,
    clean: Callable[[Tensor], Tensor] = identity,
    watch: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Draw clean cells, starting from noise.

    Parameters
    ----------
    denoise
        Estimates the clean cells (see `Denoise`).
    draw
        Gives the start noise and the noise of each stochastic step (see `Draw`).
    schedule, settings
        The noise levels, and the number and spacing of the steps, η, guidance w, self-conditioning and rounding.
    guidance
        w of each set [B, 1, 1], which replaces the one value in ``settings``.
    clean
        Applied to each estimate of the clean cells before it is used (non-negativity, range, exact zeros).
    watch
        Called with each cleaned estimate and the cells of the level below.

    Returns
    -------
    The last cleaned estimate [B, S, G].
    """
    levels = schedule.levels(settings.num_steps, settings.start_level)
    steps = schedule.reverse(levels, variance=settings.ddpm_variance, arithmetic=settings.arithmetic)
    weight = settings.guidance if guidance is None else guidance
    if isinstance(weight, Tensor) and not weight.any():
        weight = 0.0
    x, previous = draw(), None
    for step in steps:
        estimate = clean(guided(denoise, x, step, previous, weight))
        if settings.self_condition:
            previous = estimate
        if step.last:
            x = estimate
        elif settings.sampler == "ddim":
            x = ddim_step(x, estimate, step, settings.eta, draw)
        else:
            x = ddpm_step(x, estimate, step, draw)
        if watch is not None:
            watch(estimate, x)
    return x


def guided(
    denoise: Denoise, x: Tensor, step: ReverseStep, previous: Tensor | None, weight: float | Tensor
) -> Tensor:
    """Return the estimate under classifier-free guidance (paper, Eq. cfg_eps).

    ε = (1 + w) ε_c - w ε_u. The unconditional pass drops the covariates and keeps the control cells. The noise of an
    estimate is linear in it (`noise_of`), so the two estimates are combined in the same way. The released code
    combines the noises, which leaves values of about 1e-7 where both estimates are 0. Only `single` steps do so. A
    set with w = 0 gets its conditional estimate unchanged.
    """
    conditional = denoise(x, step.level, previous, True)
    if not isinstance(weight, Tensor) and weight == 0:
        return conditional
    unconditional = denoise(x, step.level, previous, False)
    if step.single:
        noise = (1 + weight) * noise_of(x, conditional, step) - weight * noise_of(x, unconditional, step)
        both = step.inverse_signal * x - step.inverse_noise * noise
    else:
        both = (1 + weight) * conditional - weight * unconditional
    return torch.where(weight == 0, conditional, both) if isinstance(weight, Tensor) else both


def noise_of(x: Tensor, estimate: Tensor, step: ReverseStep) -> Tensor:
    """Return the noise that an estimate of the clean cells implies (paper, Eq. eps_from_x0)."""
    return (step.inverse_signal * x - estimate) / step.inverse_noise


def ddim_step(x: Tensor, estimate: Tensor, step: ReverseStep, eta: float, draw: Draw) -> Tensor:
    """Go one level down by DDIM (paper, Eq. ddim_eta0). With η > 0, noise is added."""
    signal, along, sigma = step.ddim(eta)
    below = signal * estimate + along * noise_of(x, estimate, step)
    return below + sigma * draw() if sigma > 0 else below


def ddpm_step(x: Tensor, estimate: Tensor, step: ReverseStep, draw: Draw) -> Tensor:
    """Go one level down by ancestral sampling from q(x_below | x_here, x0 = estimate)."""
    return posterior_mean(x, estimate, step) + step.posterior_sd * draw()


def posterior_mean(x: Tensor, estimate: Tensor, step: ReverseStep) -> Tensor:
    """Return the mean of q(x_below | x_here, x0 = estimate)."""
    return step.weight_of_estimate * estimate + step.weight_of_x * x
