"""A simulated screen and predictions of it, as two h5ad files: what the benchmark of evaluation reads.

    python benchmarks/evaluated_cells.py FOLDER [--cells 16600] [--controls 4600] [--perturbations 60]
                                         [--genes 2000] [--density 0.1] [--dense] [--counts] [--seed 0]

Counts are negative binomial (dispersion 1) around the mean of the gene, times the perturbation's effect (a tenth of the
genes) and the cell's depth; they are normalised to 10,000 by the cell's whole depth, a whole number, and log1p-ed, so
that equal small counts tie as in real data. About a tenth of the values is not zero. The real cells lie in random
order; the predicted ones perturbation by perturbation, the same real controls behind them. A predicted effect is the
real one, weaker and with noise. Whatever the order, a cell depends on nothing but its number, so that a million cells
are written with little memory. X is CSR, or with ``--dense`` one array, as many models write their predictions. With
``--counts`` values are the counts themselves, and a perturbation has the name of a gene, its target.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import h5py
import numba
import numpy as np
import pandas as pd
import scipy.sparse as sp
from full_transcriptome import append

BLOCK = 4000
CHUNK = 65_536
CONTROL = "control"
DENSITY = 0.1
DEPTH = 6000
"""Typical counts of a whole cell."""


@dataclass(frozen=True)
class Screen:
    """How large it is."""

    cells: int
    controls: int
    perturbations: int
    genes: int = 2000
    dense: bool = False
    seed: int = 0
    density: float = DENSITY
    counts: bool = False

    def sizes(self) -> np.ndarray:
        """Return cells of the control, then of each perturbation."""
        rest = np.full(self.perturbations, (self.cells - self.controls) // self.perturbations)
        rest[: (self.cells - self.controls) % self.perturbations] += 1
        return np.concatenate([[self.controls], rest])

    def path(self, folder: Path, side: str) -> Path:
        """Return where ``side`` (real or predicted) of it lies."""
        sizes = (self.perturbations, self.genes, self.cells, self.controls, self.seed)
        kind = ("dense" if self.dense else "csr") + ("-counts" if self.counts else "")
        kind += f"-{self.density:g}" if self.density != DENSITY else ""
        return folder / ("-".join(map(str, sizes)) + f"-{kind}-{side}.h5ad")


@numba.njit(nogil=True, cache=True)
def draw(
    rate: np.ndarray,
    label: np.ndarray,
    depth: np.ndarray,
    keys: np.ndarray,
    counts: bool,
    lengths: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
) -> int:
    """Write the cells' stored values one after another, counts or log1p; return how many."""
    end = 0
    for i in range(len(label)):
        state = (keys[i] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
        begin = end
        for j in range(rate.shape[1]):
            mean = rate[label[i], j] * depth[i]
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            uniform = np.float64(state >> np.uint64(40)) * 2.0**-24
            if uniform * (1 + mean) > 1:  # a zero has probability 1 / (1 + mean)
                rest = (np.float64(state & np.uint64(0xFFFFFF)) + 1) * 2.0**-24
                count = 1 + int(np.log(rest) / np.log(mean / (1 + mean)))
                columns[end] = j
                values[end] = count if counts else np.log1p(count * 1e4 / depth[i])
                end += 1
        lengths[i] = end - begin
    return end


def rates(screen: Screen) -> tuple[np.ndarray, np.ndarray]:
    """Return mean counts per count of depth, label by gene, of the real and of the predicted cells."""
    rng = np.random.default_rng(screen.seed)
    base = rng.lognormal(0, 1.3, screen.genes)
    low, high = 1e-9, 1.0
    for _ in range(60):  # the factor at which the wanted share of values is not zero
        middle = np.sqrt(low * high)
        mean = base * middle * DEPTH
        low, high = (low, middle) if (mean / (1 + mean)).mean() > screen.density else (middle, high)
    shape = (screen.perturbations, screen.genes)
    changed = rng.random(shape) < 0.1
    effect = rng.normal(0, 0.7, shape) * changed
    guess = 0.7 * effect + rng.normal(0, 0.3, shape) * (changed | (rng.random(shape) < 0.05))
    none = np.zeros((1, screen.genes))
    real, predicted = (base * low * np.exp(np.concatenate([none, e])) for e in (effect, guess))
    return real.astype(np.float32), predicted.astype(np.float32)


def write(path: Path, screen: Screen, rate: np.ndarray, *, predicted: bool) -> None:
    """Write one side; the controls of both are the same cells."""
    sizes = screen.sizes()
    label = np.repeat(np.arange(len(sizes)), sizes)
    number = np.arange(screen.cells)
    rng = np.random.default_rng([screen.seed, 1])
    depth = np.maximum(500, np.rint(DEPTH * rng.lognormal(0, 0.35, screen.cells)))
    order = np.roll(number, -sizes[0]) if predicted else rng.permutation(screen.cells)
    other = np.uint64(screen.cells) * np.uint64(predicted)  # predicted cells are other cells
    names = [CONTROL, *(f"{'g' if screen.counts else 'p'}{k:04}" for k in range(1, len(sizes)))]
    obs = pd.DataFrame(
        {"perturbation": pd.Categorical.from_codes(label[order].astype(np.int16), names)},
        index=[f"cell{k}" for k in order],
    )
    var = pd.DataFrame(index=[f"g{k:04}" for k in range(screen.genes)])
    said = {"scale": "counts"} if screen.counts else {"scale": "log1p", "target_sum": 1e4}
    uns = {"perturbdiff": {**said, "control": CONTROL}}
    partial = path.with_suffix(".partial")
    empty = None if screen.dense else sp.csr_matrix((screen.cells, screen.genes), dtype=np.float32)
    ad.AnnData(empty, obs, var, uns, shape=None if empty is not None else (len(obs), len(var))).write_h5ad(
        partial
    )
    with h5py.File(partial, "r+") as file:
        put, finish = _dense(file, screen) if screen.dense else _sparse(file)
        columns, values = np.empty(BLOCK * screen.genes, np.int32), np.empty(BLOCK * screen.genes, np.float32)
        for start in range(0, screen.cells, BLOCK):
            rows = order[start : start + BLOCK]
            keys = np.uint64(screen.seed << 40) + rows.astype(np.uint64)
            keys += np.where(label[rows] > 0, other, np.uint64(0))
            lengths = np.empty(len(rows), np.int64)
            size = draw(rate, label[rows], depth[rows], keys, screen.counts, lengths, columns, values)
            put(start, lengths, columns[:size], values[:size])
        finish()
    partial.rename(path)


def _dense(file: h5py.File, screen: Screen) -> tuple[Callable[..., None], Callable[[], None]]:
    if "X" in file:
        del file["X"]
    into = file.create_dataset("X", (screen.cells, screen.genes), "f4")
    into.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})

    def put(start: int, lengths: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        block = np.zeros((len(lengths), screen.genes), np.float32)
        block[np.repeat(np.arange(len(lengths)), lengths), columns] = values
        into[start : start + len(lengths)] = block

    return put, lambda: None


def _sparse(file: h5py.File) -> tuple[Callable[..., None], Callable[[], None]]:
    for name, dtype in (("data", "f4"), ("indices", "i4")):
        del file["X"][name]
        file["X"].create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(CHUNK,))
    pointers = [np.zeros(1, np.int64)]

    def put(_: int, lengths: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        append(file["X/indices"], columns)
        append(file["X/data"], values)
        pointers.append(pointers[-1][-1] + np.cumsum(lengths))

    def finish() -> None:
        del file["X/indptr"]
        kind = (
            np.int32 if pointers[-1][-1] < 2**31 else np.int64
        )  # that of the columns, or every slice converts them
        file["X"].create_dataset("indptr", data=np.concatenate(pointers).astype(kind))

    return put, finish


def simulate(folder: Path, screen: Screen) -> tuple[Path, Path]:
    """Write what is not there yet; return the files of the real and of the predicted cells."""
    paths = screen.path(folder, "real"), screen.path(folder, "predicted")
    for path, rate, predicted in zip(paths, rates(screen), (False, True), strict=True):
        if not path.exists():
            write(path, screen, rate, predicted=predicted)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    defaults = {"cells": 16_600, "controls": 4600, "perturbations": 60, "genes": 2000, "seed": 0}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--density", type=float, default=DENSITY)
    for name in ("dense", "counts"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for path in simulate(given.folder, Screen(**{k: v for k, v in vars(given).items() if k != "folder"})):
        print(path)


if __name__ == "__main__":
    main()
