"""What a study will cost: disk and memory of preprocessing, and hours of training and sampling on a GPU.

The rates of preprocessing are those of lab/scale.md, measured at a million cells; the work of the network is counted
(`perturbdiff.training.network_size`), and the speed of the GPU assumed. All of it is an estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perturbdiff.config.settings import Config

SPEED = {"32-true": 0.7 * 19.5e12, "bf16-mixed": 0.4 * 312e12}
"""FLOP/s assumed of an A100: 70 % of its float32 peak (no tensor cores), 40 % of its dense bfloat16 peak."""

STORAGE = 1e9
"""Bytes per second that storage is assumed to deliver."""
READS = 3
"""How often preprocess reads its input: the hash, sums, and cells."""

_STORE = 1.42  # bytes for each stored value of a store
_SCRATCH = 4.4  # bytes for each stored value while preprocess runs
_WORKER = 424 * 2**20  # bytes of a worker process
_LABELS = 16  # bytes for each cell, in one process


@dataclass(frozen=True)
class Size:
    """What preprocess will need, in bytes and seconds.

    Attributes
    ----------
    store, scratch
        Bytes of the store, and beside it while it is made.
    worker, labels
        Bytes of memory of each worker process, and of the labels at most.
    reading
        Seconds of reading the input.
    """

    store: float
    scratch: float
    worker: float
    labels: float
    reading: float


def preprocessing(input_bytes: float, cells: int, values_per_cell: float, genes: int, kept: int) -> Size:
    """Return what preprocess will need.

    Parameters
    ----------
    input_bytes
        Size of the files.
    cells, genes
        Their cells and genes.
    values_per_cell
        Values of a cell that are not zero.
    kept
        Genes that are kept. Chosen genes have up to twice their share of the values.
    """
    values = cells * min(float(kept), values_per_cell, 2 * values_per_cell * kept / max(genes, 1))
    return Size(values * _STORE, values * _SCRATCH, _WORKER, cells * _LABELS, READS * input_bytes / STORAGE)


@dataclass(frozen=True)
class Hours:
    """Hours of one A100, with the recipe's precision."""

    training: float
    sampling: float
    steps: int


def on_gpu(config: Config, genes: int, labels: tuple[int, int, int], trained: int, predicted: int) -> Hours:
    """Return the hours of training once and predicting the test cells once.

    Parameters
    ----------
    config
        The recipe.
    genes
        Genes of the model.
    labels
        Perturbations, cell types and batches.
    trained, predicted
        Training cells, and cells to predict.
    """
    import torch

    from perturbdiff.model import Denoiser
    from perturbdiff.training.network_size import flops_per_cell, flops_per_step

    with torch.device("meta"):
        model = Denoiser(
            config.model,
            num_genes=genes,
            num_perturbations=labels[0] + 1,
            num_cell_types=labels[1] + 1,
            num_batches=labels[2] + 1,
        )
    steps, train = config.train.max_steps, config.train
    if train.max_epochs is not None:
        epoch = math.ceil(trained / (train.sets_per_step * train.set_size))
        steps = min(steps, max(train.min_steps, math.ceil(train.max_epochs * epoch)))
    size = config.sample.set_size or train.set_size
    passes = config.sample.num_steps * (2 if config.sample.guidance else 1)
    once = flops_per_cell(model, size, self_condition=config.sample.self_condition)
    speed = SPEED.get(train.precision, SPEED["32-true"])
    sampling = predicted * passes * once / SPEED.get(config.sample.precision, SPEED["32-true"])
    return Hours(steps * flops_per_step(model, config) / speed / 3600, sampling / 3600, steps)
