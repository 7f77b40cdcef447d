"""The cells that `evaluate` reads: predictions and truth, by condition, a few rows at a time.

Beyond a fixed size rows are read when they are asked for, so that memory does not grow with the number of cells.
What the values are is declared in the file and never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr

from perturbdiff.config import EvaluateConfig
from perturbdiff.errors import UserError, listing, nearest
from perturbdiff.evaluation.differential import Sparse
from perturbdiff.files import existing

Condition = tuple[str, str, str]  # cell type, batch, perturbation
Group = tuple[str, str]  # cell type, batch

_ALL = "all"  # the label of a covariate that the data do not have
_HELD_VALUES = 1 << 26  # a matrix with at most so many values (0.5 GiB) is held in memory
_GAP = 32  # rows between two wanted ones that are read along rather than skipped


class Reader(Protocol):
    """Rows of log1p values by number."""

    path: Path
    genes: list[str]

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return log1p values [len(rows), G] in the order of ``rows``."""
        ...


@dataclass(frozen=True)
class Cells:
    """Cells of one file or store by condition.

    Attributes
    ----------
    reader
        Where the values are.
    rows
        Row numbers (int64, sorted) of each condition that is not control.
    controls
        Row numbers of the controls of each (cell type, batch).
    contexts
        The context of each condition, where the file knows it.
    control
        Label of the control, if the file says it.
    target_sum
        Depth to which cells were normalised, if the file says it.
    names
        ``method`` and ``dataset``, if the file says them.
    """

    reader: Reader
    rows: Mapping[Condition, np.ndarray]
    controls: Mapping[Group, np.ndarray]
    contexts: Mapping[Condition, str] = field(default_factory=dict)
    control: str | None = None
    target_sum: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)


class AnnDataReader:
    """Rows of an h5ad or zarr file's X, sparse (CSR) or dense.

    A small matrix is held in memory, sparse; of a larger one rows are read from disk as they are asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = existing(path, "AnnData file")
        root = _open(path)
        try:
            obs, var = (cast(pd.DataFrame, ad.io.read_elem(root[name])) for name in ("obs", "var"))
            self.obs, self.genes = obs, [str(g) for g in var.index]
            self.uns = cast(dict[str, Any], ad.io.read_elem(root["uns"])) if "uns" in root else {}
            self._x: Any = root["X"]
            self._sparse = not isinstance(self._x, h5py.Dataset | zarr.Array)
            kind = str(self._x.attrs["encoding-type"]) if self._sparse else "array"
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}: not a readable AnnData file ({error}); it needs obs, var and X"
            ) from None
        if kind not in ("array", "csr_matrix"):
            raise UserError(f"{path}: X is stored as {kind}; write it as CSR (adata.X = adata.X.tocsr())")
        self._pointers = self._x["indptr"][:].astype(np.int64) if self._sparse else None
        self._held: Sparse = None
        values = len(self.obs) * len(self.genes) if self._pointers is None else int(self._pointers[-1])
        if values <= _HELD_VALUES:
            self._held = self._read(0, len(self.obs))

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return X's ``rows`` as CSR in the order given."""
        if self._held is not None:
            return self._held[rows]
        if not len(rows):
            return sp.csr_matrix((0, len(self.genes)), dtype=np.float32)
        wanted, back = np.unique(rows, return_inverse=True)
        parts = []
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > _GAP) + 1):
            block = self._read(int(run[0]), int(run[-1]) + 1)
            parts.append(block if len(run) == block.shape[0] else block[run - run[0]])
        found: Sparse = parts[0] if len(parts) == 1 else sp.vstack(parts, format="csr")
        return found if np.array_equal(wanted, rows) else found[back]

    def _read(self, start: int, stop: int) -> Sparse:
        if self._pointers is None:
            return sp.csr_matrix(self._x[start:stop])
        pointers = self._pointers[start : stop + 1]
        values = slice(int(pointers[0]), int(pointers[-1]))
        arrays = (self._x["data"][values], self._x["indices"][values], pointers - pointers[0])
        return sp.csr_matrix(arrays, shape=(stop - start, len(self.genes)))


