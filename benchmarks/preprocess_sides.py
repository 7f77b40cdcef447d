"""One way to preprocess, in a process of its own: what `preprocess.py` starts.

    python benchmarks/preprocess_sides.py SIDE INPUT FOLDER [--cells N]

Prints one JSON object: CPU and wall seconds, the phases, facts of the result. Imports and the compilation of kernels
(a first run on 500 cells) come before the clock; what workers spend on their own imports counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
from full_transcriptome import simulate
from processes import Stopwatch

CONDITION = ["cell_type", "batch", "perturbation"]
GENES = 2000
DASK_ROWS = 5000


class Phases:
    """Seconds of CPU by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, work: Callable, *args, **kwargs):
        watch = Stopwatch()
        try:
            return work(*args, **kwargs)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + watch.read()["cpu"]


def ours(path: Path, out: Path, phases: Phases, *, jobs: int) -> dict:
    """Preprocess with this package. Phases are seen in this process alone, so only with one job."""
    from perturbdiff.config.settings import DataConfig
    from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
    from perturbdiff.runtime import files, task_runner

    plain_hash, plain_run = files.sha256, task_runner.TaskRunner.run

    @functools.wraps(plain_hash)
    def timed_hash(path: Path) -> str:
        return phases.timed("input hash", plain_hash, path)

    @functools.wraps(plain_run)
    def timed_run(self, function, tasks, **options):
        return phases.timed(options.get("label", "?"), plain_run, self, function, tasks, **options)

    if jobs == 1:
        files.sha256, task_runner.TaskRunner.run = timed_hash, timed_run
    try:
        preprocess([path], out, DataConfig(num_hvgs=GENES), force=True, machine=Machine(jobs=jobs))
    finally:
        files.sha256, task_runner.TaskRunner.run = plain_hash, plain_run
    with h5py.File(path) as file:
        raw = file["X/data"].shape[0]
    return {"raw values": raw, "input bytes": path.stat().st_size, **folder_facts(out)}


def folder_facts(out: Path) -> dict:
    """Return bytes and data files of a store, without the records that do not grow with it."""
    parts = [f for part in out.glob("part-*.zarr") for f in part.rglob("*") if f.is_file()]
    data = [f for f in parts if f.name != "zarr.json"]
    matrix = [f for f in data if "X" in f.parts]
    growing = [f for f in data if {"X", "obs"} & set(f.parts)]
    return {
        "bytes": sum(f.stat().st_size for f in growing),
        "bytes of X": sum(f.stat().st_size for f in matrix),
        "files of X": len(matrix),
        "data files": len(growing),
        "parts": len(list(out.glob("part-*.zarr"))),
        "files": sum(1 for f in out.rglob("*") if f.is_file()),
        "values": stored_values(out),
    }


def stored_values(out: Path) -> int:
    return sum(json.loads(p.read_text())["shape"][0] for p in out.glob("part-*.zarr/X/data/zarr.json"))


def scanpy_memory(path: Path, out: Path, phases: Phases) -> dict:
    """Do the same work with scanpy, everything in memory; no checks, no hashes."""
    import scanpy as sc

    adata = phases.timed("read", ad.read_h5ad, path)
    phases.timed("normalise", sc.pp.normalize_total, adata)
    phases.timed("log1p", sc.pp.log1p, adata)
    phases.timed("HVG", sc.pp.highly_variable_genes, adata, n_top_genes=GENES)
    adata = phases.timed("subset", lambda: adata[:, adata.var["highly_variable"]].copy())
    adata = phases.timed("sort", lambda: adata[np.lexsort(sort_keys(adata))].copy())
    phases.timed("write", adata.write_h5ad, out)
    return {"bytes": out.stat().st_size}


def sort_keys(adata: ad.AnnData) -> list[np.ndarray]:
    """Return the keys of the store's order: controls first, random within a condition."""
    names = [adata.obs[n].astype(str).to_numpy() for n in CONDITION]
    chance = np.random.default_rng(0).random(adata.n_obs)
    return [chance, names[2], names[2] != "control", names[1], names[0]]


