"""Choosing the best step: the averaged weights against fixed validation sets with fixed noise.

Real cells are compared with cells sampled in a few reverse steps (never more than the recipe samples with), in
log1p. ``energy`` is the energy distance, mean over conditions weighted by their sets; cells of one set are not
compared with each other, see `population_energy_distance`. ``r2`` is R² of the conditions' mean profiles over the
genes, ``pdcorr`` Pearson's correlation of their changes against the mean control; both are means over conditions.
``loss`` is the training objective at evenly spread noise levels with nothing dropped. All four are recorded.

How much of the changes that a model was trained on its own cells show (`effect_size`) says whether it fits what it has
seen.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbdiff.checkpoint.bundle import write_weights
from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.diffusion.losses import population_energy_distance
from perturbdiff.diffusion.samplers import set_noise
from perturbdiff.evaluation.metrics.populations import AGREE, mean_of, sums_of
from perturbdiff.loading.cell_sets import CellSet, CellSetSampler
from perturbdiff.loading.loader import CellSetBatch, SetLoader
from perturbdiff.runtime import seeds
from perturbdiff.runtime.progress import PROGRESS, span
from perturbdiff.store.pseudobulk import correlation_of_changes, r2
from perturbdiff.training.callbacks.training_log import SPEAK_SECONDS, TrainingLog
from perturbdiff.training.distributed.processes import Processes
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.module import SLOPE, VALIDATION, Draws, TrainingModule, generator
from perturbdiff.training.run_folder import CheckpointFolder
from perturbdiff.training.setup import TrainingSetup

logger = logging.getLogger(__name__)

_SECOND, _VIEW = 1, 2  # last word of the seeds of the second generated set, and of what both have in common

HIGHER_IS_BETTER = ("r2", "pdcorr")
"""Criteria for which higher is better."""


def is_better(metric: str, value: float, best: float) -> bool:
    """Return whether a value of a criterion beats the best so far. NaN means that there is none yet."""
    if not math.isfinite(value):
        return False
    return math.isnan(best) or (value > best if metric in HIGHER_IS_BETTER else value < best)


class Population:
    """The real and sampled sets [S, G] of one condition and the mean of each control set, log1p, on the CPU.

    Parameters
    ----------
    context
        Ids of cell type and batch: conditions of one context share their controls.
    """

    def __init__(self, context: tuple[int, int]) -> None:
        self.context = context
        self.real: list[Tensor] = []
        self.sampled: list[Tensor] = []
        self.control: list[Tensor] = []

    def add(self, real: Tensor, sampled: Tensor, control: Tensor) -> None:
        """Add a set of each."""
        self.real.append(real)
        self.sampled.append(sampled)
        self.control.append(control.double().mean(0))


def compare(populations: Mapping[int, Population]) -> dict[str, float]:
    """Return the criteria ``energy``, ``r2`` and ``pdcorr``; see the module's description."""
    sets: dict[tuple[int, int], list[Tensor]] = {}
    for one in populations.values():
        sets.setdefault(one.context, []).extend(one.control)
    control = {context: torch.stack(means).mean(0).numpy() for context, means in sets.items()}
    energy, fits, changes = [], [], []
    for one in populations.values():
        distance = population_energy_distance(torch.stack(one.sampled), torch.stack(one.real))
        energy += [float(distance)] * len(one.real)
        real, sampled = _profile(one.real), _profile(one.sampled)
        fits.append(r2(real, sampled))
        changes.append(correlation_of_changes(real, sampled, control[one.context]))
    return {"energy": float(np.mean(energy)), "r2": float(np.mean(fits)), "pdcorr": float(np.mean(changes))}


def _profile(sets: list[Tensor]) -> np.ndarray:
    """Return the mean profile of sets of cells, float64 [G]."""
    return torch.cat(sets).double().mean(0).numpy()