def _open(path: Path) -> Any:
    try:
        return zarr.open_group(path, mode="r") if path.is_dir() else h5py.File(path, "r")
    except (OSError, ValueError, FileNotFoundError) as error:
        raise UserError(f"{path}: neither an h5ad file nor an AnnData Zarr folder ({error})") from None


class StoreReader:
    """Rows of a store."""

    def __init__(self, store: Any) -> None:
        self.path, self.genes, self._store = Path(store.path), list(store.genes), store

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return log1p values of the store's ``rows``."""
        return self._store.expression(rows)


def open_predictions(path: Path, config: EvaluateConfig) -> Cells:
    """Open a file of predicted cells and the controls beside them.

    ``obs`` has perturbation, and cell_type and batch where the data have them; ``source`` tells predicted cells
    from controls; without it every cell that does not carry the control's label is predicted.

    Raises
    ------
    UserError
        If the file is no AnnData, its scale is not log1p, a column is missing or a label is empty.
    """
    reader = AnnDataReader(path)
    declared = _declared(reader, config)
    control = declared.get("control")
    if control is None:
        raise UserError(
            f"{path}: uns['perturbdiff']['control'] does not name the control label; "
            "write it there, or name it with --set evaluate.control=LABEL"
        )
    conditions = _conditions(reader, "perturbation", "cell_type", "batch", optional=True)
    is_control = conditions["perturbation"].to_numpy() == control
    if "source" in reader.obs:
        source = reader.obs["source"].astype(str).to_numpy()
        conditions = pd.DataFrame(conditions[(source == "predicted") | is_control])
        is_control = conditions["perturbation"].to_numpy() == control
    rows = _grouped(conditions[~is_control])
    if not rows:
        raise UserError(f"{path}: no predicted cell; every cell is labelled '{control}'")
    names = {k: str(declared[k]) for k in ("method", "dataset") if declared.get(k) is not None}
    return Cells(
        reader,
        rows,
        _control_groups(conditions[is_control]),
        control=str(control),
        target_sum=_number(declared.get("target_sum")),
        names=names,
    )


def open_truth(path: Path, config: EvaluateConfig, *, control: str | None = None) -> Cells:
    """Open the real cells: a store's folder, or an AnnData file with the columns that ``config`` names.

    Parameters
    ----------
    control
        Label of the control where an AnnData file does not say it itself.

    Raises
    ------
    UserError
        As `open_predictions`; and if the context column is missing or varies within a condition.
    """
    existing(path, "truth")
    if path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zgroup")):
        return _open_store(path, config)
    reader = AnnDataReader(path)
    declared = _declared(reader, config)
    label = str(declared.get("control", control))
    conditions = _conditions(reader, config.perturbation_key, config.cell_type_key, config.batch_key)
    contexts = _contexts(conditions, reader.obs, config.context_column, path)
    is_control = conditions["perturbation"].to_numpy() == label
    if not is_control.any():
        hint = nearest(label, conditions["perturbation"].unique())
        raise UserError(f"{path}: no control cell '{label}' in column '{config.perturbation_key}'{hint}")
    return Cells(
        reader,
        _grouped(conditions[~is_control]),
        _control_groups(conditions[is_control]),
        contexts,
        label,
        _number(declared.get("target_sum")),
        {"dataset": str(declared.get("dataset", path.name.split(".")[0]))},
    )


def _open_store(path: Path, config: EvaluateConfig) -> Cells:
    from perturbdiff.data.store import Store

    store = Store(path)
    table = store.conditions
    column = config.context_column
    rows: dict[Condition, np.ndarray] = {}
    controls: dict[Group, np.ndarray] = {}
    contexts: dict[Condition, str] = {}
    extra = None
    if column not in table:
        if column not in (known := list(store.obs().columns)):
            raise _no_context(path, column, known)
        extra = store.obs([column])[column].astype(str).to_numpy()
    for row in table.to_dict("records"):
        condition = (str(row["cell_type"]), str(row["batch"]), str(row["perturbation"]))
        cells = np.arange(int(row["start"]), int(row["stop"]), dtype=np.int64)
        if row["is_control"]:
            controls[condition[:2]] = cells
            continue
        labels = {str(row[column])} if extra is None else set(extra[cells])
        rows[condition], contexts[condition] = cells, _single(labels, condition, column, path)
    reader = StoreReader(store)
    return Cells(
        reader, rows, controls, contexts, store.control, _number(store.target_sum), {"dataset": path.name}
    )


