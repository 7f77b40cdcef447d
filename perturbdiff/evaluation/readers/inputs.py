"""The cells that `evaluate` reads: predictions and truth, by condition, a few rows at a time.

Beyond a fixed size rows are read when they are asked for, so that memory does not grow with the number of cells.
What the values are is declared, in the file or by an option, and never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import LABELS, Condition, Group
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.anndata_reader import AnnDataReader
from perturbdiff.evaluation.readers.cells_by_condition import ALL, Cells, Sparse
from perturbdiff.io.columns import MISSING, Column, Numbering, Texts, row_ranges, small_dtype
from perturbdiff.method import Method
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.files import existing

_SOURCES = ("predicted", "control")
_SCALES = ("log1p", "counts")
_COVARIATES = ("cell_type", "batch")


class StoreReader:
    """Rows of a store, log1p."""

    def __init__(self, store: Any) -> None:
        self.path, self.genes, self._store = Path(store.path), list(store.genes), store

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return log1p values of the store's ``rows``."""
        return self._store.expression(rows)

    def depths(self) -> np.ndarray:
        """Return the depth of each cell over all genes of its input."""
        return np.asarray(self._store.n_counts, np.float64)

    def cell_name(self, row: int) -> str:
        """Return the name of a cell."""
        return str(self._store.cell_names(row, row + 1)[0])


def open_store(path: Path, config: EvaluateConfig) -> Cells:
    """Open a store as the truth.

    Raises
    ------
    UserError
        If it is no finished store, or the context column is missing or varies within a condition.
    """
    from perturbdiff.store.store import Store

    store = Store(path)
    table = store.conditions
    covariates = frozenset(name for name in ("cell_type", "batch") if set(table[name]) != {ALL})
    column = config.context_column or ("cell_type" if "cell_type" in covariates else None)
    labels = _labels(store, column) if column is not None else None
    rows: dict[Condition, np.ndarray] = {}
    controls: dict[Group, np.ndarray] = {}
    contexts: dict[Condition, str] = {}
    for i, row in enumerate(table.to_dict("records")):
        condition = Condition(*(str(row[label]) for label in LABELS))
        cells = np.arange(int(row["start"]), int(row["stop"]), dtype=np.int64)
        if row["is_control"]:
            controls[condition.group] = cells
            continue
        rows[condition] = cells
        if column is not None and labels is not None:
            contexts[condition] = single(labels[i], condition, column, path)
    return Cells(
        StoreReader(store),
        rows,
        controls,
        contexts,
        store.control,
        covariates,
        target_sum=float(store.target_sum),
        names={"dataset": path.name},
    )


def _labels(store: Any, column: str) -> list[list[str]]:
    """Return the contexts that each condition's cells lie in."""
    table = store.conditions
    if column in table:
        return [[str(label)] for label in table[column]]
    codes, names = pd.factorize(store.obs([column])[column])
    found = []
    for start, stop in zip(table["start"], table["stop"], strict=True):
        found.append([str(names[k]) if k >= 0 else "" for k in np.unique(codes[start:stop])])
    return found


def single(labels: list[str], condition: Condition, column: str, path: Path) -> str:
    """Return the one context of a condition.

    Raises
    ------
    UserError
        If there are several.
    """
    if len(labels) != 1:
        raise UserError(
            f"{path}: cells of condition {condition} lie in several contexts of '{column}' "
            f"({listing(sorted(labels))}); choose a column that is constant within a condition"
        )
    return labels[0]


@dataclass(frozen=True)
class Labelled:
    """The rows of a file by condition.

    Attributes
    ----------
    rows
        Ascending row numbers (int64) of each condition, controls among them.
    contexts
        The context of each condition; empty without a context column.
    """

    rows: Mapping[Condition, np.ndarray]
    contexts: Mapping[Condition, str]

    def perturbed(self, control: str) -> dict[Condition, np.ndarray]:
        """Return the rows of the conditions that are not the control."""
        return {c: rows for c, rows in self.rows.items() if c.perturbation != control}

    def controls(self, control: str) -> dict[Group, np.ndarray]:
        """Return the rows of the controls of each (cell type, batch)."""
        return {c.group: rows for c, rows in self.rows.items() if c.perturbation == control}


