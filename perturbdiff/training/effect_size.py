"""How much of the changes that a model was trained on its own cells show: does it fit what it has seen?"""

from __future__ import annotations

import logging

import numpy as np
import torch

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.diffusion.samplers import set_noise
from perturbdiff.evaluation.metrics.populations import AGREE, mean_of, sums_of
from perturbdiff.loading.set_streams import CellSet
from perturbdiff.runtime import seeds
from perturbdiff.training.distributed.processes import Processes
from perturbdiff.training.module import SLOPE, TrainingModule, generator
from perturbdiff.training.setup import TrainingSetup

logger = logging.getLogger(__name__)

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