def _declared(reader: AnnDataReader, config: EvaluateConfig) -> dict[str, Any]:
    """Return ``uns["perturbdiff"]`` after checking that the values are declared to be log1p."""
    declared = dict(reader.uns.get("perturbdiff") or {})
    if config.scale == "log1p":
        declared.setdefault("scale", "log1p")
    if config.control is not None:
        declared.setdefault("control", config.control)
    if "scale" not in declared:
        raise UserError(
            f"{reader.path}: uns['perturbdiff']['scale'] does not say what the values are; "
            "if they are log1p of normalised counts, say so there or with --set evaluate.scale=log1p"
        )
    if str(declared["scale"]) != "log1p":
        raise UserError(
            f"{reader.path}: values are declared as '{declared['scale']}', metrics are defined on log1p values; "
            "convert them and declare uns['perturbdiff']['scale'] = 'log1p'"
        )
    return declared


def _conditions(
    reader: AnnDataReader,
    perturbation: str,
    cell_type: str | None,
    batch: str | None,
    *,
    optional: bool = False,
) -> pd.DataFrame:
    """Return cell_type, batch and perturbation of each row; ``optional`` columns may be absent."""
    columns: dict[str, Any] = {}
    for name, key in (("cell_type", cell_type), ("batch", batch), ("perturbation", perturbation)):
        if key is None or (optional and name != "perturbation" and key not in reader.obs):
            columns[name] = np.full(len(reader.obs), _ALL)
            continue
        if key not in reader.obs:
            hint = nearest(key, reader.obs.columns) or f"; columns: {listing(reader.obs.columns)}"
            raise UserError(f"{reader.path}: no obs column '{key}'{hint}")
        if empty := int(reader.obs[key].isna().sum()):
            raise UserError(
                f"{reader.path}: {empty} cells have no label in obs column '{key}'; label or drop them"
            )
        columns[name] = reader.obs[key].astype(str).to_numpy()
    return pd.DataFrame(columns)


def _contexts(conditions: pd.DataFrame, obs: pd.DataFrame, column: str, path: Path) -> dict[Condition, str]:
    if column not in conditions and column not in obs:
        raise _no_context(path, column, ["cell_type", "batch", *obs.columns])
    labels = (conditions if column in conditions else obs)[column].astype(str).to_numpy()
    rows = _grouped(conditions)
    return {c: _single(set(labels[cells]), c, column, path) for c, cells in rows.items()}


def _no_context(path: Path, column: str, known: list[str]) -> UserError:
    hint = nearest(column, known) or f"; columns: {listing(dict.fromkeys(known))}"
    return UserError(f"{path}: no column '{column}' to take contexts from (evaluate.context_column){hint}")


def _single(labels: set[str], condition: Condition, column: str, path: Path) -> str:
    if len(labels) != 1:
        raise UserError(
            f"{path}: cells of condition {'|'.join(condition)} lie in several contexts of '{column}' "
            f"({listing(sorted(labels))}); choose a column that is constant within a condition"
        )
    return next(iter(labels))


def _grouped(conditions: Any) -> dict[Condition, np.ndarray]:
    """Return the index labels (row numbers) of each condition, sorted."""
    groups = conditions.groupby(["cell_type", "batch", "perturbation"], sort=True).groups
    return {tuple(map(str, key)): np.sort(np.asarray(rows, np.int64)) for key, rows in groups.items()}  # type: ignore[misc]


def _control_groups(conditions: Any) -> dict[Group, np.ndarray]:
    return {(c, b): rows for (c, b, _), rows in _grouped(conditions).items()}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None