def read_labels(
    reader: AnnDataReader,
    columns: Mapping[str, str | None],
    *,
    context: str | None = None,
    control: str | None = None,
) -> Labelled:
    """Return the rows of each condition of a file.

    Parameters
    ----------
    reader
        The file.
    columns
        The obs column of ``perturbation``, ``cell_type`` and ``batch``; None: all cells have the label 'all'.
    context
        obs column of the contexts, or ``cell_type``, ``batch``, ``perturbation`` for one of these.
    control
        For predictions: with a column ``source`` of 'predicted' and 'control', cells of the latter count only if
        they carry this label.

    Raises
    ------
    UserError
        If a cell has no label, or a condition lies in several contexts.
    """
    texts = {name: Texts() for name in columns}
    opened = {name: reader.column(key) for name, key in columns.items() if key is not None}
    source = None if control is None else _source(reader)
    sources, contexts, condition = Texts(), Numbering(), Numbering()
    codes = np.empty(reader.num_cells, np.int32)
    missing: dict[str, tuple[int, int]] = {}
    for start, stop in row_ranges(reader.num_cells):
        found = {}
        for name in columns:
            found[name] = _codes(opened.get(name), texts[name], start, stop)
            _note(missing, name, found[name], start)
        part = condition(contexts(found["cell_type"], found["batch"]), found["perturbation"])
        if source is not None and control is not None:
            predicted = source.codes(start, stop, sources) == sources.number("predicted")
            part[~predicted & (found["perturbation"] != texts["perturbation"].number(control))] = MISSING
        codes[start:stop] = part
    for name, (count, first) in missing.items():
        raise UserError(
            f"{reader.path}: {count} cells have no label in obs column '{columns[name]}' (first: "
            f"'{reader.cell_name(first)}'); label or drop them"
        )
    names = _names(condition, contexts, texts)
    return Labelled(_grouped(codes, names), _contexts(reader, codes, names, context, columns))


def _source(reader: AnnDataReader) -> Column | None:
    """Return the column that tells predicted cells from controls; another column may have its name."""
    if "source" not in reader.columns:
        return None
    column, texts = reader.column("source"), Texts(_SOURCES)
    for start, stop in row_ranges(reader.num_cells):
        column.codes(start, stop, texts)
    return column if len(texts.names) == len(_SOURCES) else None


def _names(condition: Numbering, contexts: Numbering, texts: Mapping[str, Texts]) -> list[Condition]:
    """Return the labels of each condition, by its number."""
    context_of, perturbation_of = condition.pairs()
    types, batches = contexts.pairs()
    cell_type, batch, perturbation = (texts[n].names for n in ("cell_type", "batch", "perturbation"))
    return [
        Condition(perturbation[p], cell_type[types[c]], batch[batches[c]])
        for c, p in zip(context_of, perturbation_of, strict=True)
    ]


def _codes(column: Column | None, texts: Texts, start: int, stop: int) -> np.ndarray:
    """Return the number of each cell's label."""
    if column is None:
        return np.full(stop - start, texts.number(ALL), np.int32)
    return column.codes(start, stop, texts)


def _note(missing: dict[str, tuple[int, int]], name: str, codes: np.ndarray, start: int) -> None:
    """Remember how many cells have no label, and the first."""
    if (none := codes == MISSING).any():
        count, first = missing.get(name, (0, start + int(np.argmax(none))))
        missing[name] = count + int(none.sum()), first