class Validation:
    """Scores the averaged weights every few steps and keeps the best ones in the checkpoint folder.

    Parameters
    ----------
    sampler, loader
        Stream of validation sets, and what reads them.
    num_sets
        The first so many sets of the stream are used, at every validation the same.
    sets_per_pass
        Sets that are computed at once.
    keep
        Whether the best weights are kept, or the scores only.
    folder, training_log
        Where the best weights and the scores go.
    """

    def __init__(
        self,
        sampler: CellSetSampler,
        loader: SetLoader,
        num_sets: int,
        *,
        folder: CheckpointFolder,
        training_log: TrainingLog,
        sets_per_pass: int,
        keep: bool = True,
    ) -> None:
        self.sampler, self.loader, self.keep = sampler, loader, keep
        self.num_sets = min(num_sets, sampler.sets_per_epoch)
        self.sets_per_pass = sets_per_pass
        self.folder, self.training_log = folder, training_log
        self.best_step, self.best_value = -1, math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best_step": self.best_step, "best_value": self.best_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self.best_step, self.best_value = int(state["best_step"]), float(state["best_value"])

    def after_step(self, loop: TrainingLoop) -> None:
        """Validate if it is time."""
        settings, step = loop.settings, loop.step
        if step % settings.valid_every and step != loop.max_steps:
            return
        began = time.monotonic()
        scores = self.scores(loop.averaged)
        seconds = time.monotonic() - began
        self.training_log.throughput.validated(seconds)
        self.training_log.add(step, "valid", scores)
        metric = settings.valid_metric
        value = scores["total" if metric == "loss" else metric]
        better = self.keep and is_better(metric, value, self.best_value)
        if loop.first_process:
            logger.info(
                "validation at step %d: energy distance %.4g, R² %.4g, correlation of changes %.4g, loss %.4g%s (%s)",
                step, *(scores[name] for name in ("energy", "r2", "pdcorr", "total")),
                ", best so far" if better else "", span(seconds),
            )  # fmt: skip
        if better:
            if loop.first_process:
                former = self.folder.best(self.best_step) if self.best_step >= 0 else None
                best = loop.averaged.denoiser
                self.folder.keep(self.folder.best(step), best, write_weights, instead_of=former)
            self.best_step, self.best_value = step, value
        best = f" (best {self.best_value:.3g})" if math.isfinite(self.best_value) else ""
        self.training_log.tell(f"validation {value:.3g}{best}")

    @torch.no_grad()
    def scores(self, module: TrainingModule) -> dict[str, float]:
        """Return the criteria and the loss terms on the validation sets."""
        totals: dict[str, float] = {}
        populations: dict[int, Population] = {}
        spoken = time.monotonic()
        for positions, batch in self._batches(module.device):
            self.training_log.tell(f"validating {positions[0]}/{self.num_sets} sets")
            if time.monotonic() - spoken >= SPEAK_SECONDS:
                spoken = time.monotonic()
                logger.info(
                    "validating: %d of %d sets done", positions[0], self.num_sets, extra={PROGRESS: True}
                )
            terms = module.objective(batch, self._draws(module, positions, batch), paired=False)
            for name, value in terms.items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(positions)
            cells = self._cells(module, positions, batch).cpu()
            contexts = zip(batch.cell_type.tolist(), batch.batch.tolist(), strict=True)
            for b, (condition, context) in enumerate(zip(batch.condition.tolist(), contexts, strict=True)):
                population = populations.setdefault(condition, Population(context))
                population.add(batch.target[b].cpu(), cells[b], batch.control[b].cpu())
        loss = {name: value / self.num_sets for name, value in totals.items()}
        return {**loss, **compare(populations)}

    def _batches(self, device: torch.device) -> Iterator[tuple[list[int], CellSetBatch]]:
        size = self.sets_per_pass
        for start in range(0, self.num_sets, size):
            positions = list(range(start, min(start + size, self.num_sets)))
            yield positions, self.loader.load([self.sampler.set_at(p) for p in positions]).to(device)

    def _draws(self, module: TrainingModule, positions: list[int], batch: CellSetBatch) -> Draws:
        """Return noise levels spread evenly over the sets, and each set's own noise."""
        steps = module.schedule.num_steps
        levels = torch.tensor(
            [int((p + 0.5) * steps / self.num_sets) for p in positions], device=module.device
        )
        noise, shape = self._noise(module, positions, batch.target.shape[1:], 0), batch.target.shape
        if module.config.loss.mmd_statistic == "set":
            second, view = (self._noise(module, positions, shape[1:], 0, word) for word in (_SECOND, _VIEW))
            noise = module.schedule.twin_noise(torch.stack([noise, second], 1).flatten(0, 1), view, levels)
            levels = levels.repeat_interleave(2)
        return Draws(levels, noise, torch.zeros(len(levels), dtype=torch.bool, device=module.device), False)

    def _noise(self, module: TrainingModule, positions: list[int], shape: torch.Size, *call: int) -> Tensor:
        chance = (generator("cpu", VALIDATION, module.config.seed, p, *call) for p in positions)
        shared = module.config.train.set_noise
        return torch.stack([set_noise(shape, one, shared) for one in chance]).to(module.device)

    def _cells(self, module: TrainingModule, positions: list[int], batch: CellSetBatch) -> Tensor:
        """Return sampled cells [B, S, G] for the sets' conditions, log1p."""
        config = module.config
        steps = min(config.train.valid_steps, config.sample.num_steps, module.schedule.num_steps)
        settings = config.sample.model_copy(update={"num_steps": steps, "start_level": None})
        calls = iter(range(1, 1 << 30))

        def draw() -> Tensor:
            return self._noise(module, positions, batch.target.shape[1:], next(calls))

        return module.generate(batch, settings, draw)


