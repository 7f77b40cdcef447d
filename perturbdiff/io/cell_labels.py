"""From obs columns to conditions: cell type, batch and perturbation (with its dose) of every cell."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import (
    ALL,
    LABELS,
    RESERVED,
    SET,
    SORTED_BY,
    dose_label,
    sort_conditions,
)
from perturbdiff.config.settings import DataConfig
from perturbdiff.io.cell_filter import unknown_values
from perturbdiff.io.columns import MISSING, Column, Numbering, Texts, joined, row_ranges, small_dtype
from perturbdiff.io.counts import CountsFile, Inputs
from perturbdiff.io.damage import plain_name
from perturbdiff.io.input_file import InputFile
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.large_arrays import long_array
from perturbdiff.runtime.seeds import generator

logger = logging.getLogger(__name__)

_RANDOM_BATCHES = 71  # first word of the seed


@dataclass(frozen=True)
class Labels:
    """The conditions of the inputs' cells.

    Attributes
    ----------
    conditions
        One row per condition in store order: ``cell_type, batch, perturbation, n_cells``.
    codes
        Row of ``conditions`` for every cell, in input order, int32 (4 bytes per cell).
    perturbations
        One row per perturbation: ``perturbation, agent, dose`` (nan without a dose).
    without_label
        Number of cells that lack a label and are dropped (``data.missing_labels=drop``). Their code is -1.
    left_out
        Number of cells that ``data.keep`` does not keep. Their code is -1, too.
    sets
        The set of every cell, in input order, where ``data.set_key`` is given.
    """

    conditions: pd.DataFrame
    codes: np.ndarray
    perturbations: pd.DataFrame
    without_label: int = 0
    left_out: int = 0
    sets: pd.Categorical | None = None


def read_labels(inputs: Inputs) -> Labels:
    """Return the condition of every cell of ``inputs``, reading obs only, some rows at a time.

    Raises
    ------
    UserError
        If a column is missing or has missing values (unless ``missing_labels`` is ``drop``), a dose is not a number,
        no cell is a control, the sets are the perturbations, or ``keep`` does not fit the columns.
    """
    _check_set_key(inputs.config)
    numbers = _Numbers()
    codes = long_array(inputs.n_cells, np.dtype(np.int32))
    sets, left_out = None if inputs.config.set_key is None else long_array(len(codes), codes.dtype), 0
    for number, (file, offset) in enumerate(zip(inputs.files, inputs.offsets, strict=False)):
        reader = _ConditionReader(file, inputs.config, numbers, number)
        for start, stop in row_ranges(file.n_cells):
            codes[offset + start : offset + stop] = reader.read(start, stop)
            if sets is not None:
                sets[offset + start : offset + stop] = reader.sets
        left_out += reader.left_out
        reader.check()
    _check_kept(inputs, left_out)
    table = numbers.table(inputs.config)
    labels = list(SORTED_BY)
    # several numbers can have one label: doses written in several ways
    conditions = sort_conditions(pd.DataFrame(table[labels].drop_duplicates()), inputs.config.control)
    index = pd.MultiIndex.from_frame(pd.DataFrame(conditions[labels]))
    place = index.get_indexer(pd.MultiIndex.from_frame(pd.DataFrame(table[labels]))).astype(np.int32)
    n_cells = np.zeros(len(conditions), np.int64)
    place = np.append(place, np.int32(MISSING))  # the last place is that of the code -1
    for start, stop in row_ranges(len(codes)):
        part = codes[start:stop] = place[codes[start:stop]]
        n_cells += np.bincount(part[part >= 0], minlength=len(n_cells))
    conditions["n_cells"] = n_cells
    _check_control(conditions, inputs)
    without = len(codes) - int(n_cells.sum()) - left_out
    return Labels(
        conditions, codes, _perturbations(table), without, left_out, _sorted_sets(sets, numbers.sets)
    )


def _check_kept(inputs: Inputs, left_out: int) -> None:
    """Tell how many cells ``data.keep`` leaves out; refuse values that no cell has, and a filter that keeps none."""
    filters = [file.kept_cells for file in inputs.files if file.kept_cells is not None]
    if not filters:
        return
    names = listing([file.path.name for file in inputs.files], 3)
    if unknown := unknown_values(filters):
        raise UserError(f"{names}: {'; '.join(unknown)}")
    if left_out == inputs.n_cells:
        raise UserError(f"{names}: data.keep keeps no cell: {inputs.config.keep}")
    logger.info("%s: data.keep leaves out %d of %d cells", names, left_out, inputs.n_cells)


def _check_set_key(config: DataConfig) -> None:
    if config.set_key is not None and config.set_key == config.perturbation_key:
        raise UserError(
            f"data.set_key: '{config.set_key}' is the perturbation (--pert-col); name the column that says which cells "
            "were treated together, e.g. the well, plate, guide or replicate"
        )


def _sorted_sets(codes: np.ndarray | None, texts: Texts) -> pd.Categorical | None:
    """Return the sets of all cells with their labels in order, in as few bytes as hold them."""
    if codes is None:
        return None
    names = sorted(texts.names)
    rank = np.append(pd.Index(names).get_indexer(pd.Index(texts.names)), MISSING).astype(
        small_dtype(len(names))
    )
    return pd.Categorical.from_codes(rank[codes], names)  # type: ignore[arg-type]


class _Numbers:
    """Numbers of texts and of their combinations, the same in all files."""

    def __init__(self) -> None:
        self.agent, self.dose, self.cell_type, self.batch = Texts(), Texts(), Texts(), Texts()
        self.sets = Texts()
        self.perturbations, self.contexts, self.conditions = Numbering(), Numbering(), Numbering()

    def table(self, config: DataConfig) -> pd.DataFrame:
        """Return the labels of each combination, by its number, with ``agent`` and ``dose``."""
        context, perturbation = self.conditions.pairs()
        agents, doses = self.perturbations.pairs()
        types, batches = self.contexts.pairs()
        labels, numbers = [], []
        for agent, dose in zip((self.agent.names[k] for k in agents), doses, strict=True):
            with_dose = config.dose_key is not None and agent != config.control
            numbers.append(float(self.dose.names[dose]) if with_dose else np.nan)
            labels.append(dose_label(agent, numbers[-1]) if with_dose else agent)
        names = {
            "cell_type": np.array(self.cell_type.names, object)[types[context]],
            "batch": np.array(self.batch.names, object)[batches[context]],
            "perturbation": np.array(labels, object)[perturbation],
            "agent": np.array(self.agent.names, object)[agents[perturbation]],
            "dose": np.array(numbers)[perturbation],
        }
        return pd.DataFrame(names)


class LabelCodes:
    """Numbers the labels of one file's cells, some rows at a time, and remembers which cells have none.

    Parameters
    ----------
    file
        The file.
    keys
        obs column of each label; None: all cells have the label of ``constants``.
    texts
        Texts of each label, which may be those of other files as well.
    constants
        Label of all cells where there is no column, by default `ALL`.
    roles
        Setting that names each column, for messages.

    Raises
    ------
    UserError
        If the file lacks a column.
    """

    def __init__(
        self,
        file: InputFile,
        keys: Mapping[str, str | None],
        texts: Mapping[str, Texts],
        *,
        constants: Mapping[str, str] | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        self._file, self._keys, self._texts, self._constants = file, keys, texts, constants or {}
        self._columns, faults = {}, []
        for label, key in keys.items():
            try:
                if key is not None:
                    self._columns[label] = file.open_column(key, (roles or {}).get(label, ""))
            except UserError as error:
                faults.append(str(error).removeprefix(f"{file.path}: "))
        if faults:
            raise UserError(f"{file.path}: {'; '.join(faults)}")
        self._missing: dict[str, tuple[int, int]] = {}

    def read(self, label: str, start: int, stop: int, kept: np.ndarray | None = None) -> np.ndarray:
        """Return the number of each cell's text, int32; `MISSING` where there is none or the cell is not ``kept``."""
        texts = self._texts[label]
        if label not in self._columns:
            return np.full(stop - start, texts.number(self._constants.get(label, ALL)), np.int32)
        codes = self._columns[label].codes(start, stop, texts)
        missing = (codes == MISSING) if kept is None else (codes == MISSING) & kept
        if missing.any():
            count, first = self._missing.get(label, (0, start + int(np.argmax(missing))))
            self._missing[label] = count + int(missing.sum()), first
        return codes if kept is None else np.where(kept, codes, np.int32(MISSING))

    def check(self, *, drop: bool = False) -> None:
        """Raise a `UserError` if a cell that was read has no label, or log their number if such cells are dropped."""
        for label, (count, row) in self._missing.items():
            found = f"{self._file.path}: obs column '{self._keys[label]}' has {count} missing values"
            if drop:
                logger.warning("%s; these cells are dropped (data.missing_labels=drop)", found)
                continue
            raise UserError(
                f"{found} (first: cell '{self._file.cell_name(row)}'); give these cells a label, or set "
                "data.missing_labels=drop"
            )


