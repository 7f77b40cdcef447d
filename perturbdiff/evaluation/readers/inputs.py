"""The cells that `evaluate` reads: predictions and truth, by condition, a few rows at a time.

Rows of a large file are read when they are needed, so that memory does not grow with the number of cells. Whether
values are counts or log1p is declared, in the file or by an option, and never guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.conditions.condition import LABELS
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cell_sources import SAMPLED, LabelledRows, numbers_of, read_labelled_rows
from perturbdiff.evaluation.readers.cells_by_condition import COVARIATES, Cells
from perturbdiff.io.recognise import COUNTS, confusion, what_is
from perturbdiff.io.row_file import RowFile
from perturbdiff.method import Method
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, nearest
from perturbdiff.runtime.files import existing

_PREDICTIONS = "a predictions file"
_SCALES = ("log1p", "counts")


def check_roles(predictions: Path, truth: Path) -> None:
    """Refuse files that were given in each other's place.

    Raises
    ------
    UserError
        If the predictions are something else, or the truth is a file of predictions.
    """
    found = {
        path: what_is(existing(path, role)) for path, role in ((predictions, "predictions"), (truth, "truth"))
    }
    order = "the order is PREDICTIONS TRUTH"
    if found[truth] == _PREDICTIONS and found[predictions] != _PREDICTIONS:
        raise UserError(
            f"{truth}: this is a predictions file, and {predictions} is {found[predictions] or 'none'}: did you swap "
            f"them? {order}"
        )
    if found[truth] == _PREDICTIONS:
        raise UserError(
            f"{truth}: this is a predictions file too; give the store or the real cells as the truth"
        )
    if found[predictions] not in (_PREDICTIONS, *COUNTS, ""):
        raise UserError(f"{predictions}: {confusion(predictions, _PREDICTIONS)}; {order}")
    if found[truth] not in ("a store", *COUNTS, ""):
        raise UserError(f"{truth}: {confusion(truth, 'a store or a file of real cells')}; {order}")


def open_predictions(path: Path, config: EvaluateConfig, *, ours: bool = True) -> Cells:
    """Open a file of predicted cells and, if it has them, the controls beside them.

    ``source`` tells predicted cells from controls; without it every cell that does not carry the control's label is
    predicted.

    Parameters
    ----------
    ours
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
    file = RowFile(path)
    control, scale = _control(file, config), _scale(file, config)
    if control is None:
        raise _no_control(path)
    columns = _columns(file, config, ours=ours)
    labelled = read_labelled_rows(file, columns, control=control)
    rows = labelled.perturbed(control)
    if not rows:
        raise UserError(f"{path}: no predicted cell; every cell is labelled '{control}'")
    names = {k: str(file.declared[k]) for k in ("method", "dataset") if file.declared.get(k) is not None}
    return _cells(file, labelled, columns, control, scale, names=names, sets=_sampled_sets(file, config))


def open_truth(path: Path, config: EvaluateConfig, *, control: str | None = None) -> Cells:
    """Open the real cells: a store's folder, or an AnnData file with the columns that ``config`` names.

    Parameters
    ----------
    control
        Label of the control where neither an AnnData file nor ``config`` says it.

    Raises
    ------
    UserError
        As `open_predictions`; and if the context column is missing or varies within a condition, or genes are
        chosen that the truth lacks.
    """
    path = existing(Path(path), "truth")
    if what_is(path) == _PREDICTIONS:
        raise UserError(f"{path}: this is a predictions file; give the store or the real cells as the truth")
    if is_store(path):
        from perturbdiff.evaluation.readers.cell_sources import open_store

        return open_store(path, config)
    if config.genes is not None:
        raise UserError(f"--genes: {path} is no store; give an AnnData file that has only the genes to score")
    file = RowFile(path)
    label, scale = _control(file, config) or control, _scale(file, config)
    if label is None:
        raise _no_control(path)
    columns = _columns(file, config, ours=False)
    context = config.context_column or ("cell_type" if columns["cell_type"] is not None else None)
    labelled = read_labelled_rows(file, columns, context=context)
    if not labelled.controls(label):
        hint = nearest(label, {c.perturbation for c in labelled.rows})
        raise UserError(f"{path}: no control cell '{label}' in column '{columns['perturbation']}'{hint}")
    names = {"dataset": str(file.declared.get("dataset") or path.name.split(".")[0])}
    sets = None if config.set_column is None else numbers_of(file, config.set_column, "--set-col")
    return _cells(file, labelled, columns, label, scale, names=names, complete=True, sets=sets)


def is_store(path: Path) -> bool:
    """Return whether a path is a store's folder, and not an AnnData file."""
    return path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zgroup"))