def _grouped(codes: np.ndarray, names: list[Condition]) -> dict[Condition, np.ndarray]:
    """Return the ascending rows of each condition, by name."""
    counts = np.zeros(len(names) + 1, np.int64)
    for start, stop in row_ranges(len(codes)):
        counts += np.bincount(codes[start:stop] - MISSING, minlength=len(counts))
    order = np.argsort(codes.astype(small_dtype(len(names))), kind="stable")  # by radix, in linear time
    ends = np.cumsum(counts)
    rows = np.split(order, ends)[1:]  # first come cells of no condition
    here = [k for k in range(len(names)) if len(rows[k])]
    return {names[k]: rows[k] for k in sorted(here, key=lambda k: (names[k].group, names[k].perturbation))}


def _contexts(
    reader: AnnDataReader,
    codes: np.ndarray,
    names: list[Condition],
    context: str | None,
    columns: Mapping[str, str | None],
) -> dict[Condition, str]:
    """Return the context of each condition."""
    if context is None:
        return {}
    for label in LABELS:
        if context in (label, columns[label]):
            return {condition: getattr(condition, label) for condition in names}
    texts, pairs = Texts(), Numbering()
    column = reader.column(context)
    for start, stop in row_ranges(len(codes)):
        labels = column.codes(start, stop, texts)
        if (none := labels == MISSING).any():
            cell = reader.cell_name(start + int(np.argmax(none)))
            raise UserError(
                f"{reader.path}: cell '{cell}' has no label in obs column '{context}' (--context-col)"
            )
        pairs(codes[start:stop], labels)
    found: dict[int, list[str]] = {k: [] for k in range(len(names))}
    for condition, label in zip(*pairs.pairs(), strict=True):
        found[int(condition)].append(texts.names[label])
    return {names[k]: single(own, names[k], context, reader.path) for k, own in found.items() if own}


def column_names(
    reader: AnnDataReader, wanted: Mapping[str, str | None], defaults: Mapping[str, str | None], *, own: bool
) -> dict[str, str | None]:
    """Return which column of obs has each label.

    A column with another name than the default was asked for and must be there; one with the default's name may
    be missing, except that of the perturbation.

    Parameters
    ----------
    wanted, defaults
        The column of ``perturbation``, ``cell_type`` and ``batch``; None: cells have none.
    own
        Take the columns that our own predictions have where the wanted ones are not there.
    """
    found: dict[str, str | None] = {}
    for name, key in wanted.items():
        if key is None or key in reader.columns:
            found[name] = key
        elif own and name in reader.columns:
            found[name] = name
        elif name == "perturbation" or key != defaults[name]:
            reader.column(key)  # raises
        else:
            found[name] = None
    return found


def open_predictions(path: Path, config: EvaluateConfig, *, own: bool = True) -> Cells:
    """Open a file of predicted cells and, if it has them, the controls beside them.

    ``source`` tells predicted cells from controls; without it every cell that does not carry the control's label is
    predicted.

    Parameters
    ----------
    own
        Where ``obs`` lacks a column that ``config`` names, take that of our own predictions: ``perturbation``, and
        ``cell_type`` and ``batch`` where the data have them. Not with a store as the truth: it has these columns
        itself, so that what ``config`` names can only be the predictions'.

    Raises
    ------
    UserError
        If the file is no AnnData, its scale or control is not known, a column is missing or a label is empty.
    """
    if provenance.beside(existing(path, "predictions"), "manifest").is_file():
        provenance.verify(path)
    reader = AnnDataReader(path)
    control, scale = _control(reader, config), _scale(reader, config)
    if control is None:
        raise UserError(
            f"{path}: uns['perturbdiff']['control'] does not name the control label; name it with --control LABEL"
        )
    columns = _columns(reader, config, own=own)
    labelled = read_labels(reader, columns, control=control)
    rows = labelled.perturbed(control)
    if not rows:
        raise UserError(f"{path}: no predicted cell; every cell is labelled '{control}'")
    names = {k: str(reader.declared[k]) for k in ("method", "dataset") if reader.declared.get(k) is not None}
    return _cells(reader, labelled, columns, control, scale, names=names)


