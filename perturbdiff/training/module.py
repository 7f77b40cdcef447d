"""One optimiser step: add noise to the target cells, estimate them and compare. All chance depends on (seed, step)."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from perturbdiff.config.settings import Config, SampleConfig
from perturbdiff.diffusion.losses import hybrid_loss
from perturbdiff.diffusion.samplers import Draw, sample
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.model import Covariates, Denoiser
from perturbdiff.runtime.errors import UserError

if TYPE_CHECKING:
    from perturbdiff.config.settings import TrainConfig


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Return AdamW's groups of parameters. All decay but biases (layer norms have no parameters here)."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[not name.endswith("bias")].append(parameter)
    decay = {"params": groups[True], "weight_decay": weight_decay}
    return [decay, {"params": groups[False], "weight_decay": 0.0}]


def optimizer(module: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over a module's parameters. The training loop sets the learning rate of each step."""
    groups = parameter_groups(module, settings.weight_decay)
    adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=1e-8, fused=True)
    # Fused steps could undo a loss scale, so the trainer would not clip; float32 and bfloat16 have none.
    adamw._step_supports_amp_scaling = False  # pyright: ignore[reportAttributeAccessIssue]
    return adamw


def rate_factor(step: int, settings: TrainConfig) -> float:
    """Return the share of the learning rate at optimiser step ``step`` (from 0).

    Linear from 0 over ``warmup_steps``; optionally flat over ``plateau_fraction`` of all steps; then half a
    cosine down to 0 at ``max_steps``, but not below ``final_rate``.
    """
    if step < settings.warmup_steps:
        return step / settings.warmup_steps
    top = settings.warmup_steps + int(settings.plateau_fraction * settings.max_steps)
    if step < top:
        return 1.0
    progress = min((step - top) / max(settings.max_steps - top, 1), 1.0)
    return max(settings.final_rate, 0.5 * (1 + math.cos(math.pi * progress)))


_COINS, _NOISE, VALIDATION, ZEROS = 1, 2, 3, 4


class Draws(NamedTuple):
    """The chance in a step: noise level [B], noise [B, S, G], dropped covariates [B], self-conditioning."""

    t: Tensor
    noise: Tensor
    drop: Tensor
    self_condition: bool


def generator(device: torch.device | str, *words: int) -> torch.Generator:
    """Return the random generator that belongs to these non-negative numbers."""
    state = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(state & (2**63 - 1))


def check_compiler(device: str) -> None:
    """Raise a `UserError` if ``train.compile`` lacks a compiler on this machine."""
    compilers = ("g++", "clang++") if device == "cpu" else ("gcc", "cc", "clang")
    named = os.environ.get("CXX" if device == "cpu" else "CC")
    if not any(shutil.which(name) for name in (named, *compilers) if name):
        raise UserError(
            f"train.compile: torch.compile needs a compiler ({' or '.join(compilers)}) and finds none; "
            "install one or set train.compile=false"
        )


