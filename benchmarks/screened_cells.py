"""Simulated screen for the loader's benchmark: a store of cells sorted by condition, and the layouts others read.

Five cell types, four batches, 25 perturbations, one of them the control with the most cells; the sizes of conditions
have a heavy tail. Counts are negative binomial (dispersion 1), genes independent of each other given the cell type,
which compresses worse than real data should.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import anndata as ad
import h5py
import numba
import numpy as np
import pandas as pd
import scipy.sparse as sp

from perturbdiff.config.settings import DataConfig
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.store.store import Store

_BLOCK = 20_000


@numba.njit(cache=True)
def _draw(
    rate: np.ndarray,
    fold: np.ndarray,
    cell_type: np.ndarray,
    depth: np.ndarray,
    seed: int,
    ends: np.ndarray,
    columns: np.ndarray,
    counts: np.ndarray,
) -> None:
    np.random.seed(seed)  # noqa: NPY002 - compiled, it is another generator
    end = 0
    for i in range(len(cell_type)):
        for j in range(len(rate)):
            mean = rate[j] * fold[cell_type[i], j] * depth[i]
            # a zero has probability 1 / (1 + mean)
            if np.random.random() * (1 + mean) > 1:  # noqa: NPY002
                tail = np.log(np.random.random() + 1e-300) / np.log(mean / (1 + mean))  # noqa: NPY002
                columns[end], counts[end] = j, min(1 + int(tail), 65_000)
                end += 1
        ends[i] = end


def _labels(cells: int, rng: np.random.Generator) -> np.ndarray:
    """Return cell type, batch and perturbation of each cell, int [cells, 3]."""
    weight = np.minimum(rng.pareto(1.2, (5, 4, 25)) + 0.1, 40)
    weight[:, :, 0] = 5 * weight.mean()
    size = np.maximum(4, (weight / weight.sum() * cells).astype(int))
    while (left := cells - size.sum()) != 0:
        largest = np.unravel_index(size.argmax(), size.shape)
        size[largest] += max(left, 4 - size[largest])
    place = np.stack(np.meshgrid(range(5), range(4), range(25), indexing="ij"), axis=-1)
    return np.repeat(place.reshape(-1, 3), size.reshape(-1), axis=0)


def make_store(folder: Path, cells: int, genes: int, density: float) -> Store:
    """Simulate cells and return their store, made by `preprocess` with all genes kept."""
    rng = np.random.default_rng(1)
    base = np.exp(rng.normal(0, 1.8, genes))
    low, high = 1e-6, 10.0
    for _ in range(60):
        middle = np.sqrt(low * high)
        too_few = (base * middle / (1 + base * middle)).mean() < density
        low, high = (middle, high) if too_few else (low, middle)
    rate = (base * low).astype(np.float32)
    fold = np.exp(rng.normal(0, 0.5, (5, genes))).astype(np.float32)
    labels, depth = _labels(cells, rng), np.exp(rng.normal(0, 0.4, cells)).astype(np.float32)
    blocks = []
    for start in range(0, cells, _BLOCK):
        here = slice(start, min(start + _BLOCK, cells))
        size = here.stop - start
        ends, most = np.zeros(size + 1, np.int64), int(size * genes * min(1.0, 2 * density + 0.1))
        columns, counts = np.empty(most, np.int32), np.empty(most, np.float32)
        _draw(rate, fold, labels[here, 0], depth[here], start, ends[1:], columns, counts)
        blocks.append(sp.csr_matrix((counts[: ends[-1]], columns[: ends[-1]], ends), shape=(size, genes)))
    names = {"cell_type": "type", "batch": "batch", "perturbation": "drug"}
    obs = pd.DataFrame(
        {k: np.char.add(name, labels[:, i].astype(str)) for i, (k, name) in enumerate(names.items())},
        index=np.char.add("cell", np.arange(cells).astype(str)),
    ).astype("category")
    path = folder / f"counts-{genes}.h5ad"
    var = pd.DataFrame(index=[f"gene{i}" for i in range(genes)])
    ad.AnnData(sp.vstack(blocks, "csr"), obs, var).write_h5ad(path)
    recipe = DataConfig(control="drug0", num_hvgs=None)
    preprocess([path], folder / f"store-{genes}", recipe, force=True)
    path.unlink()
    return Store(folder / f"store-{genes}")


def write_layouts(store: Store, cells: int, folder: Path) -> dict[str, Path]:
    """Write the first cells of a store, normalised, as others keep them: h5ad and zarr, by anndata's defaults.

    The h5ad has CSR in X and the same once dense, once as CSR, in obsm, which is what the released code reads.
    """
    values = store.expression(slice(0, cells))
    adata = ad.AnnData(values, var=pd.DataFrame(index=store.genes))
    found = {"h5ad": folder / "cells.h5ad", "zarr": folder / "cells.zarr"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adata.write_zarr(found["zarr"])
        adata.obsm["X_csr"] = values
        adata.write_h5ad(found["h5ad"])
    with h5py.File(found["h5ad"], "r+") as file:
        dense = file["obsm"].create_dataset("X_hvg", values.shape, np.float32)
        dense.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        for start in range(0, cells, _BLOCK):
            dense[start : start + _BLOCK] = values[start : start + _BLOCK].toarray()
    return found
