"""Cell sets to normalised float32, beside what others read with and the limits of the machine.

    OMP_NUM_THREADS=1 python benchmarks/loader.py [--cells 400000] [--genes 2000] [--out loader.json]

Perturbed and control cells are counted. Ours is the whole way: the sampler's stream, reading, densifying,
normalising, ids, one batch per step (8 sets of 256 + 256 cells, or 64 of 32 + 32). The others only take the
rows of random cells, or of random windows of 64, already normalised, and make one array of them: an upper bound. The
row reader is what the released code does, one h5py read per cell. Everything takes turns; a rate is the median over
the turns. Cells per CPU second repeat on a busy machine where cells per second do not. Files are in the page cache.
The store's cache of decoded chunks is kept smaller than the store, as it would be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import torch
import zarr
from screened_cells import make_store, write_layouts

from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.loading.cell_sets import CellSetSampler
from perturbdiff.loading.loader import SetLoader
from perturbdiff.loading.windows import WindowedSampler
from perturbdiff.store import stored_rows
from perturbdiff.store.store import Store
from perturbdiff.store.zarr_shards import ShardedReader

WINDOW, STEP = 64, 4096
Turn = Callable[[], int]
"""Does a piece of work and returns the number of cells."""


def ours(
    store: Store, size: int, steps: int, *, windowed: bool, threads: int = 1, packed: bool = False
) -> Turn:
    """Return turns of ``steps`` batches from our loader; each goes on where the last one ended."""
    kind = WindowedSampler if windowed else CellSetSampler
    use = np.ones(len(store.conditions), bool)
    sampler = kind(store.conditions, use, set_size=size, sets_per_step=STEP // (2 * size), seed=0, quiet=True)
    words = Vocabulary.from_conditions([store.conditions], control=store.control)
    made = SetLoader([store], sampler, vocabulary=words, genes=store.genes, threads=threads, packed=packed)

    def turn() -> int:
        made.stop_step = made.step + steps
        return sum(2 * size * len(batch.condition) for batch in made)

    return turn


def rows_of(cells: int, count: int, *, windows: bool) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    while True:
        if windows:
            starts = np.sort(rng.choice(cells - WINDOW, max(count // WINDOW, 1), replace=False))
            yield np.unique(starts[:, None] + np.arange(WINDOW))
        else:
            yield np.sort(rng.choice(cells, min(count, cells), replace=False))


def others(paths: dict[str, Path], cells: int, genes: int, count: int) -> dict[str, Turn]:
    """Return the turns of other readers on the same cells."""
    file = h5py.File(paths["h5ad"], "r", rdcc_nbytes=0, rdcc_nslots=0, rdcc_w0=1.0, libver="latest")
    random, near = rows_of(cells, count, windows=False), rows_of(cells, count, windows=True)

    def opened(key: str) -> tuple[Any, str]:
        """Look everything up for each cell, as the released reader does."""
        if "obsm" not in file or key not in file["obsm"]:
            raise KeyError(key)
        found = file["obsm"][key]
        return found, str(found.attrs.get("encoding-type"))

    def dense_row(row: int) -> torch.Tensor:
        matrix, _ = opened("X_hvg")
        return torch.as_tensor(matrix[row], dtype=torch.float32)[None]

    def sparse_row(row: int) -> torch.Tensor:
        group, _ = opened("X_csr")
        pointers = group["indptr"]
        first, last = int(pointers[row]), int(pointers[row + 1])
        columns = torch.as_tensor(group["indices"][first:last], dtype=torch.int64)
        values = torch.as_tensor(group["data"][first:last], dtype=torch.float32)
        return torch.sparse_csr_tensor(
            torch.tensor([0, last - first]), columns, values, (1, genes)
        ).to_dense()

    def by_row(read: Callable[[int], torch.Tensor]) -> Turn:
        def turn() -> int:
            return len(torch.stack([read(int(row)) for row in next(random)[: count // 4]]) / 10)

        return turn

    def by_slice(matrix: Any, rows: Iterator[np.ndarray]) -> Turn:
        def turn() -> int:
            return len(torch.from_numpy(np.asarray(matrix[next(rows)].toarray(), np.float32)))

        return turn

    backed = ad.read_h5ad(paths["h5ad"], backed="r").X
    on_zarr = ad.io.sparse_dataset(zarr.open_group(paths["zarr"], mode="r")["X"])
    return {
        "h5py, one dense row per read": by_row(dense_row),
        "h5py, one CSR row per read": by_row(sparse_row),
        "anndata backed h5ad, rows": by_slice(backed, random),
        "anndata backed h5ad, windows of 64": by_slice(backed, near),
        "anndata zarr, windows of 64": by_slice(on_zarr, near),
    }


def limits(store: Store) -> dict[str, Turn]:
    """Return turns of the least that reading must do, each over as many cells as it tells."""
    part = sorted(store.path.glob("part-*.zarr"))[0]
    readers = [ShardedReader(part / "X" / name) for name in ("indices", "data")]
    first = min(readers[0].num_chunks, 400)
    targets = [[np.empty(reader.chunk, reader.dtype) for _ in range(first)] for reader in readers]
    per_cell = store.n_values / store.n_cells
    files = [path for path in part.rglob("*") if path.is_file() and path.parent.name == "c"]
    a, b = np.zeros((STEP, store.n_genes), np.float32), np.empty((STEP, store.n_genes), np.float32)

    def copy() -> int:
        for _ in range(10):
            np.copyto(b, a)
        return 10 * STEP

    def decode() -> int:
        for reader, into in zip(readers, targets, strict=True):
            reader.decode(range(first), into)
        return int(first * readers[0].chunk / per_cell)

    def read() -> int:
        size = sum(len(path.read_bytes()) for path in files)
        return int(size / bytes_per_cell(store))

    return {
        "limit: copying dense float32": copy,
        "limit: decoding the chunks": decode,
        "limit: reading the files": read,
    }


def bytes_per_cell(store: Store) -> float:
    return sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file()) / store.n_cells


def measure(works: dict[str, Turn], turns: int) -> dict[str, dict[str, float]]:
    """Return cells per CPU second, cells per second, reads and bytes read per cell; the first turn warms up."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            before = (*io(), time.process_time(), time.perf_counter())
            cells = work()
            after = (*io(), time.process_time(), time.perf_counter())
            reads, size, cpu, wall = (b - a for a, b in zip(before, after, strict=True))
            if turn:
                found[name].append((cells / cpu, cells / wall, reads / cells, size / cells))
    names = ("cells/CPU-s", "cells/s", "reads/cell", "bytes read/cell")
    return {
        what: dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))
        for what, rows in found.items()
    }


