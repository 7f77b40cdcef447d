"""One optimiser step: add noise to the target cells, estimate them and compare. All chance depends on (seed, step)."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from perturbdiff.config.settings import Config, SampleConfig
from perturbdiff.diffusion.losses import hybrid_loss
from perturbdiff.diffusion.samplers import Draw, set_noise
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.generation import generate
from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.model import Covariates, Denoiser
from perturbdiff.model.covariates import SemanticTable
from perturbdiff.model.expected_changes import TransferredChanges
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.seeds import state

_COINS, _NOISE, VALIDATION, ZEROS, SLOPE, _VIEW, _SHARES = 1, 2, 3, 4, 5, 6, 7
_UNTOLD = 0.2  # share of the sets that start from controls as they are, as unseen perturbations do


class Draws(NamedTuple):
    """The chance in a step: noise level [B], noise [B, S, G], dropped covariates [B], self-conditioning, shares [B, K].

    ``shares`` say how much each context counts in the change that is expected (``model.anchor: transferred``), or None.

    With ``loss.mmd_statistic: set``, two sets are generated for each true one. They are next to each other, and B
    counts the generated ones.
    """

    t: Tensor
    noise: Tensor
    drop: Tensor
    self_condition: bool
    shares: Tensor | None = None


def generator(device: torch.device | str, *words: int) -> torch.Generator:
    """Return the random generator that belongs to these non-negative numbers."""
    return torch.Generator(device).manual_seed(state(*words) & (2**63 - 1))


def check_compiler(device: str) -> None:
    """Raise a `UserError` if ``train.compile`` lacks a compiler on this machine."""
    compilers = ("g++", "clang++") if device == "cpu" else ("gcc", "cc", "clang")
    named = os.environ.get("CXX" if device == "cpu" else "CC")
    if not any(shutil.which(name) for name in (named, *compilers) if name):
        raise UserError(
            f"train.compile: torch.compile needs a compiler ({' or '.join(compilers)}) and finds none; "
            "install one or set train.compile=false"
        )


class TrainingModule(nn.Module):
    """The denoiser with its objective.

    Parameters
    ----------
    denoiser
        The network, its units set.
    config
        The recipe; ``schedule``, ``loss``, ``train`` and ``seed`` are used.
    ceiling
        Largest log1p value that a sampled cell can have; see `perturbdiff.generation.depth_ceiling`.
    """

    def __init__(self, denoiser: Denoiser, config: Config, *, ceiling: float = math.inf) -> None:
        super().__init__()
        self.denoiser, self.config, self.ceiling = denoiser, config, ceiling
        denoiser.recompute = config.train.checkpoint_activations
        self._compiled: Callable[..., Tensor] | None = None
        self.schedule = NoiseSchedule(config.schedule.num_steps, config.schedule.kind)

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return self.denoiser.unit.device

    def compile_network(self) -> None:
        """Compile the network's forward pass.

        A function is compiled and not a module, so that weights keep their names. Compile after a copy for the
        running average was made: a copy must not run the original's weights.
        """
        check_compiler(self.device.type)
        self._compiled = torch.compile(self.denoiser.forward)

    def draws(
        self, shape: torch.Size, step: int, *, rank: int = 0, world: int = 1, part: int = 0, parts: int = 1
    ) -> Draws:
        """Return the chance of a step for a part of this rank's sets, of ``shape`` [B, S, G].

        Set b of the rank is set rank + b · world of the step (with twins: pair b of the rank); part p of the rank
        are its sets p · B to (p + 1) · B - 1. So draws do not depend on the number of ranks or parts. Twins share
        the noise level and the coin, not the noise. So do the two sets that are generated for one true set, but for a
        view of it that they have in common (`NoiseSchedule.twin_noise`).
        """
        settings, seed = self.config.train, self.config.seed
        statistic = self.config.loss.mmd_statistic
        twins = 2 if statistic in ("cross", "set") else 1
        count = shape[0] // 2 if statistic == "cross" else shape[0]
        places = range(rank + part * count * world, rank + (part + 1) * count * world, world)
        pairs, total = list(places), count * parts * world
        coins = generator("cpu", _COINS, seed, step)
        levels = self.schedule.num_steps
        if settings.time_power == 1:
            t = torch.randint(levels, (total,), generator=coins)[pairs]
        else:
            high = torch.rand(total, generator=coins, dtype=torch.float64) ** (1 / settings.time_power)
            t = (high * levels).long().clamp_max(levels - 1)[pairs]
        self_condition = bool(torch.rand((), generator=coins) < settings.self_condition)
        tosses = torch.rand(total if settings.drop_per == "set" else 1, generator=coins)
        drop = (tosses < settings.drop_covariates).expand(total)[pairs]
        noise = torch.empty((count * twins, *shape[1:]), device=self.device)
        for b in range(len(noise)):
            noise_of_set = generator(self.device, _NOISE, seed, step, twins * pairs[b // twins] + b % twins)
            noise[b] = set_noise(shape[1:], noise_of_set, settings.set_noise)
        if statistic == "set":
            views = [generator(self.device, _VIEW, seed, step, pair) for pair in pairs]
            common = [set_noise(shape[1:], view, settings.set_noise) for view in views]
            noise = self.schedule.twin_noise(noise, torch.stack(common), t.to(self.device))
        t, drop = t.repeat_interleave(twins), drop.repeat_interleave(twins)
        shares = self._shares(pairs, step)
        shares = None if shares is None else shares.repeat_interleave(twins, 0)
        return Draws(t.to(self.device), noise, drop.to(self.device), self_condition, shares)

    def _shares(self, pairs: Sequence[int], step: int) -> Tensor | None:
        """Return how much contexts count in what is expected of each pair of sets [pairs, K], or None.

        These are exponential draws, so that all shares are equally likely. If perturbations have frozen vectors, the
        network may be asked for unseen ones, which nothing moves. So nothing is told then in one of five pairs.
        """
        expected = self.denoiser.expected
        if not isinstance(expected, TransferredChanges):
            return None
        contexts = expected.rows.shape[1]
        chance = [generator("cpu", _SHARES, self.config.seed, step, pair) for pair in pairs]
        drawn = torch.stack([torch.rand(1 + contexts, generator=one) for one in chance])
        shares = -torch.log1p(-drawn[:, 1:])
        tables = self.denoiser.covariate_encoder.tables
        if "perturbation" in tables and isinstance(tables["perturbation"], SemanticTable):
            shares *= drawn[:, :1] >= _UNTOLD
        return shares.to(self.device)

    def forward(self, batch: CellSetBatch, draws: Draws) -> dict[str, Tensor]:
        """Return the `objective`; called this way so that several processes can share a step."""
        return self.objective(batch, draws)

    def objective(self, batch: CellSetBatch, draws: Draws, *, paired: bool = True) -> dict[str, Tensor]:
        """Return the loss and its terms for a batch in log1p (paper, Eq. train_objective).

        Sets that are not ``paired`` cannot be compared across twins; the U-statistic stands in, whose
        expectation is the same.
        """
        target = self.denoiser.encode(batch.target)
        times = len(draws.noise) // len(target)
        clean = target
        if times > 1:
            clean, batch = target.repeat_interleave(times, 0), batch.relabelled(times)
        noised = self.schedule.add_noise(clean, draws.t, draws.noise)
        estimate = None
        if draws.self_condition:  # paper, Eq. self_conditioning
            with torch.no_grad():
                estimate = self.estimate(noised, draws.t, batch, drop=draws.drop, shares=draws.shares)
        prediction = self.estimate(
            noised, draws.t, batch, self_condition=estimate, drop=draws.drop, shares=draws.shares
        )
        settings = self.config.loss
        if settings.mmd_statistic == "cross" and not paired:
            settings = settings.model_copy(update={"mmd_statistic": "U"})
        return hybrid_loss(prediction, target, settings)

    def estimate(self, x: Tensor, t: Tensor, batch: CellSetBatch, **options: Tensor | None) -> Tensor:
        """Return the denoiser's estimate of the clean cells, model units."""
        control, covariates = self.context(batch)
        forward = self._compiled or self.denoiser
        return forward(x, t, control, covariates, dataset=batch.dataset, **options)

    def generate(self, batch: CellSetBatch, settings: SampleConfig, draw: Draw) -> Tensor:
        """Return cells [B, S, G] of the sets' conditions, log1p, drawn as `sample` does it; ``draw`` gives noise."""
        control, covariates = self.context(batch)
        return generate(
            self.denoiser,
            self.schedule,
            settings,
            control,
            covariates,
            batch.dataset,
            draw,
            ceiling=self.ceiling,
        )

    def context(self, batch: CellSetBatch) -> tuple[Tensor, Covariates]:
        """Return the control cells in model units and the covariates.

        In marginal pretraining the control stream is zero and no perturbation is told.
        """
        if self.config.train.zero_control:
            unknown = torch.zeros_like(batch.perturbation)
            return torch.zeros_like(batch.control), Covariates(unknown, batch.cell_type, batch.batch)
        return self.denoiser.encode(batch.control), Covariates(
            batch.perturbation, batch.cell_type, batch.batch
        )
