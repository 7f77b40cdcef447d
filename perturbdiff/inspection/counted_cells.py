"""Files of counts as they are before anything is stored: what is wrong is collected, and cells are counted by label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import ALL, LABELS, SORTED_BY, dose_label, sort_conditions
from perturbdiff.config.settings import DataConfig
from perturbdiff.inspection.findings import Findings
from perturbdiff.io.cell_filter import unknown_values
from perturbdiff.io.columns import MISSING, Numbering, Texts, row_ranges
from perturbdiff.io.counts import CountsFile
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.label_tables import LabelTable
from perturbdiff.runtime.errors import UserError, listing, nearest

_SETTINGS = {
    "perturbation": "--pert-col or data.perturbation_key",
    "cell_type": "--cell-type-col or data.cell_type_key; none if there is none",
    "batch": "--batch-col or data.batch_key; none if there is none",
    "dose": "data.dose_key",
    "context": "split.context_column",
}
_CONTROL_DOSE = "0"


class LookedAt(CountsFile):
    """A file of counts that is opened although its genes may be wrong.

    Attributes
    ----------
    fault
        What is wrong with its genes or its shape; empty if nothing is.
    """

    def __init__(self, path: Path, config: DataConfig, table: LabelTable | None) -> None:
        self.fault = ""
        super().__init__(path, config, Path(), table)

    def _check(self, layer: str, *, may_be_empty: bool) -> None:
        try:
            super()._check(layer, may_be_empty=may_be_empty)
        except UserError as error:
            self.fault = str(error)

    def some_values(self, place: str | None = None) -> np.ndarray:
        """Return some of the stored values (float64), by default those that are read."""
        with explain_damage(self.path):
            return self._layout.some_values(place or self.config.layer)


def count_cells(
    files: Sequence[LookedAt], config: DataConfig, context: str | None, found: Findings
) -> pd.DataFrame | None:
    """Count the cells of each condition of all files, reading some rows of obs at a time.

    Parameters
    ----------
    files
        The files.
    config
        What their columns mean.
    context
        obs column to hold out by, if it is another one than those of cell type and batch.
    found
        Receives what is wrong with columns and labels, all of it.

    Returns
    -------
    pd.DataFrame or None
        Columns ``cell_type, batch, perturbation, n_cells, is_control`` and, with ``context``, ``context``; None if a
        file lacks a column.
    """
    keys = {label: getattr(config, f"{label}_key") for label in LABELS}
    keys |= {"dose": config.dose_key if config.perturbation_key else None, "context": context}
    asked = [*((_SETTINGS[label], key) for label, key in keys.items() if key is not None)]
    kept = [("data.set_key", config.set_key), *(("data.extra_obs", name) for name in config.extra_obs)]
    asked += [(setting, key) for setting, key in kept if key is not None]
    lacking = [file for file in files if not _has_columns(file, asked, found)]
    lacking += [file for file in files if not _can_filter(file, found)]
    if lacking:
        return None
    texts = {label: Texts() for label in keys}
    texts["dose"].number(_CONTROL_DOSE)
    pairs = [Numbering() for _ in range(len(keys) - 1)]
    counts = np.zeros(0, np.int64)
    for file in files:
        columns = {label: file.open_column(key) for label, key in keys.items() if key is not None}
        missing, left_out = dict.fromkeys(columns, 0), 0
        for start, stop in row_ranges(file.n_cells):
            kept = file.kept(start, stop)
            left_out += int((~kept).sum())
            codes = {label: column.codes(start, stop, texts[label]) for label, column in columns.items()}
            for label in columns:
                missing[label] += int(((codes[label] == MISSING) & kept).sum())
                codes[label] = np.where(kept, codes[label], np.int32(MISSING))
            number = _numbers(codes, texts, config, pairs, stop - start)
            number = np.where(kept, number, MISSING)
            here = np.bincount(number[number >= 0], minlength=len(counts))
            here[: len(counts)] += counts
            counts = here
        _tell_missing(file, keys, missing, config, found)
        if config.keep is not None:
            found.fact(f"{file.path}: data.keep leaves out {left_out:,} of {file.n_cells:,} cells")
    filters = [file.kept_cells for file in files if file.kept_cells is not None]
    for text in unknown_values(filters) if filters else ():
        found.problem(text)
    return _table(texts, pairs, counts, config, found, with_context=context is not None)


def _has_columns(file: LookedAt, asked: Sequence[tuple[str, str]], found: Findings) -> bool:
    """Tell which columns a file lacks, with the settings that ask for them."""
    lacking = [(setting, key) for setting, key in asked if key not in file.columns]
    for setting, key in lacking:
        hint = nearest(key, file.columns) or f"; columns: {listing(file.columns, 20)}"
        found.problem(f"{file.path}: no obs column '{key}' ({setting}){hint}")
    return not lacking


def _can_filter(file: LookedAt, found: Findings) -> bool:
    """Tell whether a file has the columns that ``data.keep`` asks for."""
    try:
        file.kept(0, 0)
    except UserError as error:
        found.problem(str(error))
        return False
    return True


def _numbers(
    codes: dict[str, np.ndarray],
    texts: dict[str, Texts],
    config: DataConfig,
    pairs: list[Numbering],
    length: int,
) -> np.ndarray:
    """Return the number of each cell's combination of labels, `MISSING` where one is missing."""
    fixed = {"perturbation": config.control, "dose": _CONTROL_DOSE}
    every = [
        codes.get(label, np.full(length, texts[label].number(fixed.get(label, ALL)), np.int32))
        for label in texts
    ]
    if "dose" in codes:
        place = list(texts).index("dose")
        control = every[list(texts).index("perturbation")] == texts["perturbation"].number(config.control)
        every[place] = np.where(control, texts["dose"].number(_CONTROL_DOSE), every[place])
    number = every[0]
    for pair, code in zip(pairs, every[1:], strict=True):
        number = pair(number, code)
    return number