class _ConditionReader:
    """Reads the labels and doses of one file's cells as numbers of their combinations.

    Attributes
    ----------
    sets
        After `read`, the number of the set of each of these cells, int32, where there is a column for it.
    left_out
        Number of cells that were read and are not kept (``data.keep``).
    """

    def __init__(self, file: CountsFile, config: DataConfig, numbers: _Numbers, place: int) -> None:
        self._file, self._config, self._numbers, self._place = file, config, numbers, place
        keys = {label: getattr(config, f"{label}_key") for label in LABELS}
        roles = {
            "perturbation": "--pert-col or data.perturbation_key",
            "cell_type": "--cell-type-col or data.cell_type_key; none if the data have none",
            "batch": "--batch-col or data.batch_key; none if the data have none",
        }
        texts = {"perturbation": numbers.agent, "cell_type": numbers.cell_type, "batch": numbers.batch}
        if config.set_key is not None:
            keys[SET], texts[SET], roles[SET] = config.set_key, numbers.sets, "--set-col or data.set_key"
        self._labels = LabelCodes(file, keys, texts, constants={"perturbation": config.control}, roles=roles)
        self.sets, self.left_out = np.empty(0, np.int32), 0
        self._dose: Column | None = None
        if config.dose_key is not None and config.perturbation_key is not None:
            self._dose = file.open_column(config.dose_key, "data.dose_key")
        self._wrong_doses, self._first_wrong = 0, ("", 0)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the number of each cell's combination of labels, int32; `MISSING` where one is missing."""
        numbers, kept = self._numbers, None
        if self._config.keep is not None:
            kept = self._file.kept(start, stop)
            self.left_out += int((~kept).sum())
        agent = self._labels.read("perturbation", start, stop, kept)
        dose = self._doses(agent, start, stop)
        contexts = numbers.contexts(
            self._labels.read("cell_type", start, stop, kept), self._batches(start, stop, kept)
        )
        found = numbers.conditions(contexts, numbers.perturbations(agent, dose))
        if self._config.set_key is None:
            return found
        self.sets = self._labels.read(SET, start, stop, kept)
        return np.where(self.sets == MISSING, np.int32(MISSING), found)

    def _batches(self, start: int, stop: int, kept: np.ndarray | None) -> np.ndarray:
        """Return the number of each cell's batch, which is drawn if the recipe asks for random batches."""
        if not self._config.random_batches or self._config.batch_key is not None:
            return self._labels.read("batch", start, stop, kept)
        names = [f"random_{k}" for k in range(1, self._config.random_batches + 1)]
        numbers = np.array([self._numbers.batch.number(name) for name in names], np.int32)
        drawn = generator(_RANDOM_BATCHES, self._place, start).integers(0, len(names), stop - start)
        return numbers[drawn]

    def _doses(self, agent: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the number of each cell's dose; that of a control is 0, whatever the file says."""
        column, texts = self._dose, self._numbers.dose
        if column is None:
            return np.zeros(len(agent), np.int32)
        codes = column.codes(start, stop, texts)
        control = agent == self._numbers.agent.number(self._config.control)
        number = np.array([*(_number(t) for t in texts.names), np.nan])
        wrong = ~np.isfinite(number[codes]) & ~control & (agent != MISSING)
        if wrong.any():
            if not self._wrong_doses:
                row = int(np.argmax(wrong))
                text = texts.names[codes[row]] if codes[row] != MISSING else ""
                self._first_wrong = text, start + row
            self._wrong_doses += int(wrong.sum())
        return np.where(control | wrong, 0, codes).astype(np.int32)

    def check(self) -> None:
        """Raise a `UserError` if a label was missing (unless such cells are dropped) or a dose was no number."""
        self._labels.check(drop=self._config.missing_labels == "drop")
        if self._wrong_doses:
            text, row = self._first_wrong
            raise UserError(
                f"{self._file.path}: obs column '{self._config.dose_key}' is not a number for {self._wrong_doses} "
                f"treated cells (first: {text!r}, cell '{self._file.cell_name(row)}'); give doses as numbers"
            )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def read_conditions(inputs: Sequence[Path], config: DataConfig, obs: Sequence[Path] = ()) -> pd.DataFrame:
    """Return the conditions of raw inputs before a store exists, reading obs only.

    Parameters
    ----------
    inputs
        h5ad files, Zarr stores or 10x h5 files.
    config
        Names of the columns.
    obs
        Tables of cell labels: none, one for all inputs or one for each.

    Returns
    -------
    pd.DataFrame
        Columns ``cell_type, batch, perturbation``, the configured ``extra_obs`` (str) and ``n_cells``: one
        row per condition, and several where an extra column has several values within it.
    """
    with Inputs(inputs, config, Path(), obs) as opened:
        labels = read_labels(opened)
        names = extra_names(config)
        if not names:
            return labels.conditions
        columns = [extra_column(opened, name) for name in names]
    texts, pairs, n_cells = [Texts() for _ in names], [Numbering() for _ in names], np.zeros(0, np.int64)
    for start, stop in row_ranges(len(labels.codes)):
        number = labels.codes[start:stop]
        for column, text, pair in zip(columns, texts, pairs, strict=True):
            number = pair(number, _codes(column.iloc[start:stop], text))
        counts = np.bincount(number[number >= 0], minlength=len(n_cells))
        counts[: len(n_cells)] += n_cells
        n_cells = counts
    number, values = np.arange(len(n_cells)), {}
    for name, text, pair in zip(reversed(names), reversed(texts), reversed(pairs), strict=True):
        before, codes = pair.pairs()
        labelled = isinstance(columns[names.index(name)].dtype, pd.CategoricalDtype)
        known = columns[names.index(name)].cat.categories if labelled else text.names
        values[name] = [str(known[k]) for k in codes[number]]
        number = before[number]
    table = pd.DataFrame(labels.conditions.loc[number, list(SORTED_BY)]).reset_index(drop=True)
    for name in names:
        table[name] = values[name]
    return sort_conditions(table.assign(n_cells=n_cells), config.control)


def extra_names(config: DataConfig) -> tuple[str, ...]:
    """Return the further obs columns to keep, without those that are kept as a label anyway.

    Raises
    ------
    UserError
        If one has the name of another column of the store.
    """
    kept_as = {"cell_type": config.cell_type_key, "batch": config.batch_key, "dose": config.dose_key}
    kept_as |= {
        "perturbation": config.perturbation_key if config.dose_key is None else None,
        SET: config.set_key,
    }
    kept = tuple(name for name in config.extra_obs if kept_as.get(name) != name)
    for name in kept:
        plain_name(name, "data.extra_obs:")
    taken = [name for name in kept if name in RESERVED or (name == SET and config.set_key is not None)]
    if taken:
        raise UserError(
            f"data.extra_obs: the store has a column '{taken[0]}' of its own; rename that obs column of the input"
        )
    return kept


def extra_column(inputs: Inputs, name: str) -> pd.Series:
    """Return a further obs column of all files: numbers stay numbers, anything else is categorical text.

    Both in the smallest type that holds them exactly. A missing text is the empty string.
    """
    columns = [file.open_column(name, "data.extra_obs") for file in inputs.files]
    return joined(columns, [file.n_cells for file in inputs.files])


def _codes(values: pd.Series, texts: Texts) -> np.ndarray:
    """Return the codes of a categorical, or of numbers as ``texts`` numbers them (a missing one is 'nan')."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        return values.cat.codes.to_numpy()
    codes, distinct = pd.factorize(values.to_numpy(), use_na_sentinel=False)
    return np.array([texts.number(str(v)) for v in distinct.tolist()], np.int32)[codes]


def _check_control(conditions: pd.DataFrame, inputs: Inputs) -> None:
    config = inputs.config
    names = listing([f.path.name for f in inputs.files], 3)
    labels = conditions["perturbation"].unique()
    if config.control not in labels:
        hint = nearest(config.control, labels) or f"; its labels are {listing(labels)}"
        raise UserError(
            f"{names}: no control cells, '{config.control}' (--control or data.control) is not a label of obs column "
            f"'{config.perturbation_key}'{hint}"
        )
    if len(labels) == 1 and config.perturbation_key is not None:
        logger.warning("%s: every cell is a control; there is no perturbation to learn", names)
    groups = conditions.groupby(["cell_type", "batch"])["perturbation"]
    without = [f"{key[0]} / {key[1]}" for key, group in groups if config.control not in set(group)]  # type: ignore[index]
    if without:
        logger.warning(
            "%d combinations of cell type and batch have no control cells (%s); "
            "their cells can be stored but not used as sets",
            len(without),
            listing(without, 4),
        )


def _perturbations(table: pd.DataFrame) -> pd.DataFrame:
    """Return agent and dose of each perturbation, sorted by label."""
    first = table.drop_duplicates("perturbation").sort_values("perturbation")
    return pd.DataFrame(first[["perturbation", "agent", "dose"]].reset_index(drop=True))
