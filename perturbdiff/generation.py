"""Cells drawn from a network, by the one way that samples, validation and the levels of zeros share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perturbdiff.diffusion.samplers import Draw, sample
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.model import Covariates, Denoiser, Estimates
from perturbdiff.model.cell_sizes import Pool

if TYPE_CHECKING:
    from perturbdiff.config.settings import SampleConfig


def depth_ceiling(target_sum: float | None) -> float:
    """Return the largest log1p value that a cell scaled to this depth can have; no limit if it is unknown."""
    return math.log1p(target_sum) if target_sum is not None and math.isfinite(target_sum) else math.inf


@torch.no_grad()
def generate(
    model: Denoiser,
    schedule: NoiseSchedule,
    settings: SampleConfig,
    control: Tensor,
    covariates: Covariates,
    dataset: Tensor,
    draw: Draw,
    *,
    guidance: Tensor | None = None,
    pool: Pool | None = None,
    ceiling: float = math.inf,
) -> Tensor:
    """Draw sets of cells.

    Parameters
    ----------
    model
        The network.
    schedule
        Its noise levels.
    settings
        The reverse process, and what is done with zeros and totals.
    control
        Control cells [B, S, G], model units.
    covariates, dataset
        Ids of the sets' covariates and the index of their input layers, int64 [B] each.
    draw
        Gives noise [B, S, G]. Draw it on the CPU, so that it is the same on every machine.
    guidance
        w of each set [B, 1, 1], instead of the one of ``settings``.
    pool
        What is known of the sets beyond their cells. With it, the means of conditions that training did not see are
        settled (`Denoiser.settle_means`).
    ceiling
        Largest log1p value, or log1p total, that a cell can have; see `depth_ceiling`.

    Returns
    -------
    Cells [B, S, G], log1p, on the network's device.
    """

    def clean(estimate: Tensor) -> Tensor:
        if settings.cutoff:
            estimate = torch.where(estimate < settings.cutoff, 0.0, estimate)
        return model.clean(estimate)

    guided = bool(settings.guidance if guidance is None else guidance.any())
    mixed = settings.precision == "bf16-mixed"
    with torch.autocast(control.device.type, torch.bfloat16, enabled=mixed):
        estimates = Estimates(model, control, covariates, dataset, guided=guided)
        drawn = sample(estimates, draw, schedule, settings, guidance=guidance, clean=clean)
    log1p, told = model.decode(drawn), covariates.perturbation
    if pool is not None:
        log1p = model.settle_means(log1p, control * model.unit, pool, covariates)
    if settings.zeros != "predicted":
        log1p = model.match_zeros(log1p, control * model.unit if settings.zeros == "detected" else None, told)
    if settings.totals == "matched":
        log1p = model.match_totals(log1p, control * model.unit, told, ceiling)
    return log1p.clamp_max(ceiling)