def _tell_missing(
    file: LookedAt, keys: dict[str, str | None], missing: dict[str, int], config: DataConfig, found: Findings
) -> None:
    for label, count in missing.items():
        if not count or label == "dose":
            continue
        text = f"{file.path}: obs column '{keys[label]}' has {count:,} missing values"
        if config.missing_labels == "drop":
            found.warning(f"{text}; these cells are dropped")
        else:
            found.problem(f"{text}; give these cells a label, or set data.missing_labels=drop")


def _table(
    texts: dict[str, Texts],
    pairs: list[Numbering],
    counts: np.ndarray,
    config: DataConfig,
    found: Findings,
    *,
    with_context: bool,
) -> pd.DataFrame:
    """Return the conditions that the numbers stand for."""
    number, codes = np.arange(len(counts)), {}
    for pair, label in zip(reversed(pairs), reversed(list(texts)[1:]), strict=True):
        first, second = pair.pairs()
        codes[label] = second[number]
        number = first[number]
    codes[next(iter(texts))] = number
    labels = {label: np.array(texts[label].names, object)[codes[label]] for label in texts}
    if config.dose_key is not None and config.perturbation_key is not None:
        labels["perturbation"] = _with_doses(labels["perturbation"], labels["dose"], config, found)
    names = [*SORTED_BY, *(["context"] if with_context else [])]
    table = pd.DataFrame({name: labels[name] for name in names}).assign(n_cells=counts)
    table = table.groupby(names, sort=False)["n_cells"].sum().reset_index()
    table = sort_conditions(table, config.control)
    return table.assign(is_control=table["perturbation"] == config.control)


def _with_doses(agents: np.ndarray, doses: np.ndarray, config: DataConfig, found: Findings) -> np.ndarray:
    labels, wrong = [], set()
    for agent, dose in zip(agents, doses, strict=True):
        try:
            labels.append(agent if agent == config.control else dose_label(agent, float(dose)))
        except ValueError:
            wrong.add(str(dose))
            labels.append(agent)
    if wrong:
        found.problem(
            f"obs column '{config.dose_key}' (data.dose_key) holds what is no number: {listing(sorted(wrong))}; give "
            "doses as numbers"
        )
    return np.array(labels, object)