def settings_of(config: EvaluateConfig, shard: tuple[int, int] = (0, 1), **more: Any) -> dict[str, Any]:
    """Return what the manifest says was set; a whole run does not mention shards, and no file's folder is told."""
    part = {} if shard[1] == 1 else {"shard": list(shard)}
    names = {key: path.name for key, path in files_of(config).items()}
    return {**config.model_dump(), **names, **more, **part}


def files_of(config: EvaluateConfig) -> dict[str, Path]:
    """Return the table of target genes and the list of genes to score as inputs, as far as there are any."""
    named = {"targets": config.targets, "genes": config.genes}
    return {key: Path(path) for key, path in named.items() if path is not None}


def _cells(
    file: RowFile,
    labelled: LabelledRows,
    columns: dict[str, str | None],
    control: str,
    scale: str,
    **more: Any,
) -> Cells:
    rows, controls = labelled.perturbed(control), labelled.controls(control)
    file.arrange([*controls.values(), *rows.values()])
    return Cells(
        file,
        rows,
        controls,
        {c: label for c, label in labelled.contexts.items() if c in rows},
        control,
        frozenset(name for name in COVARIATES if columns[name] is not None),
        scale,
        _number(file.declared.get("target_sum")),
        trained_on=_trained_on(file.declared),
        made_by=Method.from_json(file.declared),
        depths=_depths(file) if scale == "counts" else None,
        **more,
    )


def _sampled_sets(file: RowFile, config: EvaluateConfig) -> np.ndarray | None:
    """Return the sets of predicted cells: by our own column, or by the one that says so in the truth."""
    if SAMPLED in file.columns and file.open_column(SAMPLED).dtype.kind in "iu":
        return numbers_of(file, SAMPLED)
    return numbers_of(file, config.set_column) if config.set_column in file.columns else None


def _depths(file: RowFile) -> np.ndarray | None:
    """Return the depth of each cell, float64, if the file says which column of obs has it.

    Raises
    ------
    UserError
        If there is no such column of positive numbers.
    """
    name = file.declared.get("depth")
    if name is None:
        return None
    column = file.open_column(str(name), "uns['perturbdiff']['depth']")
    depths = column.values(0, file.n_cells)
    if depths.dtype.kind not in "iuf" or not (np.isfinite(depths) & (depths >= 0)).all():
        raise UserError(f"{file.path}: obs '{name}' must have the depth of each cell, a number not below 0")
    return depths.astype(np.float64)


def _columns(file: RowFile, config: EvaluateConfig, *, ours: bool) -> dict[str, str | None]:
    """Return which column of obs has each label; None: cells have none.

    A column that the user named must be there; one with the default's name may be missing, except that of the
    perturbation. With ``ours``, the columns that our own predictions have are taken
    where the wanted ones are not there.
    """
    columns: dict[str, str | None] = {}
    for label in LABELS:
        setting = f"{label}_key"
        key = getattr(config, setting)
        if key is None or key in file.columns:
            columns[label] = key
        elif ours and label in file.columns:
            columns[label] = label
        elif label == "perturbation" or key != EvaluateConfig.model_fields[setting].default:
            file.open_column(key)  # raises
        else:
            columns[label] = None
    return columns


def _no_control(path: Path) -> UserError:
    return UserError(
        f"{path}: uns['perturbdiff']['control'] does not name the control label; name it with --control LABEL"
    )


def _control(file: RowFile, config: EvaluateConfig) -> str | None:
    """Return the control's label, as the file or the user says."""
    declared = file.declared.get("control", config.control)
    if declared is not None and config.control not in (None, str(declared)):
        raise UserError(
            f"{file.path}: declares its control to be '{declared}', not '{config.control}' (--control)"
        )
    if declared is None and config.definition == "cell-eval2":
        return "non-targeting"  # its default
    return None if declared is None else str(declared)


def _scale(file: RowFile, config: EvaluateConfig) -> str:
    """Return whether values are counts or log1p, as the file says or, if it does not, the user."""
    option = None if config.scale == "declared" else config.scale
    if option is None and config.definition == "cell-eval2":
        option = "counts"  # nothing else is in its rules, and every value is checked
    scale = str(file.declared.get("scale", option))
    if scale == "None":
        raise UserError(
            f"{file.path}: uns['perturbdiff']['scale'] does not say what the values are; say it with --scale log1p "
            "(log1p of normalised counts) or --scale counts"
        )
    if scale not in _SCALES:
        raise UserError(
            f"{file.path}: values are declared as '{scale}'; metrics are defined on log1p values, so that "
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
