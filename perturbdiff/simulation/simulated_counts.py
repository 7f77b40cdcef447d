"""Negative-binomial counts of simulated cells, drawn cell by cell and written piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anndata
import h5py
import numba
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from perturbdiff.io import h5_output
from perturbdiff.runtime.progress import track
from perturbdiff.simulation.true_effects import CONTROL, Plan, Truth

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_INVERSES = 1.0 / np.arange(1.0, 4097.0)
_PIECE = 1 << 16  # values and rows written to the file at once


class Counts(NamedTuple):
    """A block of cells in CSR form: non-zeros per cell ``[n]`` int64, ``indices`` and ``data`` int32."""

    per_cell: NDArray[np.int64]
    indices: NDArray[np.int32]
    data: NDArray[np.int32]


@numba.njit(nogil=True, inline="always")
def _hash(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(nogil=True, inline="always")
def _uniform(key: Any, position: Any) -> Any:
    """Return number ``position`` of stream ``key``, in (0, 1)."""
    return (
        np.float64(_hash(key + np.uint64(position) * _GOLDEN) >> np.uint64(11)) + 0.5
    ) / 9007199254740992.0


@numba.njit(nogil=True, inline="always")
def _normal(key: Any, position: Any) -> Any:
    radius = np.sqrt(-2.0 * np.log(_uniform(key, 2 * position)))
    return radius * np.cos(2.0 * np.pi * _uniform(key, 2 * position + 1))


@numba.njit(nogil=True, inline="always")
def _cell_key(seed: Any, cell: Any) -> Any:
    return _hash(_hash(np.uint64(seed) * _GOLDEN + np.uint64(1)) ^ (np.uint64(cell) * _GOLDEN))


@numba.njit(nogil=True)
def _negative_binomial(u: float, mean: float, dispersion: float, inverses: Any) -> int:
    """Return the smallest k whose cumulative probability exceeds ``u``."""
    size = 1.0 / dispersion
    odds = dispersion * mean
    p = np.exp(-size * np.log1p(odds))
    step = odds / (1.0 + odds)
    total, k = p, 0
    while u >= total:
        inverse = inverses[k] if k < len(inverses) else 1.0 / (k + 1.0)
        p *= step * (k + size) * inverse
        k += 1
        total += p
        if p < 1e-18 and k > mean:  # the tail that double precision cannot tell from 1
            break
    return k


@numba.njit(nogil=True)
def draw_escapes(seed: int, cells: Any, probability: Any) -> Any:
    """Return which of the ``cells`` [n] escape their perturbation, with ``probability`` [n] each."""
    escaped = np.zeros(len(cells), np.bool_)
    for i in range(len(cells)):
        escaped[i] = _uniform(_cell_key(seed, cells[i]), 0) < probability[i]
    return escaped


@numba.njit(nogil=True)
def _draw(
    seed: int,
    cells: Any,
    rows: Any,
    rates: Any,
    programmes: Any,
    log_depth: Any,
    depth_spread: float,
    dispersion: Any,
    inverses: Any,
    per_cell: Any,
    indices: Any,
    data: Any,
) -> int:
    kinds, genes = programmes.shape
    rate = np.empty(genes, np.float32)
    filled = 0
    first = np.uint64(2 * kinds + 4)  # positions 0 and 1: escape; 2, 3: depth; then activities; then genes
    for i in range(len(cells)):
        key = _cell_key(seed, cells[i])
        rate[:] = 0.0
        for k in range(kinds):
            activity = np.float32(_normal(key, k + 2))
            for j in range(genes):
                rate[j] += activity * programmes[k, j]
        whole = 0.0
        for j in range(genes):
            rate[j] = rates[rows[i], j] * np.exp(rate[j])
            whole += np.float64(rate[j])
        scale = np.exp(log_depth[rows[i]] + depth_spread * _normal(key, 1)) / whole
        start = filled
        for j in range(genes):
            mean = rate[j] * scale
            u = _uniform(key, first + np.uint64(j))
            if u < 1.0 - mean:  # P(0) >= exp(-mean) >= 1 - mean
                continue
            k = _negative_binomial(u, mean, dispersion[j], inverses)
            if k > 0:
                indices[filled] = j
                data[filled] = k
                filled += 1
        per_cell[i] = filled - start
    return filled


def draw_counts(
    seed: int,
    cells: NDArray[np.int64],
    rows: NDArray[np.int64],
    rates: NDArray[np.float32],
    programmes: NDArray[np.float32],
    *,
    depth: NDArray[np.float64],
    depth_spread: float,
    dispersion: NDArray[np.float64],
) -> Counts:
    """Draw the counts of a block of cells.

    Parameters
    ----------
    seed
        Seed of the experiment.
    cells
        Cell numbers ``[n]``; a cell's draw depends on its number and the parameters alone.
    rows
        Row of ``rates`` ``[n]`` that holds each cell's population.
    rates
        Expected expression ``[U, G]`` of populations of cells, in any unit.
    programmes
        Log-expression loadings ``[K, G]`` of the activities in which cells of a population differ; activities
        are standard normal.
    depth
        Median ``[U]`` of the expected depth of a population's cells, in counts.
    depth_spread
        Standard deviation of a cell's log depth about it.
    dispersion
        Negative-binomial φ ``[G]``, positive.

    Returns
    -------
    Counts
        The block in CSR form, genes in increasing order.
    """
    capacity = len(cells) * rates.shape[1]
    per_cell = np.zeros(len(cells), np.int64)
    indices, data = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    filled = _draw(
        seed, cells, rows, rates, programmes, np.log(depth), float(depth_spread), dispersion, _INVERSES,
        per_cell, indices, data,
    )  # fmt: skip
    return Counts(per_cell, indices[:filled], data[:filled])


class _Growing:
    """A dataset that grows by pieces of one size, so that the file does not depend on how values arrive."""

    def __init__(self, group: h5py.Group, name: str, dtype: Any) -> None:
        self.data = h5_output.growing(group, name, dtype, _PIECE)
        self._waiting = np.empty(0, dtype)

    def add(self, values: NDArray[Any]) -> None:
        self._waiting = np.concatenate([self._waiting, values.astype(self._waiting.dtype)])
        whole = len(self._waiting) // _PIECE * _PIECE
        for start in range(0, whole, _PIECE):
            h5_output.append(self.data, self._waiting[start : start + _PIECE])
        self._waiting = self._waiting[whole:]

    def close(self) -> None:
        h5_output.append(self.data, self._waiting)


def write_counts(
    path: Path, blocks: Iterable[Counts], truth: Truth, plan: Plan, *, mean: NDArray[np.float64], seed: int
) -> int:
    """Write the experiment's cells to an h5ad file as they come.

    Parameters
    ----------
    path
        File to write.
    blocks
        All cells in order, in blocks of any size.
    truth, plan
        What the cells are.
    mean
        Expected count ``[G]`` of each gene, noted in ``var``.
    seed
        Noted in ``uns``.

    Returns
    -------
    int
        Number of non-zero values.
    """
    n_cells, n_genes = len(plan.set_of_cell), len(truth.genes)
    with h5_output.writing(path) as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        group.attrs["shape"] = np.array([n_cells, n_genes], np.int64)
        names = ("data", "indices", "indptr")
        data, indices, indptr = (
            _Growing(group, n, t) for n, t in zip(names, ("i4", "i4", "i8"), strict=True)
        )
        indptr.add(np.zeros(1, np.int64))
        end = 0
        with track("simulate", n_cells) as progress:
            for block in blocks:
                data.add(block.data)
                indices.add(block.indices)
                indptr.add(end + np.cumsum(block.per_cell))
                end += len(block.data)
                progress.advance(len(block.per_cell))
        for dataset in (data, indices, indptr):
            dataset.close()
        _write_obs(file.create_group("obs"), truth, plan)
        var = pd.DataFrame({"mean": mean, "dispersion": truth.dispersion}, index=pd.Index(truth.genes))
        uns = {"control": CONTROL, "simulated": True, "seed": seed}
        empty = {name: {} for name in ("layers", "obsm", "varm", "obsp", "varp")}
        for name, value in {"var": var, "uns": uns, **empty}.items():
            anndata.io.write_elem(file, name, value)
    return end


def _write_obs(group: h5py.Group, truth: Truth, plan: Plan) -> None:
    """Write obs in pieces; a DataFrame of it would take some hundred bytes per cell."""
    perturbations = truth.perturbations
    of_set = perturbations.iloc[plan.of_set("perturbation")]
    columns: Mapping[str, tuple[NDArray[Any], list[str] | None]] = {
        "perturbation": (plan.of_set("perturbation"), perturbations["perturbation"].to_list()),
        "agent": _coded(of_set["agent"]),
        "kind": _coded(of_set["kind"]),
        "dose": (of_set["dose"].to_numpy(np.float64), None),
        "cell_type": (plan.of_set("cell_type"), truth.cell_types),
        "batch": (plan.of_set("batch"), truth.batches),
        "well": _coded("well_" + (plan.sets["well"] + 1).astype(str)),
        "latent": (plan.sets["latent"].to_numpy(np.float32), None),
    }
    group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"})
    group.attrs["column-order"] = np.array(list(columns), dtype=object)
    n_cells, digits = len(plan.set_of_cell), len(str(len(plan.set_of_cell)))
    index = group.create_dataset("_index", (n_cells,), h5py.string_dtype(), chunks=(min(_PIECE, n_cells),))
    index.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    for start in range(0, n_cells, _PIECE):
        end = min(start + _PIECE, n_cells)
        index[start:end] = [f"cell_{i:0{digits}d}" for i in range(start, end)]
    for name, (values, categories) in columns.items():
        _write_column(group, name, values, categories, plan.set_of_cell)


def _coded(values: pd.Series) -> tuple[NDArray[Any], list[str]]:
    codes, categories = pd.factorize(values)
    return codes, [str(c) for c in categories]


def _write_column(
    group: h5py.Group,
    name: str,
    values: NDArray[Any],
    categories: list[str] | None,
    set_of_cell: NDArray[np.int32],
) -> None:
    """Write an obs column from the ``values`` of each set, which are codes if there are ``categories``."""
    if categories is not None:
        group = group.create_group(name)
        group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
        anndata.io.write_elem(group, "categories", np.array(categories, dtype=object))
        values = values.astype(np.min_scalar_type(-len(categories)))  # anndata wants signed codes
        name = "codes"
    column = _Growing(group, name, values.dtype)
    column.data.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    for start in range(0, len(set_of_cell), _PIECE):
        column.add(values[set_of_cell[start : start + _PIECE]])
    column.close()
