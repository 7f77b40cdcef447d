"""Write a simulated experiment as AnnData, piece by piece, with bytes that do not show how it was computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from perturbdiff.io import h5_output
from perturbdiff.runtime.progress import track
from perturbdiff.simulation.cell_plan import Plan
from perturbdiff.simulation.simulated_counts import Counts
from perturbdiff.simulation.true_effects import CONTROL, Truth

_PIECE = 1 << 16  # values and rows written to the file at once


class _Growing:
    """A dataset that grows by pieces of one size, so that the file does not depend on how values arrive."""

    def __init__(self, group: h5py.Group, name: str, dtype: Any) -> None:
        self.data = group.create_dataset(
            name, (0,), dtype, maxshape=(None,), chunks=(_PIECE,), compression="gzip", compression_opts=1,
            shuffle=True,
        )  # fmt: skip
        self._waiting = np.empty(0, dtype)

    def add(self, values: NDArray[Any]) -> None:
        self._waiting = np.concatenate([self._waiting, values.astype(self._waiting.dtype)])
        whole = len(self._waiting) // _PIECE * _PIECE
        for start in range(0, whole, _PIECE):
            self._append(self._waiting[start : start + _PIECE])
        self._waiting = self._waiting[whole:]

    def close(self) -> None:
        self._append(self._waiting)

    def _append(self, values: NDArray[Any]) -> None:
        end = self.data.shape[0]
        self.data.resize((end + len(values),))
        self.data[end:] = values


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
    """Write an obs column from its ``values`` per set, which are codes if there are ``categories``."""
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
