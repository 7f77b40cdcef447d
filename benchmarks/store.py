"""Preprocessing against scanpy in memory, and reading windows of cells against anndata.

    python benchmarks/store.py [--cells 60000] [--genes 20000] [--folder DIR]

Data are drawn block by block into an uncompressed h5ad. Preprocessing reads, checks, chooses 2000 genes, sorts and
writes; scanpy reads, normalises, chooses genes and writes its result as Zarr, unsorted. Each runs in its own process;
CPU seconds and peak memory are compared. Reading takes 4096 cells at a time, in random windows of 64 rows, as dense
log1p values; anndata's own reader returns the rows only. Prints each rate and the ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import scanpy as sc
import scipy.sparse as sp
import zarr

from perturbdiff.config import DataConfig
from perturbdiff.data.preprocess import preprocess
from perturbdiff.data.store import Store

BLOCK = 4000
WINDOW, STEP = 64, 4096


def simulate(path: Path, cells: int, genes: int) -> None:
    """Write counts at a depth of about 2000 per cell, three cell types, two batches, 50 perturbations."""
    rng = np.random.default_rng(0)
    mean = rng.lognormal(0, 1.6, genes)
    share = np.cumsum(mean / mean.sum())
    rows = []
    for _ in range(BLOCK):  # one block of distinct cells, repeated: the readers do not care
        drawn = np.searchsorted(share, rng.random(int(rng.lognormal(7.6, 0.4))))
        columns, counts = np.unique(np.minimum(drawn, genes - 1), return_counts=True)
        rows.append((columns.astype(np.int32), counts.astype(np.float32)))
    lengths = np.array([len(r[0]) for r in rows])
    obs = pd.DataFrame(
        {
            "cell_type": rng.choice(list("abc"), cells),
            "batch": rng.choice(list("xy"), cells),
            "perturbation": rng.choice(["control", *(f"p{i}" for i in range(49))], cells),
        },
        index=[f"cell{i}" for i in range(cells)],
    ).astype("category")
    empty = sp.csr_matrix((cells, genes), dtype=np.float32)
    ad.AnnData(empty, obs, pd.DataFrame(index=[f"gene{i}" for i in range(genes)])).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        matrix, end, indptr = file["X"], 0, [np.zeros(1, np.int64)]
        total = int(sum(lengths[: min(BLOCK, cells - a)].sum() for a in range(0, cells, BLOCK)))
        for name, dtype in (("data", "f4"), ("indices", "i4")):
            del matrix[name]
            matrix.create_dataset(name, (total,), dtype, chunks=(1 << 18,))
        for start in range(0, cells, BLOCK):
            size = min(BLOCK, cells - start)
            stop = end + int(lengths[:size].sum())
            matrix["indices"][end:stop] = np.concatenate([r[0] for r in rows[:size]])
            matrix["data"][end:stop] = np.concatenate([r[1] for r in rows[:size]])
            indptr.append(end + np.cumsum(lengths[:size]))
            end = stop
        del matrix["indptr"]
        matrix["indptr"] = np.concatenate(indptr)


def with_perturbdiff(path: Path, folder: Path) -> None:
    preprocess([path], folder / "store", DataConfig(), force=True)


def with_scanpy(path: Path, folder: Path) -> None:
    adata = ad.read_h5ad(path)
    sc.pp.normalize_total(adata)
    sc.pp.log1p(adata)
    sc.pp.highly_variable_genes(adata, n_top_genes=2000)
    adata[:, adata.var["highly_variable"]].copy().write_zarr(folder / "scanpy.zarr")


def measure(work: Callable[[Path, Path], None], path: Path, folder: Path) -> tuple[float, float]:
    """Return CPU seconds and peak memory (MiB) of ``work`` in a process of its own."""

    def body(connection: multiprocessing.connection.Connection) -> None:
        warnings.simplefilter("ignore")
        work(path, folder)
        used = resource.getrusage(resource.RUSAGE_SELF)
        connection.send((used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))

    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=body, args=(send,))
    process.start()
    process.join()
    return receive.recv()


def reading_rate(read: Callable[[np.ndarray], object], cells: int, steps: int) -> float:
    """Return cells read per CPU second in random windows."""
    rng = np.random.default_rng(0)
    used = 0.0
    for step in range(steps + 1):
        starts = np.sort(rng.choice((cells - WINDOW) // WINDOW, STEP // WINDOW, replace=False)) * WINDOW
        rows = (starts[:, None] + np.arange(WINDOW)).ravel()
        before = time.process_time()
        read(rows)
        used += (time.process_time() - before) * (step > 0)  # the first step warms up
    return steps * STEP / used


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=60_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        path = folder / "counts.h5ad"
        simulate(path, given.cells, given.genes)
        with_perturbdiff(path, folder)  # compiles the kernels
        rows = {n: measure(w, path, folder) for n, w in (("ours", with_perturbdiff), ("scanpy", with_scanpy))}
        for label, (seconds, memory) in rows.items():
            print(f"preprocess {label:8} {given.cells / seconds:10.0f} cells/CPU-s {memory:8.0f} MiB")
        (a, ours), (b, theirs) = rows["ours"], rows["scanpy"]
        print(f"preprocess ratio    {b / a:10.2f} x faster    {theirs / ours:8.2f} x less memory")
        store = Store(folder / "store")
        sparse = ad.io.sparse_dataset(zarr.open_group(folder / "store" / "part-0000.zarr" / "X", mode="r"))
        rates = {
            "memory": reading_rate(store.in_memory().dense, store.n_cells, 20),
            "disk": reading_rate(store.dense, store.n_cells, 10),
            "anndata": reading_rate(lambda rows: sparse[rows], store.n_cells, 2),
        }
        for label, rate in rates.items():
            print(f"read {label:14} {rate:10.0f} cells/CPU-s {rate / rates['anndata']:8.1f} x anndata")


if __name__ == "__main__":
    main()