def io() -> tuple[int, int]:
    """Return read calls and bytes of this process so far."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0, 0
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["syscr"]), int(fields["rchar"])


def works(folder: Path, given: argparse.Namespace) -> tuple[dict[str, Turn], dict[str, float]]:
    """Make the data; return everything that takes turns, and what the store costs."""
    store = make_store(folder, given.cells, given.genes, 0.1)
    wide = make_store(folder, given.wide_cells, given.wide_genes, 0.083)
    paths = write_layouts(store, min(given.others_cells, store.n_cells), folder)
    memory, steps = store.in_memory(), given.steps
    found = {
        f"in memory, {store.n_genes} genes": ours(memory, 256, steps, windowed=False),
        f"windowed, {store.n_genes} genes": ours(store, 256, steps, windowed=True),
        "windowed, 2 threads": ours(Store(store.path), 256, steps, windowed=True, threads=2),
        "windowed, m = 32": ours(Store(store.path), 32, steps, windowed=True),
        "windowed, sparse rows for a GPU": ours(Store(store.path), 256, steps, windowed=True, packed=True),
        f"in memory, {wide.n_genes} genes": ours(wide.in_memory(), 256, max(steps // 5, 1), windowed=False),
        f"windowed, {wide.n_genes} genes": ours(wide, 256, max(steps // 5, 1), windowed=True),
    }
    found |= others(paths, min(given.others_cells, store.n_cells), store.n_genes, given.others_rows)
    found |= limits(store)
    facts = {
        "bytes per cell": bytes_per_cell(store),
        "bytes in memory per cell": store.nbytes_in_memory / store.n_cells,
    }
    facts |= {
        "values per cell": store.n_values / store.n_cells,
        "values per cell, wide": wide.n_values / wide.n_cells,
        "files": float(sum(path.is_file() for path in store.path.rglob("*"))),
    }
    return found, facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"cells": 400_000, "genes": 2000, "wide-cells": 60_000, "wide-genes": 12_626, "cache-mib": 64}
    sizes |= {"turns": 7, "steps": 40, "others-cells": 40_000, "others-rows": 4096}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    stored_rows.CACHE_BYTES = given.cache_mib << 20
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        found, facts = works(Path(name), given)
        rows = measure(found, given.turns)
    row_reader = rows["h5py, one dense row per read"]["cells/CPU-s"]
    print(
        f"{'':36}{'cells/CPU-s':>12}{'cells/s':>10}{'reads/cell':>12}{'bytes/cell':>12}{'x row reader':>14}"
    )
    for what, row in rows.items():
        row["x row reader"] = row["cells/CPU-s"] / row_reader
        print(
            f"{what:36}{row['cells/CPU-s']:12,.0f}{row['cells/s']:10,.0f}{row['reads/cell']:12.4f}"
            f"{row['bytes read/cell']:12.0f}{row['x row reader']:14.1f}"
        )
    one_thread = f"windowed, {given.genes} genes"
    facts["2 threads / 1, wall"] = rows["windowed, 2 threads"]["cells/s"] / rows[one_thread]["cells/s"]
    facts["load average"] = os.getloadavg()[0]
    for what, value in facts.items():
        print(f"{what:36}{value:12.2f}")
    if given.out:
        given.out.write_text(json.dumps({"rows": rows, "facts": facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
