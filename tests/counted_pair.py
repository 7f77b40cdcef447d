"""A pair of files of simulated counts: real cells, and predictions good and bad. No random generator is used."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import poisson

GENES = [f"G{i:02d}" for i in range(80)]
CONTROL = "non-targeting"
PERTURBATIONS = (*(f"G{i:02d}" for i in range(3, 80, 7)), "drug")
CONTROLS = 60


def uniform(*numbers) -> np.ndarray:
    """Return numbers in (0, 1) that depend on whole ``numbers``, arrays that fit together, and on nothing else."""
    mixed = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for number in numbers:
            mixed = (mixed ^ np.asarray(number, np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = mixed ^ (mixed >> np.uint64(31))
            mixed = mixed * np.uint64(0x94D049BB133111EB)
            mixed = mixed ^ (mixed >> np.uint64(29))
    return ((mixed >> np.uint64(11)).astype(float) + 0.5) / 2.0**53


def cells_of(place: int, number: int, side: int) -> np.ndarray:
    """Return counts [number, genes] of a perturbation by its place, of the controls for −1; ``side`` 0 is real."""
    genes, cells = np.arange(len(GENES)), np.arange(number)
    rate = np.exp(2.2 * uniform(7, genes) - 0.7)
    rate[:4] *= 0.002  # hardly seen, so that they are not tested
    if place >= 0:
        acts = uniform(11, place, genes) < 0.35
        size = 1.6 * (uniform(13, place, genes) - 0.5)
        true = np.where(acts, np.sign(size) * (0.4 + np.abs(size)), 0.0)
        other = 0.8 * (uniform(17, place, genes) - 0.5)
        rate = rate * np.exp(true if side == 0 else 0.7 * true + other)
        if place < len(PERTURBATIONS) - 1:
            rate[GENES.index(PERTURBATIONS[place])] *= 0.2
    depth = 0.5 + uniform(19, place + 2, side, cells)
    drawn = uniform(23, place + 2, side, cells[:, None], genes[None, :])
    return poisson.ppf(drawn, depth[:, None] * rate[None, :])


def counted_side(side: int) -> ad.AnnData:
    """Return the real cells (0) or the predictions (1), which copy controls for one and one cell for another label."""
    blocks, labels = [cells_of(-1, CONTROLS, 0)], [CONTROL] * CONTROLS
    for place, name in enumerate(PERTURBATIONS):
        number = int(18 + 3 * ((5 * place + 2 * side) % 7))
        cells = cells_of(place, number, side)
        if side and place == 4:
            cells = blocks[0][:number]  # says nothing of the perturbation
        if side and place == 6:
            cells = np.repeat(cells[:1], number, axis=0)
        blocks.append(cells)
        labels += [name] * number
    obs = pd.DataFrame({"target": labels}, index=[f"cell{i}" for i in range(len(labels))])
    return ad.AnnData(sp.csr_matrix(np.vstack(blocks).astype(np.float32)), obs, pd.DataFrame(index=GENES))


def write_pair(folder, **options) -> tuple:
    """Write both sides and return the paths of predictions and truth."""
    paths = folder / "predicted.h5ad", folder / "real.h5ad"
    counted_side(1).write_h5ad(paths[0], **options)
    counted_side(0).write_h5ad(paths[1], **options)
    return paths