def open_truth(path: Path, config: EvaluateConfig, *, control: str | None = None) -> Cells:
    """Open the real cells: a store's folder, or an AnnData file with the columns that ``config`` names.

    Parameters
    ----------
    control
        Label of the control where neither an AnnData file nor ``config`` says it.

    Raises
    ------
    UserError
        As `open_predictions`; and if the context column is missing or varies within a condition.
    """
    path = existing(Path(path), "truth")
    if is_store(path):
        return open_store(path, config)
    reader = AnnDataReader(path)
    label, scale = _control(reader, config) or control, _scale(reader, config)
    if label is None:
        raise UserError(
            f"{path}: uns['perturbdiff']['control'] does not name the control label; name it with --control LABEL"
        )
    columns = _columns(reader, config, own=False)
    context = config.context_column or ("cell_type" if columns["cell_type"] is not None else None)
    labelled = read_labels(reader, columns, context=context)
    if not labelled.controls(label):
        hint = nearest(label, {c.perturbation for c in labelled.rows})
        raise UserError(f"{path}: no control cell '{label}' in column '{columns['perturbation']}'{hint}")
    names = {"dataset": str(reader.declared.get("dataset") or path.name.split(".")[0])}
    return _cells(reader, labelled, columns, label, scale, names=names, complete=True)


def is_store(path: Path) -> bool:
    """Return whether a path is a store's folder, and not an AnnData file."""
    return path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zgroup"))


def _cells(
    reader: AnnDataReader,
    labelled: Labelled,
    columns: dict[str, str | None],
    control: str,
    scale: str,
    **more: Any,
) -> Cells:
    rows, controls = labelled.perturbed(control), labelled.controls(control)
    reader.arrange([*controls.values(), *rows.values()])
    return Cells(
        reader,
        rows,
        controls,
        {c: label for c, label in labelled.contexts.items() if c in rows},
        control,
        frozenset(name for name in _COVARIATES if columns[name] is not None),
        scale,
        _number(reader.declared.get("target_sum")),
        trained_on=_trained_on(reader.declared),
        made_by=Method.from_json(reader.declared),
        **more,
    )


def _columns(reader: AnnDataReader, config: EvaluateConfig, *, own: bool) -> dict[str, str | None]:
    """Return which column has each label."""
    fields = {"perturbation": "perturbation_key", "cell_type": "cell_type_key", "batch": "batch_key"}
    wanted = {name: getattr(config, key) for name, key in fields.items()}
    defaults = {name: EvaluateConfig.model_fields[key].default for name, key in fields.items()}
    return column_names(reader, wanted, defaults, own=own)


def _control(reader: AnnDataReader, config: EvaluateConfig) -> str | None:
    """Return the control's label as the file or the user says it."""
    declared = reader.declared.get("control", config.control)
    if declared is not None and config.control not in (None, str(declared)):
        raise UserError(
            f"{reader.path}: declares its control to be '{declared}', not '{config.control}' (--control)"
        )
    return None if declared is None else str(declared)


def _scale(reader: AnnDataReader, config: EvaluateConfig) -> str:
    """Return what the values are as the file or, if it does not, the user says it."""
    given = None if config.scale == "declared" else config.scale
    scale = str(reader.declared.get("scale", given))
    if scale == "None":
        raise UserError(
            f"{reader.path}: uns['perturbdiff']['scale'] does not say what the values are; say it with --scale log1p "
            "(log1p of normalised counts) or --scale counts"
        )
    if scale not in _SCALES:
        raise UserError(
            f"{reader.path}: values are declared as '{scale}'; metrics are defined on log1p values, so that "
            f"uns['perturbdiff']['scale'] must be one of {', '.join(_SCALES)}"
        )
    return scale


def _trained_on(declared: dict[str, Any]) -> tuple[int, tuple[str, ...]] | None:
    """Return how many of the predicted conditions the model was trained on, and the first of them."""
    number = _number(declared.get("conditions_seen"))
    return None if number is None else (int(number), tuple(map(str, declared.get("first_seen", ()))))


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None
