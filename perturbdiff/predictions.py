"""Predictions: AnnData of predicted cells followed by the real control cells of the same cell type and batch.

``X`` is CSR float32 log1p, or int32 counts. ``obs`` has the categorical columns ``perturbation, cell_type, batch,
source`` ('predicted' or 'control'), ``cell`` (for a control, or a prediction made from one cell, that cell's name;
else empty) and ``set`` (number of the set that a predicted cell was sampled in, unique in the file; -1: in none or
unknown). With counts it also has ``n_counts``, the depth over all genes that were measured, and ``var`` has
``predicted``, false for genes whose counts are those of a control cell.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import zarr
from scipy import sparse

from perturbdiff.conditions.condition import LABELS, SET, conditions_of
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.io import h5_output, opening
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.h5_output import append
from perturbdiff.io.zarr_check import open_group
from perturbdiff.method import SOURCES
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.splits.splits import parts
from perturbdiff.store.store import Store

KIND = "predictions"

DEPTH = "n_counts"
"""Column of obs with the depth of a cell of counts, over all genes that were measured."""
SCALES = ("log1p", "counts")
"""What the values of a predictions file can be."""

NO_SET = -1
"""Value of the column ``set`` for a cell that was sampled in no set."""

_DEFAULTS = {"source": SOURCES[0], "cell": ""}
_CHUNK_VALUES = 1 << 18  # 1 MiB of float32: small enough to read a few cells, large enough to compress
_CHUNK_CELLS = 1 << 16
_ROWS_PER_READ = 4096
_ROWS_PER_WRITE = 1024
NAMED = 20  # conditions that a file names among those its method was trained on
_FEW_VALUES = np.iinfo(np.int32).max
_FORMATS = (".h5ad", ".zarr")


def format_of(path: Path) -> str:
    """Return ``".h5ad"`` or ``".zarr"``, whichever occurs in the file's name.

    Raises
    ------
    UserError
        If neither does.
    """
    for suffix in _FORMATS:
        if suffix in path.suffixes:
            return suffix
    raise UserError(f"{path}: predictions are written as .h5ad or .zarr; give the file one of these endings")


class PredictionWriter:
    """Append blocks of cells to an AnnData file; memory is a block, 1024 cells and at most 13 bytes per cell.

    The bytes of the file depend on the cells and their order, not on the blocks they came in.

    Use as a context manager on the temporary path of a stage (for ``.zarr`` a stage with ``folder=True``): the file is
    complete only when the block ends without an error.

    Parameters
    ----------
    path
        File to write; its name holds ``.h5ad`` or ``.zarr``, e.g. ``.x.h5ad.partial``.
    genes
        Names of the columns.
    method
        What made the predictions.
    control
        Label of control cells.
    target_sum
        Depth the log1p values refer to.
    dataset
        Name of the data set.
    facts
        More entries of ``uns["perturbdiff"]``.
    predicted
        For counts: which genes are predicted, bool [G]; the others have the counts of control cells. None: the values
        are log1p.
    """

    def __init__(
        self,
        path: Path,
        genes: Sequence[str],
        *,
        method: str,
        control: str,
        target_sum: float,
        dataset: str = "",
        facts: Mapping[str, Any] | None = None,
        predicted: np.ndarray | None = None,
    ) -> None:
        self.path, self.genes, self.n_cells, self.n_values = Path(path), list(map(str, genes)), 0, 0
        self.counts = predicted is not None
        self._dtype = np.dtype(np.int32 if self.counts else np.float32)
        self._var = pd.DataFrame(index=pd.Index(self.genes, dtype=object))
        facts = dict(facts or {})
        if predicted is not None:
            self._var["predicted"] = np.asarray(predicted, bool)
            facts |= {"depth": DEPTH, "unpredicted_genes": _unpredicted(predicted)}
        facts = {
            **facts,
            "kind": KIND,
            "scale": SCALES[self.counts],
            "target_sum": float(target_sum),
            "method": method,
            "dataset": dataset,
            "control": control,
        }
        self.facts = dict(sorted(facts.items()))
        self._waiting: list[tuple[sparse.csr_matrix, pd.DataFrame]] = []
        self._codes: dict[str, list[np.ndarray]] = {name: [] for name in (*LABELS, "source")}
        self._categories: dict[str, dict[str, int]] = {name: {} for name in (*LABELS, "source")}
        self._numbered = dict.fromkeys(SOURCES, 0)
        self._root = self._open()

    def _open(self) -> Any:
        if format_of(self.path) == ".h5ad":
            root: Any = h5_output.create(self.path)
        else:
            root = zarr.open_group(self.path, mode="a", zarr_format=3)
        root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = root.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        for name, dtype in (("data", self._dtype), ("indices", np.dtype(np.int32))):
            _create(matrix, name, dtype, _CHUNK_VALUES)
        append(_create(matrix, "indptr", np.int64, _CHUNK_CELLS), np.zeros(1, np.int64))
        obs = root.create_group("obs")
        for name in ("_index", "cell"):
            column = _create(obs, name, str, _CHUNK_CELLS)
            column.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
        self._numbers: dict[str, np.dtype] = {SET: np.dtype(np.int32)}
        self._numbers |= {DEPTH: np.dtype(np.float32)} if self.counts else {}
        for name, dtype in self._numbers.items():
            column = _create(obs, name, dtype, _CHUNK_CELLS)
            column.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        return root

    def append(self, values: sparse.spmatrix | sparse.csr_matrix | np.ndarray, obs: pd.DataFrame) -> None:
        """Add cells.

        Parameters
        ----------
        values
            float [n, G], log1p, ≥ 0; or whole numbers, if the file is one of counts.
        obs
            n rows with ``perturbation, cell_type, batch``, with counts also ``n_counts``; ``source`` (default
            'predicted'), ``cell`` and ``set`` (default -1) may be there.

        Raises
        ------
        ValueError
            If the shapes differ or a value is not finite.
        """
        block = sparse.csr_matrix(values, dtype=self._dtype)
        if block.get_shape() != (len(obs), len(self.genes)):
            raise ValueError(f"{block.get_shape()} values for {len(obs)} cells and {len(self.genes)} genes")
        if not np.isfinite(block.data).all():
            raise ValueError("predicted values are not finite")
        labels = _labelled(obs)
        for name, dtype in self._numbers.items():
            labels[name] = NO_SET if name == SET and SET not in obs else obs[name].to_numpy(dtype)
        self._waiting.append((block, labels))
        self.n_cells += len(obs)
        waiting = sum(len(labels) for _, labels in self._waiting)
        if waiting >= _ROWS_PER_WRITE:
            self._flush(waiting - waiting % _ROWS_PER_WRITE)

    def _flush(self, number: int) -> None:
        """Write the first cells that wait, always the same number at once."""
        values: Any = sparse.vstack([block for block, _ in self._waiting], format="csr")
        obs = pd.concat([labels for _, labels in self._waiting], ignore_index=True)
        for start in range(0, number, _ROWS_PER_WRITE):
            rows = slice(start, min(start + _ROWS_PER_WRITE, number))
            self._write(sparse.csr_matrix(values[rows]), obs.iloc[rows])
        self._waiting = [(sparse.csr_matrix(values[number:]), obs.iloc[number:])]

    def _write(self, block: sparse.csr_matrix, obs: pd.DataFrame) -> None:
        matrix = self._root["X"]
        append(matrix["data"], np.asarray(block.data))
        append(matrix["indices"], np.asarray(block.indices, np.int32))
        append(matrix["indptr"], np.asarray(block.indptr, np.int64)[1:] + self.n_values)
        self._append_obs(obs)
        self.n_values += block.nnz

    def _append_obs(self, obs: pd.DataFrame) -> None:
        for name in (*LABELS, "source"):
            self._encode(name, obs[name].to_numpy(object))
        source = obs["source"].to_numpy(object)
        names = np.empty(len(obs), dtype=object)
        for kind in SOURCES:
            rows = np.flatnonzero(source == kind)
            names[rows] = [f"{kind}-{self._numbered[kind] + i}" for i in range(len(rows))]
            self._numbered[kind] += len(rows)
        append(self._root["obs"]["_index"], names)
        append(self._root["obs"]["cell"], obs["cell"].to_numpy(object))
        for name, dtype in self._numbers.items():
            append(self._root["obs"][name], obs[name].to_numpy(dtype))

    def _encode(self, name: str, labels: np.ndarray) -> None:
        known = self._categories[name]
        distinct, inverse = np.unique(labels.astype(str), return_inverse=True)
        codes = np.array([known.setdefault(label, len(known)) for label in distinct.tolist()], dtype=np.int32)
        small = np.int8 if len(known) < 1 << 7 else np.int16 if len(known) < 1 << 15 else np.int32
        self._codes[name].append(codes[inverse].astype(small))

    def close(self) -> None:
        """Write what is known only at the end: labels, genes, shape and units."""
        try:
            if self._waiting:
                self._flush(sum(len(labels) for _, labels in self._waiting))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*autosharding")
                self._finish()
            if isinstance(self._root, h5py.File):
                h5_output.finish(self._root)
        finally:
            if isinstance(self._root, h5py.File):
                h5_output.abandon(self._root)

    def _finish(self) -> None:
        root = self._root
        # scikit-learn, and with it scanpy, wants row pointers and column numbers of one type.
        if self.n_values <= _FEW_VALUES:
            self._recast("indptr", np.int32, _CHUNK_CELLS)
        else:
            self._recast("indices", np.int64, _CHUNK_VALUES)
        root["X"].attrs["shape"] = [self.n_cells, len(self.genes)]
        for name, codes in self._codes.items():
            anndata.io.write_elem(root["obs"], name, self._categorical(name, codes))
        root["obs"].attrs.update(
            {
                "encoding-type": "dataframe",
                "encoding-version": "0.2.0",
                "_index": "_index",
                "column-order": [*LABELS, "source", "cell", *self._numbers],
            }
        )
        anndata.io.write_elem(root, "var", self._var)
        anndata.io.write_elem(root, "uns", {"perturbdiff": self.facts})
        for name in ("layers", "obsm", "varm", "obsp", "varp"):
            anndata.io.write_elem(root, name, {})

    def _recast(self, name: str, dtype: Any, chunk: int) -> None:
        """Write an array of X again with another type, piece by piece."""
        matrix, temporary = self._root["X"], f"{name}_recast"
        old, new = matrix[name], _create(matrix, temporary, dtype, chunk)
        for start in range(0, old.shape[0], 16 * chunk):
            append(new, np.asarray(old[start : start + 16 * chunk]).astype(dtype))
        del matrix[name]
        if isinstance(matrix, h5py.Group):
            matrix.move(temporary, name)
        else:  # arrays of a Zarr group are folders
            (self.path / "X" / temporary).rename(self.path / "X" / name)

    def _categorical(self, name: str, codes: list[np.ndarray]) -> pd.Categorical:
        labels = np.array(list(self._categories[name]), dtype=object)
        order = np.argsort(labels.astype(str), kind="stable")
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        every = np.concatenate(codes) if codes else np.empty(0, np.int32)
        return pd.Categorical.from_codes(place[every] if len(labels) else every, list(labels[order]))

    def __enter__(self) -> PredictionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif isinstance(self._root, h5py.File):
            h5_output.abandon(self._root)


def _unpredicted(predicted: np.ndarray) -> str:
    """Return the sentence of a file of counts about the genes that its model does not predict."""
    number = int(np.count_nonzero(~np.asarray(predicted, bool)))
    if not number:
        return "none: the model predicts every gene of this file"
    return (
        f"{number} of {len(predicted)} genes (var 'predicted' is false) are not predicted: each predicted cell has the "
        "counts that the control cell it starts from has of them"
    )


def _labelled(obs: pd.DataFrame) -> pd.DataFrame:
    """Return all columns of obs as text, those that were left out with their defaults."""
    complete = obs.assign(**{name: value for name, value in _DEFAULTS.items() if name not in obs})
    return pd.DataFrame({name: complete[name].astype(str).to_numpy(object) for name in (*LABELS, *_DEFAULTS)})


def _create(group: Any, name: str, dtype: Any, chunk: int) -> Any:
    """Create an empty one-dimensional array that grows."""
    if isinstance(group, zarr.Group):
        return group.create_array(name, shape=(0,), dtype=dtype, chunks=(chunk,))
    if dtype is str:
        return group.create_dataset(name, (0,), h5py.string_dtype(), maxshape=(None,), chunks=(4096,))
    return h5_output.growing(group, name, dtype, chunk)


def read_predictions(path: Path, *, backed: bool = False) -> anndata.AnnData:
    """Read a predictions file.

    Parameters
    ----------
    path
        h5ad or zarr that `PredictionWriter` wrote, or any AnnData that declares the same in
        ``uns["perturbdiff"]``.
    backed
        Leave the values on disk (h5ad only).

    Returns
    -------
    AnnData
        Values log1p or counts, as ``uns["perturbdiff"]["scale"]`` says; ``obs`` as described for this module.

    Raises
    ------
    UserError
        If it is not AnnData, declares another scale or lacks a column.
    """
    path = files.existing(Path(path), "predictions")
    kind = format_of(path)
    opening.check(path)
    with explain_damage(path):
        if kind == ".h5ad":
            adata = anndata.read_h5ad(path, backed="r" if backed else None)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".*not recognized as a component of a Zarr hierarchy"
                )
                adata = anndata.io.read_zarr(open_group(path))
    facts = adata.uns.get("perturbdiff", {})
    if facts.get("kind") != KIND:
        raise UserError(
            f"{path}: does not declare itself predictions; set uns['perturbdiff'] = {{'kind': '{KIND}', 'scale': "
            "'log1p', 'control': …} or make it with 'perturbdiff sample' or 'baseline'"
        )
    if facts.get("scale") not in SCALES:
        raise UserError(
            f"{path}: values are declared as {facts.get('scale')!r}; predictions are {' or '.join(SCALES)}"
        )
    missing = [name for name in (*LABELS, "source") if name not in adata.obs]
    if missing:
        raise UserError(f"{path}: obs lacks {listing(missing)}; it has {listing(adata.obs.columns)}")
    wrong = sorted(set(adata.obs["source"].astype(str)) - set(SOURCES))
    if wrong:
        raise UserError(
            f"{path}: obs 'source' has '{wrong[0]}'{nearest(wrong[0], SOURCES)} values: {listing(SOURCES)}"
        )
    return adata


def requests(store: Store, split: pd.DataFrame, part: str = "test") -> pd.DataFrame:
    """Return the conditions of a part that are to be predicted.

    Parameters
    ----------
    store
        Where they are, for their number of cells; no expression is read.
    split
        `data.splits.read_split`.
    part
        'train', 'valid' or 'test'.

    Returns
    -------
    pd.DataFrame
        ``condition`` (id in the store), ``cell_type, batch, perturbation, n_cells``; controls are never among them.

    Raises
    ------
    UserError
        If the part has no perturbed condition.
    """
    conditions = store.conditions
    wanted = (parts(conditions, split, store.path) == part) & ~conditions["is_control"].to_numpy(bool)
    if not wanted.any():
        have = split["part"].value_counts()
        raise UserError(
            f"{store.path}: the split has no perturbed conditions in part '{part}'; nothing to predict; it has "
            f"{listing(f'{number} in {name}' for name, number in have.items())}: choose one by --part, or make a "
            "split that holds some out"
        )
    table = pd.DataFrame(conditions[[*LABELS, "n_cells"]][wanted])
    table.insert(0, "condition", np.flatnonzero(wanted))
    return table.reset_index(drop=True)


def seen_facts(conditions: pd.DataFrame) -> dict[str, Any]:
    """Return what a predictions file says of those of its conditions that its method was trained on.

    Parameters
    ----------
    conditions
        ``cell_type, batch, perturbation`` of each.

    Returns
    -------
    dict
        ``conditions_seen``, their number, and ``first_seen``, the names of the first ones.
    """
    first = [str(condition) for condition in conditions_of(conditions.iloc[:NAMED])]
    return {"conditions_seen": len(conditions), **({"first_seen": first} if first else {})}


def append_controls(writer: PredictionWriter, store: Store, wanted: pd.DataFrame) -> int:
    """Append the real control cells of every (cell type, batch) of ``wanted``, in that order; return their number.

    Parameters
    ----------
    writer
        Its genes decide the columns; those the store lacks are zero. It also decides between log1p and counts.
    store
        Where the controls are.
    wanted
        ``cell_type`` and ``batch`` of the predicted conditions. Groups without controls add none.
    """
    table = store.conditions
    pairs = zip(table["cell_type"].astype(str), table["batch"].astype(str), strict=True)
    control_of = {
        pair: i for i, (pair, real) in enumerate(zip(pairs, table["is_control"], strict=True)) if real
    }
    wanted_groups = zip(wanted["cell_type"].astype(str), wanted["batch"].astype(str), strict=True)
    conditions = [control_of[pair] for pair in dict.fromkeys(wanted_groups) if pair in control_of]
    genes = GeneMap(store.genes, writer.genes, name=str(store.path))
    for i in conditions:
        labels = {name: str(table[name].iloc[i]) for name in ("cell_type", "batch")}
        labels |= {"perturbation": str(writer.facts["control"]), "source": SOURCES[1]}
        first, last = int(table["start"].iloc[i]), int(table["stop"].iloc[i])
        for start in range(first, last, _ROWS_PER_READ):
            rows = slice(start, min(start + _ROWS_PER_READ, last))
            obs = pd.DataFrame({"cell": store.cell_names(rows.start, rows.stop)}).assign(**labels)
            if writer.counts:
                obs[DEPTH] = store.depths(store.row_numbers(rows))
            values = store.counts(rows) if writer.counts else store.expression(rows)
            writer.append(genes.apply(values), obs)
    return int(table["n_cells"].to_numpy(np.int64)[conditions].sum())