def scanpy_dask(path: Path, out: Path, phases: Phases, *, cells: int, whole: bool) -> dict:
    """Choose genes with scanpy on dask arrays (two threads); ``whole``: also subset, sort and write."""
    import dask
    import scanpy as sc
    from anndata.experimental import read_elem_lazy

    with h5py.File(path) as file, dask.config.set(scheduler="threads", num_workers=2):
        obs, var = (ad.io.read_elem(file[k]) for k in ("obs", "var"))
        matrix = read_elem_lazy(file["X"], chunks=(DASK_ROWS, -1))
        adata = ad.AnnData(matrix[:cells], obs.iloc[:cells], var)
        phases.timed("normalise", sc.pp.normalize_total, adata)
        phases.timed("log1p", sc.pp.log1p, adata)
        phases.timed("HVG", sc.pp.highly_variable_genes, adata, n_top_genes=GENES)
        if whole:
            adata = adata[:, adata.var["highly_variable"]][np.lexsort(sort_keys(adata))].copy()
            phases.timed("subset, sort, write", adata.write_zarr, out)
    return {"cells": min(cells, len(obs))}


def machine(path: Path, out: Path, phases: Phases, *, cells: int) -> dict:
    """Do what no program can avoid: read the arrays, copy them, hash the bytes, compress what is stored."""
    import hashlib

    from numcodecs import blosc

    store = out.with_name("store")
    with h5py.File(path) as file:
        indptr = file["X/indptr"][: cells + 1]
        cells, stop, step = len(indptr) - 1, int(indptr[-1]), 4_000_000
        ranges = [(a, min(stop, a + step)) for a in range(0, stop, step)]

        def read() -> None:
            for a, b in ranges:
                file["X/indices"][a:b], file["X/data"][a:b]

        phases.timed("sequential read (h5py)", read)
        block = np.concatenate([file["X/data"][a:b] for a, b in ranges[:10]])
    rounds = 2 * max(1, stop // len(block))  # as many bytes as columns and values have
    target = np.empty_like(block)
    phases.timed("memcpy", lambda: [np.copyto(target, block) for _ in range(rounds)])
    phases.timed("SHA-256", lambda: [hashlib.sha256(block) for _ in range(rounds)])
    pieces = compressed_pieces(store) if store.is_dir() else []
    for level in (2, 3):
        phases.timed(
            f"blosc zstd {level}", lambda level=level: [blosc.compress(p, b"zstd", level, 1) for p in pieces]
        )
    return {
        "cells": cells,
        "cells compressed": 64 * len(pieces) // 2,
        "bytes": 2 * block.nbytes * rounds // 2,
    }


def compressed_pieces(store: Path, most: int = 4000) -> list[np.ndarray]:
    """Return columns and values of up to so many chunks of 64 cells of a store."""
    import zarr

    matrix = zarr.open_group(next(iter(sorted(store.glob("part-*.zarr")))) / "X", mode="r")
    pointers = matrix["indptr"][: 64 * most + 1]
    found = []
    for name in ("indices", "data"):
        values = matrix[name][: int(pointers[-1])]
        chunk = matrix[name].chunks[0]
        found += [values[a : a + chunk] for a in range(0, len(values) - chunk, chunk)]
    return found


def sides(cells: int) -> dict[str, Callable[[Path, Path, Phases], dict]]:
    """Return the ways there are, by name."""
    return {
        "ours --jobs 1": functools.partial(ours, jobs=1),
        "ours --jobs 2": functools.partial(ours, jobs=2),
        "scanpy": scanpy_memory,
        "scanpy + dask, to HVG": functools.partial(scanpy_dask, cells=cells, whole=False),
        "scanpy + dask": functools.partial(scanpy_dask, cells=cells, whole=True),
        "machine": functools.partial(machine, cells=cells),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("side")
    parser.add_argument("input", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", type=int, default=1 << 40, help="read no more than the first so many")
    given = parser.parse_args()
    work = sides(given.cells)[given.side]
    out = given.folder / ("store" if given.side.startswith("ours") else "other")
    if given.side != "machine":
        small = given.folder / "small.h5ad"
        simulate(small, 500, 3000)
        warm = {"jobs": 1} if given.side.startswith("ours") else {}
        work(small, given.folder / "small", Phases(), **warm)
    if given.side != "machine":  # which looks at the store of the run before
        shutil.rmtree(out, ignore_errors=True)
    phases = Phases()
    watch = Stopwatch()
    facts = work(given.input, out, phases)
    spent = watch.read()
    for rest in (given.folder / "small", given.folder / "other"):
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink(missing_ok=True)
    print(json.dumps({**spent, "phases": phases.seconds, **facts}))


if __name__ == "__main__":
    main()