CONDITIONS = 16
CELLS = 256  # cells sampled for a condition
_REAL = 1024  # most real cells read of a condition, and most controls
_FEWEST = 20
_ENOUGH = 0.85  # below it, the log says what would help


def effect_size(module: TrainingModule, setup: TrainingSetup) -> float | None:
    """Return the slope of predicted on true change over the training conditions with the most cells, and log it.

    Up to 16 conditions of at least 20 cells are taken. For each, about 256 cells are sampled from matched controls,
    and the real cells are halved (`perturbdiff.evaluation.metrics.populations.sums_of`). The slope is the ratio of the
    sums over all conditions, so that those that change most count most.

    Returns
    -------
    float or None
        1: changes as large as the real ones. None if the real cells hardly show a change, or there are no conditions.
    """
    conditions = _Conditions(module, setup)
    sums = np.zeros(3)
    for condition in conditions.chosen:
        above, below, cosine = conditions.sums(condition)
        sums += above, below, below / cosine if cosine else 0.0
    above, below, lengths = map(float, sums)
    if not below > AGREE * lengths:
        logger.info("the training cells change too little to tell how much of it the model reproduces")
        return None
    slope = above / below
    advice = "; more steps or a larger model would help" if slope < _ENOUGH else ""
    logger.info(
        "the model reproduces %.0f %% of the size of the changes it was trained on%s", 100 * slope, advice
    )
    return round(slope, 3)


class _Conditions:
    """Training conditions, their cells and cells sampled for them."""

    def __init__(self, module: TrainingModule, setup: TrainingSetup) -> None:
        self.module, self.size = module, setup.config.train.set_size
        source = setup.sources[0]  # several stores are for pretraining, which knows no change
        table = source.store.conditions
        self.store, self.rows = source.store, Rows(table, source.exclude)
        perturbed = source.train & ~table["is_control"].to_numpy(bool) & (self.rows.count >= _FEWEST)
        usable = np.flatnonzero(perturbed)
        most = np.argsort(-self.rows.count[usable], kind="stable")[:CONDITIONS]
        self.chosen = [int(c) for c in np.sort(usable[most])]
        self.pools = ControlPools(table, self.rows, self.chosen, quiet=True)
        self.loader = setup.loader(setup.train_sampler(Processes(), quiet=True))

    def sums(self, condition: int) -> tuple[float, float, float]:
        """Return the sums of a condition; see `sums_of`."""
        rng = seeds.generator(SLOPE, self.module.config.seed, condition)
        cells = self.rows.at(condition, rng.permutation(int(self.rows.count[condition]))[:_REAL])
        control = np.unique(self.pools.draw(condition, _REAL, rng))
        halves = self._mean(cells[::2]), self._mean(cells[1::2])
        return sums_of(self._predicted(condition, rng), halves, self._mean(control))

    def _mean(self, rows: np.ndarray) -> np.ndarray:
        """Return the mean log1p values of store rows, float64 [genes of the model]."""
        return mean_of(self.loader.gene_maps[0].apply(self.store.expression(np.sort(rows))))

    def _predicted(self, condition: int, rng: np.random.Generator) -> np.ndarray:
        """Return the mean of cells sampled for a condition, float64 [G]."""
        controls = [self.pools.draw(condition, self.size, rng) for _ in range(max(1, CELLS // self.size))]
        batch = self.loader.load(
            [CellSet(condition, rows, rows) for rows in controls]
        )  # targets are not used
        noise, device = generator("cpu", SLOPE, self.module.config.seed, condition), self.module.device
        shape = len(controls), self.size, len(self.loader.genes)

        def draw() -> torch.Tensor:
            return set_noise(shape, noise, self.module.config.train.set_noise).to(device)

        cells = self.module.generate(batch.to(device), self.module.config.sample, draw)
        return cells.flatten(0, 1).double().mean(0).cpu().numpy()
