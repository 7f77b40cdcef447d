"""Which term of the paper's loss leads, for each literal reading of its squared norm.

    python lab/loss_balance.py STORE SPLIT [STORE SPLIT ...] [--steps 300] [--set-size 64]

The text adds an energy distance and a squared error, and says that the first dominates. A squared norm is a sum
over genes; the released code takes the mean. A small network of the variant `paper` is trained with either, in
log1p / 10. At the start, midway and at the end, over the same sets, noise levels and noise:

mmd, mse      the two terms; mse as the sum and as the mean over genes
value         mmd / mse, each in the reading that is trained
gradient      norm of the mmd term's gradient / norm of the mse term's, all parameters, median over steps
direction     cosine of the whole gradient with that of mmd alone
descent       the same ratio for the gradients averaged over all the steps looked at
spread        variance of the cells estimated from pure noise / that of real cells: 0 if every estimate is the
              mean, which is the best for the squared error alone

Also trained: either term alone, for the two ends of `spread`. "nan": every output has died (a relu at zero has no
gradient), which the sum does at higher learning rates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.training.distributed.processes import Processes
from perturbdiff.training.module import Draws, TrainingModule
from perturbdiff.training.optimizer import Optimizer
from perturbdiff.training.setup import TrainingSetup, from_scratch

READINGS = {
    "mean": ("loss.mse_reduction=mean",),
    "sum": ("loss.mse_reduction=sum",),
    "mmd alone": ("loss.mse_weight=0",),
    "mse alone": ("loss.mmd_weight=0",),
}
LOOKED_AT = 1_000_000  # steps whose sets and noise are used to look, far from those trained on


class Balance(NamedTuple):
    """The terms and their gradients at one point of a training."""

    mmd: float
    mse: float
    gradient: float
    direction: float
    descent: float
    spread: float


def recipe(reading: str, options: argparse.Namespace) -> Config:
    """Return the small network's recipe."""
    return recipes.load("paper", [
        *READINGS[reading], "model.width=128", "model.depth=2", "model.heads=4", "model.covariate_width=32",
        f"train.max_steps={options.steps}", f"train.warmup_steps={options.steps // 10}",
        f"train.learning_rate={options.learning_rate}",
        f"train.set_size={options.set_size}", f"train.sets_per_step={options.sets}",
    ])  # fmt: skip


def batches(material: TrainingSetup, start: int, stop: int) -> Iterator[tuple[int, CellSetBatch]]:
    """Yield the steps ``start`` to ``stop`` (exclusive) with their sets."""
    loader = material.loader(
        material.train_sampler(Processes()), start_step=start, stop_step=stop, prefetch=0
    )
    yield from zip(range(start, stop), loader, strict=True)


def gradient(module: TrainingModule, value: Tensor, *, last: bool) -> Tensor:
    """Return the gradient of a term with respect to all parameters, one vector."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    parts = torch.autograd.grad(value, parameters, retain_graph=not last, allow_unused=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                      for p, g in zip(parameters, parts, strict=True)])  # fmt: skip


def terms(module: TrainingModule, batch: CellSetBatch, draws: Draws, reduction: str) -> dict[str, Tensor]:
    """Return the terms unweighted, the squared error reduced over genes as said."""
    loss = module.config.loss.model_copy(update={"mse_reduction": reduction})
    whole = module.config
    module.config = whole.model_copy(update={"loss": loss})
    try:
        return module.objective(batch, draws)
    finally:
        module.config = whole


@torch.no_grad()
def spread(module: TrainingModule, batch: CellSetBatch, noise: Tensor) -> float:
    """Return the variance of cells estimated from pure noise over that of real ones, summed over genes."""
    t = torch.full((len(batch.target),), module.schedule.num_steps - 1)
    estimate = module.estimate(noise, t, batch)
    real = module.denoiser.encode(batch.target)
    return float(estimate.var(1).sum() / real.var(1).sum())


def look(module: TrainingModule, material: TrainingSetup, reduction: str, steps: int) -> Balance:
    """Measure over ``steps`` steps' sets, the same whenever it is called."""
    rows, sums, spreads = [], None, []
    for step, batch in batches(material, LOOKED_AT, LOOKED_AT + steps):
        draws = module.draws(batch.target.shape, step)
        found = terms(module, batch, draws, reduction)
        mmd = gradient(module, found["mmd"], last=False)
        mse = gradient(module, found["mse"], last=True)
        direction = torch.cosine_similarity(mmd + mse, mmd, dim=0)
        rows.append(
            torch.stack([found["mmd"].detach(), found["mse"].detach(), mmd.norm() / mse.norm(), direction])
        )
        both = torch.stack([mmd, mse])
        sums = both if sums is None else sums + both
        spreads.append(spread(module, batch, draws.noise))
    assert sums is not None
    values, middle = torch.stack(rows).mean(0), torch.stack(rows).median(0).values
    lengths = sums.norm(dim=1)
    return Balance(
        float(values[0]), float(values[1]), float(middle[2]), float(middle[3]),
        float(lengths[0] / lengths[1]), sum(spreads) / len(spreads),
    )  # fmt: skip


def train(
    module: TrainingModule, material: TrainingSetup, optimizer: Optimizer, start: int, stop: int
) -> None:
    """Take the optimiser steps ``start`` to ``stop`` (exclusive)."""
    for step, batch in batches(material, start, stop):
        module.objective(batch, module.draws(batch.target.shape, step))["total"].backward()
        optimizer.step(step)


def show(name: str, reading: str, step: int, genes: int, found: Balance) -> None:
    """Print one row."""
    mean = found.mse / genes if reading == "sum" else found.mse
    print(
        f"{name:12s} {reading:10s} {step:5d} {found.mmd:9.4f} {mean * genes:9.4f} {mean:9.6f} "
        f"{found.mmd / found.mse:9.3g} {found.gradient:9.3g} {found.descent:9.3g} {found.direction:9.3f} "
        f"{found.spread:7.3f}",
        flush=True,
    )


def study(store: Path, split: Path, options: argparse.Namespace) -> None:
    """Train and measure every reading on one data set."""
    for reading in READINGS:
        torch.manual_seed(0)
        began = time.process_time()
        material = from_scratch(store, split, recipe(reading, options))
        module = TrainingModule(material.model, material.config)
        optimizer = Optimizer(module.denoiser, material.config.train)
        reduction = "sum" if reading == "sum" else "mean"
        half = options.steps // 2
        for start, stop in ((0, 0), (0, half), (half, options.steps)):
            train(module, material, optimizer, start, stop)
            show(
                store.name,
                reading,
                stop,
                len(material.genes),
                look(module, material, reduction, options.look),
            )
        print(f"# {time.process_time() - began:.0f} CPU-s", flush=True)


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="STORE SPLIT")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--set-size", type=int, default=64)
    parser.add_argument("--sets", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--look", type=int, default=12, help="steps looked at for a row")
    options = parser.parse_args()
    if len(options.paths) % 2:
        parser.error("each STORE needs its SPLIT")
    print(f"{'data':12s} {'trained':10s} {'step':>5s} {'mmd':>9s} {'mse sum':>9s} {'mse mean':>9s} "
          f"{'value':>9s} {'gradient':>9s} {'descent':>9s} {'direction':>9s} {'spread':>7s}")  # fmt: skip
    for store, split in zip(options.paths[::2], options.paths[1::2], strict=True):
        study(store, split, options)


if __name__ == "__main__":
    main()