def ends_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether this forward pass is the last of its optimiser step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class TrainingModule(pl.LightningModule):
    """The denoiser with its objective.

    Parameters
    ----------
    denoiser
        The network, its units set.
    config
        The recipe; ``schedule``, ``loss``, ``train`` and ``seed`` are used.

    Attributes
    ----------
    terms
        Loss terms of the last forward pass, means over all ranks, detached scalars.
    """

    def __init__(self, denoiser: Denoiser, config: Config) -> None:
        super().__init__()
        self.denoiser, self.config = denoiser, config
        denoiser.recompute = config.train.checkpoint_activations
        self._compiled: Callable[..., Tensor] | None = None
        self.schedule = NoiseSchedule(config.schedule.num_steps, config.schedule.kind)
        self.terms: dict[str, Tensor] = {}

    def on_fit_start(self) -> None:
        """Compile the network's forward pass if the recipe says so.

        A function and not a module, so that weights keep their names; made here, after the averaged copy of this
        module, which must not run the original's weights and stays as it is.
        """
        if self.config.train.compile:
            check_compiler(self.device.type)
            self._compiled = torch.compile(self.denoiser.forward)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; `on_train_batch_start` sets its rate."""
        return optimizer(self.denoiser, self.config.train)

    def on_train_batch_start(self, batch: CellSetBatch, batch_idx: int) -> None:
        """Set the learning rate, a function of the step alone."""
        rate = self.learning_rate(self.trainer.global_step)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.config.train.learning_rate * rate_factor(step, self.config.train)

    def training_step(self, batch: CellSetBatch, batch_idx: int) -> Tensor:
        """Return the objective of this rank's sets, or of a part of them if a step takes several passes."""
        trainer = self.trainer
        parts = trainer.accumulate_grad_batches
        draws = self.draws(
            batch.target.shape, trainer.global_step,
            rank=trainer.global_rank, world=trainer.world_size, part=batch_idx % parts, parts=parts,
        )  # fmt: skip
        terms = self.objective(batch, draws)
        self.terms = self._over_ranks({name: value.detach() for name, value in terms.items()})
        return terms["total"]

    def _over_ranks(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of loss terms over the ranks, so that each rank records the values of the whole step."""
        if self.trainer.world_size == 1:
            return terms
        each = torch.stack([value.double() for value in terms.values()])
        means = self.trainer.strategy.reduce(each, reduce_op="mean")
        return dict(zip(terms, means, strict=True))

    def draws(
        self, shape: torch.Size, step: int, *, rank: int = 0, world: int = 1, part: int = 0, parts: int = 1
    ) -> Draws:
        """Return the chance of a step for a part of this rank's sets, of ``shape`` [B, S, G].

        Set b of the rank is set rank + b · world of the step (with twins: pair b of the rank); part p of the rank
        are its sets p · B to (p + 1) · B - 1. So draws do not depend on the number of ranks or parts. Twins share
        the noise level and the coin, not the noise.
        """
        settings, seed = self.config.train, self.config.seed
        twins = 2 if self.config.loss.mmd_statistic == "cross" else 1
        count = shape[0] // twins
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
        noise = torch.empty(shape, device=self.device)
        for b in range(shape[0]):
            noise_of_set = generator(self.device, _NOISE, seed, step, twins * pairs[b // twins] + b % twins)
            noise[b] = torch.randn(shape[1:], generator=noise_of_set, device=self.device)
        t, drop = t.repeat_interleave(twins), drop.repeat_interleave(twins)
        return Draws(t.to(self.device), noise, drop.to(self.device), self_condition)

    def objective(self, batch: CellSetBatch, draws: Draws, *, paired: bool = True) -> dict[str, Tensor]:
        """Return the loss and its terms for a batch in log1p (paper, Eq. train_objective).

        Sets that are not ``paired`` cannot be compared across twins; the U-statistic stands in, whose
        expectation is the same.
        """
        target = self.denoiser.encode(batch.target)
        noised = self.schedule.add_noise(target, draws.t, draws.noise)
        estimate = None
        if draws.self_condition:  # paper, Eq. self_conditioning
            with torch.no_grad():
                estimate = self.estimate(noised, draws.t, batch, drop=draws.drop)
        prediction = self.estimate(noised, draws.t, batch, self_condition=estimate, drop=draws.drop)
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
        """Return sampled cells [B, S, G] of the sets' conditions, log1p; ``draw`` gives the noise."""

        def denoise(x: Tensor, level: int, previous: Tensor | None, conditional: bool) -> Tensor:  # noqa: FBT001
            t = torch.full((len(x),), level, device=x.device)
            drop = None if conditional else torch.ones(len(x), dtype=torch.bool, device=x.device)
            return self.estimate(x, t, batch, self_condition=previous, drop=drop)

        cells = sample(denoise, draw, self.schedule, settings, clean=self.denoiser.clean)
        return self.denoiser.decode(cells)

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
