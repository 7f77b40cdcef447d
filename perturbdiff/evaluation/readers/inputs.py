"""The cells that `evaluate` reads: predictions and truth, by condition, a few rows at a time.

Beyond a fixed size rows are read when they are asked for, so that memory does not grow with the number of cells.
What the values are is declared, in the file or by an option, and never guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.anndata_reader import AnnDataReader
from perturbdiff.evaluation.readers.cells_by_condition import Cells, Condition, Group, Reader
from perturbdiff.evaluation.readers.condition_rows import Labelled, column_names, read_labels
from perturbdiff.evaluation.readers.store_cells import open_store
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, nearest
from perturbdiff.runtime.files import existing

__all__ = ["Cells", "Condition", "Group", "Reader", "is_store", "open_predictions", "open_truth"]

MADE_BY = (
    "baseline",  # name of the method in this package; models of ours have none
    "baseline_kind",  # 'built-in', 'tool' or 'script'
    "title",
    "version",
    "licence",
    "settings",
    "note",
    "script",
    "recipe",
    "recipe_key",  # models: what determines the predictions but for seeds
    "train_seed",
    "seed",
    "controls",  # how the control cells that cells were made from were chosen: 'shuffled' or 'balanced'
)
"""What a predictions file may say of how its cells were made; it goes to the summary as it is."""

_SCALES = ("log1p", "counts")
_COVARIATES = ("cell_type", "batch")


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
        hint = nearest(label, {c[2] for c in labelled.rows})
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
        made_by=_made_by(reader.declared),
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


def _made_by(declared: dict[str, Any]) -> dict[str, str | int | float | bool]:
    return {k: v for k in MADE_BY if isinstance(v := declared.get(k), str | int | float | bool)}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None
