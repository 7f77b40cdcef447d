"""Simulated raw counts of a full transcriptome, as large as one likes: what the benchmark of preprocessing reads.

    python benchmarks/full_transcriptome.py counts.h5ad [--cells 200000] [--genes 20000] [--compression gzip]
                                            [--files N] [--seed 1]

Every cell is drawn: counts are negative binomial (dispersion 1) around the mean of its gene in its cell type, times
its batch, its perturbation and its depth. Mean expression spans some five orders of magnitude, a cell has about
1,050 stored values, and 8 cell types, 4 batches and 40 perturbations (a tenth of the cells are controls) lie in
random order. The layout is what anndata writes: CSR in X, float32 values, int32 columns, chunks of 65,536. Memory
does not depend on the number of cells. With ``--files N`` the cells go to ``counts-0.h5ad`` and so on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import h5py
import numba
import numpy as np
import pandas as pd
import scipy.sparse as sp

CONTROL_SHARE = 0.1
BLOCK = 4000
CHUNK = 65_536
MOST_VALUES = 6000
"""No cell has more stored values than this."""


@dataclass(frozen=True)
class Design:
    """How many labels of each kind there are; the share of entries that are not 0 before depth and labels vary it."""

    cell_types: int = 8
    batches: int = 4
    perturbations: int = 40
    density: float = 0.0535


@numba.njit(nogil=True, cache=True)
def draw(
    mean: np.ndarray,
    fold: np.ndarray,
    targets: np.ndarray,
    cell_type: np.ndarray,
    batch: np.ndarray,
    perturbation: np.ndarray,
    depth: np.ndarray,
    key: np.uint64,
    lengths: np.ndarray,
    columns: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Write the cells' stored values one after another; return how many."""
    end = 0
    rate = np.empty(mean.shape[2], np.float32)
    for i in range(len(cell_type)):
        state = (key + np.uint64(i + 1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
        rate[:] = mean[cell_type[i], batch[i]] * depth[i]
        for k in range(targets.shape[1]):
            rate[targets[perturbation[i], k]] *= fold[perturbation[i], k]
        begin = end
        for j in range(len(rate)):
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            uniform = np.float32(state >> np.uint64(40)) * np.float32(2.0**-24)
            if uniform * (1 + rate[j]) > 1 and end - begin < MOST_VALUES:  # P(0) is 1 / (1 + rate)
                rest = (np.float64(state & np.uint64(0xFFFFFF)) + 1) * 2.0**-24
                columns[end] = j
                counts[end] = 1 + int(np.log(rest) / np.log(rate[j] / (1.0 + rate[j])))
                end += 1
        lengths[i] = end - begin
    return end


def parameters(
    genes: int, rng: np.random.Generator, design: Design
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean counts by cell type, batch and gene, and each perturbation's targets and their fold changes."""
    mean = np.exp(rng.normal(0, 1.8, genes))
    low, high = 1e-6, 100.0
    for _ in range(60):  # the factor at which the wanted share of entries is not zero
        middle = np.sqrt(low * high)
        dense = (mean * middle / (1 + mean * middle)).mean() > design.density
        low, high = (low, middle) if dense else (middle, high)
    of_types = (design.cell_types, 1, genes)
    types = np.exp(rng.normal(0, 0.5, of_types) * (rng.random(of_types) < 0.3))
    batches = np.exp(rng.normal(0, 0.1, (1, design.batches, genes)))
    targets = rng.integers(0, genes, (design.perturbations, max(1, genes // 100)))
    fold = np.exp(rng.normal(0, 0.8, targets.shape))
    fold[0] = 1  # the control
    return (mean * low * types * batches).astype(np.float32), targets, fold.astype(np.float32)


def labels(cells: int, rng: np.random.Generator, design: Design) -> pd.DataFrame:
    """Return the obs of so many cells, named as barcodes, in random order."""
    share = np.minimum(rng.pareto(2.0, design.perturbations - 1), 4) + 0.3
    share = np.concatenate([[CONTROL_SHARE], share / share.sum() * (1 - CONTROL_SHARE)])
    types = rng.dirichlet(np.full(design.cell_types, 4.0))
    names = {
        "cell_type": (
            rng.choice(design.cell_types, cells, p=types),
            [f"type{k}" for k in range(design.cell_types)],
        ),
        "batch": (rng.integers(0, design.batches, cells), [f"plate{k}" for k in range(design.batches)]),
        "perturbation": (
            rng.choice(design.perturbations, cells, p=share),
            ["control", *(f"drug{k}" for k in range(1, design.perturbations))],
        ),
    }
    codes = {n: pd.Categorical.from_codes(c.astype(np.int16), k) for n, (c, k) in names.items()}
    digits = np.arange(cells)[:, None] // 4 ** np.arange(13)[None, :] % 4
    letters = np.frombuffer(b"ACGT", np.uint8)[digits].view("S13").ravel().astype(str)
    return pd.DataFrame(codes, index=pd.Index(letters.astype(object)) + "-1")


def create(path: Path, obs: pd.DataFrame, genes: int, compression: str | None, values: str) -> h5py.File:
    """Write everything but the values; return the file, open, with datasets that grow."""
    var = pd.DataFrame(index=[f"GENE{k:05d}" for k in range(genes)])
    ad.AnnData(sp.csr_matrix((len(obs), genes), dtype=np.float32), obs, var).write_h5ad(path)
    file = h5py.File(path, "r+")
    for name, dtype in (("data", values), ("indices", "i4")):
        del file["X"][name]
        file["X"].create_dataset(
            name, (0,), dtype, maxshape=(None,), chunks=(CHUNK,), compression=compression
        )
    return file


def append(dataset: h5py.Dataset, values: np.ndarray) -> None:
    size = dataset.shape[0]
    dataset.resize((size + len(values),))
    dataset[size:] = values


def simulate(
    path: Path,
    cells: int,
    genes: int = 20_000,
    *,
    design: Design = Design(),
    num_files: int = 1,
    compression: str | None = None,
    values: str = "f4",
    seed: int = 1,
) -> list[Path]:
    """Write ``cells`` cells to ``path``, or spread over ``num_files`` files beside it; return the files."""
    rng = np.random.default_rng(seed)
    mean, targets, fold = parameters(genes, rng, design)
    edges = np.linspace(0, cells, num_files + 1).astype(int)
    numbered = [path.with_name(f"{path.stem}-{k}{path.suffix}") for k in range(num_files)]
    paths = numbered if num_files > 1 else [path]
    columns = np.empty(BLOCK * MOST_VALUES, np.int32)
    counts = np.empty(BLOCK * MOST_VALUES, np.float32)
    for number, (own, first, last) in enumerate(zip(paths, edges, edges[1:], strict=False)):
        draws = np.random.default_rng([seed, number])
        obs = labels(int(last - first), draws, design)
        depth = np.exp(draws.normal(-0.08, 0.4, len(obs))).astype(np.float32)
        codes = [obs[n].cat.codes.to_numpy() for n in ("cell_type", "batch", "perturbation")]
        pointers = [np.zeros(1, np.int64)]
        with create(own, obs, genes, compression, values) as file:
            for start in range(0, len(obs), BLOCK):
                rows = slice(start, min(start + BLOCK, len(obs)))
                lengths = np.empty(rows.stop - start, np.int64)
                key = np.uint64(seed * 1_000_003 + int(first) + start)
                size = draw(
                    mean, fold, targets, *(c[rows] for c in codes), depth[rows], key, lengths, columns, counts
                )
                append(file["X/indices"], columns[:size])
                append(file["X/data"], counts[:size])
                pointers.append(pointers[-1][-1] + np.cumsum(lengths))
            del file["X/indptr"]
            file["X"].create_dataset("indptr", data=np.concatenate(pointers))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--compression", choices=["gzip", "lzf"])
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    paths = simulate(
        given.path,
        given.cells,
        given.genes,
        num_files=given.files,
        compression=given.compression,
        seed=given.seed,
    )
    values = sum(h5py.File(p)["X/data"].shape[0] for p in paths)
    print(f"{len(paths)} files, {given.cells} cells, {values / given.cells:.0f} stored values per cell")


if __name__ == "__main__":
    main()
