"""From where on a gene's small values become zeros: measured on training sets, with the weights that are kept.

The energy distance of a thousand genes hardly sees how often a gene is zero, so that a network is left with more
small values than the data have. See `Denoiser.match_zeros`, which uses the levels when cells are sampled.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from perturbdiff.training.distributed.processes import Processes
from perturbdiff.training.module import ZEROS, TrainingModule, generator
from perturbdiff.training.setup import TrainingSetup

logger = logging.getLogger(__name__)

_CELLS = 4096
_GENES_AT_ONCE = 1024


@torch.no_grad()
def zero_levels(module: TrainingModule, material: TrainingSetup) -> Tensor:
    """Return the level of each gene, log1p [G], on the network's device; 0 where predictions have zeros enough.

    Cells are sampled, as the recipe says, for the first training sets: at least 4,096 cells. A level is the value
    from which on predicted cells are as many as real cells with a value above zero.
    """
    device = module.denoiser.unit.device
    stream = material.train_sampler(Processes(), quiet=True)
    train = material.config.train
    steps = math.ceil(_CELLS / (train.set_size * train.sets_per_step))
    together = math.gcd(train.sets_per_step, module.config.sample.sets_per_batch)  # as many as sampling takes
    found, real = [], []
    for step, loaded in enumerate(material.loader(stream, start_step=0, stop_step=steps)):
        noise = generator(device, ZEROS, module.config.seed, step)
        for part in loaded.split(train.sets_per_step // together):
            batch = part.to(device)

            def draw(shape: torch.Size = batch.target.shape, noise: torch.Generator = noise) -> Tensor:
                return torch.randn(shape, generator=noise, device=device)

            found.append(module.generate(batch, module.config.sample, draw).flatten(0, 1))
            real.append((batch.target > 0).sum((0, 1)))
    cells, positive = torch.cat(found), torch.stack(real).sum(0)
    levels = _levels(cells, positive)
    above = int(((cells > 0).sum(0) > positive).sum())
    logger.info("zeros: %d of %d genes are predicted above zero more often than they are", above, len(levels))
    return levels


def _levels(predicted: Tensor, positive: Tensor) -> Tensor:
    """Return the ``positive``-th [G] largest value of each gene among cells [n, G]; the largest for none."""
    places = (len(predicted) - positive).clamp(max=len(predicted) - 1)
    parts = [
        part.sort(0).values.gather(0, place[None])[0]
        for part, place in zip(predicted.split(_GENES_AT_ONCE, 1), places.split(_GENES_AT_ONCE), strict=True)
    ]
    return torch.cat(parts)
