"""The first pass over the inputs: checks every value, filters cells and sums what gene selection needs."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_sums import GeneSums, gene_groups, group_of_cells
from perturbdiff.genes.selection import sums_stored_values
from perturbdiff.io.counts import CountsFile
from perturbdiff.io.matrices import Block
from perturbdiff.preprocessing.passes import DROPPED, Passes, PieceReader
from perturbdiff.runtime.compiled import kernel
from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

_MOST_WAITING = 400_000  # 16 bytes each
LARGEST_FUSED = np.float32(2**24)
"""`scan_counts` takes counts up to here: all of them are whole float32 numbers and fit into int32."""
_LARGEST_LOG1P = 20.0


class StreamingMedian:
    """How often each value occurs in each group; memory follows the number of different values.

    Values are non-negative float32 numbers: their bit patterns are in the same order as they.
    """

    def __init__(self) -> None:
        self._keys: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []

    def add(self, group: np.ndarray, values: np.ndarray) -> None:
        """Count ``values`` (float32 [n], not negative), each in its ``group`` (int [n], 0 or more)."""
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        key = (group.astype(np.uint64) << np.uint64(32)) | bits
        keys, counts = np.unique(key, return_counts=True)
        self._keys.append(keys)
        self._counts.append(counts)
        if sum(map(len, self._keys)) > _MOST_WAITING:
            self._merge()

    def _merge(self) -> tuple[np.ndarray, np.ndarray]:
        every = np.concatenate([np.empty(0, np.uint64), *self._keys])
        keys, place = np.unique(every, return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, place, np.concatenate([np.empty(0, np.int64), *self._counts]))
        self._keys, self._counts = [keys], [counts]
        return keys, counts

    def medians(self, num_groups: int) -> np.ndarray:
        """Return the median of each group, float64 [num_groups]; nan for one without values."""
        keys, counts = self._merge()
        edges = np.searchsorted(keys, np.arange(num_groups + 1, dtype=np.uint64) << np.uint64(32))
        values = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
        return np.array(
            [_median(values[a:b], counts[a:b]) for a, b in itertools.pairwise(edges)],
            np.float64,
        )


def _median(values: np.ndarray, counts: np.ndarray) -> float:
    """Return the median of ascending ``values`` that occur ``counts`` times, computed as numpy does for float32."""
    if not len(values):
        return float("nan")
    ends = np.cumsum(counts)
    middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], "right")
    return float(np.mean(values[middle]))


@kernel
def repeated_column(indptr: np.ndarray, indices: np.ndarray, columns: int) -> int:
    """Return the place of a value whose row has an earlier one in the same of ``columns`` columns, or -1."""
    seen = np.empty(0, np.int64)
    for i in range(len(indptr) - 1):
        ascending = True
        for k in range(indptr[i] + 1, indptr[i + 1]):
            ascending &= indices[k] > indices[k - 1]
        if ascending:
            continue
        if not len(seen):
            seen = np.full(columns, -1, np.int64)
        for k in range(indptr[i], indptr[i + 1]):
            if seen[indices[k]] == i:
                return k
            seen[indices[k]] = i
    return -1


@kernel
def highest_bits(bits: np.ndarray) -> int:
    """Return the largest of float32 values read as uint32.

    Such numbers are in the order of the values they stand for, with negative and undefined ones above them all.
    """
    top = np.uint32(0)
    for k in range(len(bits)):
        top = max(top, bits[k])
    return int(top)


@kernel
def _row_totals(data: np.ndarray) -> tuple[int, int, int]:
    """Return sum, number of positive values and whether any is fractional, of values up to 2^24."""
    total, positive, wrong = np.int64(0), np.int64(0), np.int32(0)
    for k in range(len(data)):
        whole = np.int32(data[k])
        total += whole
        positive += whole > 0
        wrong |= np.int32(np.float32(whole) != data[k])
    return int(total), int(positive), int(wrong)


@kernel
def _used_totals(data: np.ndarray, indices: np.ndarray, columns: np.ndarray, unused: int) -> tuple[int, int]:
    """Return sum and number of positive values of the used columns."""
    total, positive = np.int64(0), np.int64(0)
    for k in range(len(data)):
        whole = np.int64(data[k]) * np.int64(columns[indices[k]] != unused)
        total += whole
        positive += whole > 0
    return int(total), int(positive)


@kernel
def scan_counts(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    every: bool,  # noqa: FBT001
    group: np.ndarray,
    least: np.ndarray,
    divide: bool,  # noqa: FBT001
    depth: np.ndarray,
    detected: np.ndarray,
    sums: np.ndarray,
) -> bool:
    """Scan a block of float32 counts up to `LARGEST_FUSED`; return whether all are whole numbers.

    Parameters
    ----------
    columns
        Place of each column among G genes; G for one that is not used.
    every
        Whether all columns are used.
    group
        Group of ``sums`` for each row, -1 for none.
    least
        Fewest counts and fewest detected genes of a row that is added to the sums, float64 [2].
    divide
        Whether values are added over their row's depth; a row without counts is not added.
    depth, detected
        Written: sum of a row's used values, number of its positive ones.
    sums
        Float64 [groups, G + 1, 3]: value, its square and one are added for every positive value.
    """
    wrong, unused = np.int32(0), sums.shape[1] - 1
    for i in range(len(indptr) - 1):
        a, b = indptr[i], indptr[i + 1]
        values, places = data[a:b], indices[a:b]
        total, found, fraction = _row_totals(values)
        wrong |= fraction
        if not every:
            total, found = _used_totals(values, places, columns, unused)
        depth[i], detected[i] = total, found
        g = group[i]
        if g >= 0 and total > 0 and total >= least[0] and found >= least[1]:
            factor = 1.0 / total if divide else 1.0
            own = sums[g]
            for k in range(len(values)):
                j = np.uint32(columns[places[k]])
                value = values[k] * factor
                own[j, 0] += value
                own[j, 1] += value * value
                own[j, 2] += values[k] > 0
    return wrong == 0


@kernel
def are_counts(data: np.ndarray) -> tuple[bool, float]:
    """Return whether all values are whole and not negative, and the largest; without a branch per value."""
    wrong, largest = False, data.dtype.type(0)
    for k in range(len(data)):
        value = data[k]
        wrong |= (value < 0) | (value != np.floor(value))
        largest = value if value > largest else largest
    return not wrong, largest


@kernel
def find_faults(data: np.ndarray) -> tuple[int, int, int]:
    """Return the first positions of a negative, a non-finite and a fractional value (-1: none)."""
    negative, broken, fraction = -1, -1, -1
    for k in range(len(data)):
        value = data[k]
        if not np.isfinite(value):
            if broken < 0:
                broken = k
        elif value < 0:
            if negative < 0:
                negative = k
        elif fraction < 0 and value != np.floor(value):
            fraction = k
    return negative, broken, fraction


@kernel
def row_totals(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    depth: np.ndarray,
    detected: np.ndarray,
) -> None:
    """Write each row's sum and number of positive values over the mapped columns (-1: not used)."""
    for i in range(len(indptr) - 1):
        total, positive = 0.0, 0
        for k in range(indptr[i], indptr[i + 1]):
            if columns[indices[k]] >= 0 and data[k] > 0:
                total += data[k]
                positive += 1
        depth[i] = total
        detected[i] = positive


@dataclass(frozen=True)
class ScanSettings:
    """What the pass needs to know.

    Attributes
    ----------
    config
        Of the data.
    group
        Group of the gene sums for each condition, -1 for one that gene selection must not look at, int32.
    num_groups
        Groups of the gene sums.
    """

    config: DataConfig
    group: np.ndarray
    num_groups: int


@dataclass
class Scan:
    """What the pass over all cells found.

    Attributes
    ----------
    sums
        Sums by batch and gene of the cells that gene selection may look at.
    largest
        Largest stored value.
    left
        Cells of each condition that passed the filters.
    quality
        Table ``cell_type, batch, cells_read, without_counts, dropped_min_counts, dropped_min_genes, cells_kept``,
        ``median_counts`` (over all genes) and ``median_genes`` (detected), the medians of kept cells.
    median_depth
        Median depth of the cells that gene selection may look at and that have any counts, nan without any:
        the default target of scanpy's normalize_total.
    """

    sums: GeneSums
    largest: float
    left: np.ndarray
    quality: pd.DataFrame
    median_depth: float


def scan_cells(passes: Passes, conditions: pd.DataFrame, look: np.ndarray) -> Scan:
    """Read all cells once.

    Parameters
    ----------
    passes
        Over the inputs, told the condition of every cell.
    conditions
        ``cell_type, batch, perturbation, n_cells`` (read).
    look
        Whether gene selection may look at each condition, bool.

    Raises
    ------
    UserError
        If a value is negative, not finite or not what ``input_scale`` declares, a cell has two values for one gene,
        or no cell passes the filters.
    """
    config = passes.inputs.config
    settings = ScanSettings(config, *gene_groups(conditions, look, by_batch=config.hvg_by_batch))
    passes.run("scan", scan_piece, settings, label="reading cells")
    passes.filtered = "scan"
    return _merge(passes, conditions, look, settings)


def scan_piece(reader: PieceReader, given: ScanSettings) -> dict[str, np.ndarray]:
    """Return what is found in one piece.

    ``depth`` (sum of a cell's counts over all genes, of expm1 for log1p input, float64), ``detected`` (genes with
    counts, int32) and ``codes`` (int32) of each cell; the gene sums; ``largest``, ``whole``; cells each filter
    dropped by condition, one that both would drop counting for the first.
    """
    piece = _Piece(reader, given)
    for block in reader.blocks():
        piece.add(block)
    return piece.arrays()


class _Piece:
    """What has been found in the blocks of a piece so far."""

    def __init__(self, reader: PieceReader, given: ScanSettings) -> None:
        self._reader, self._given, self._config = reader, given, given.config
        self._log = self._config.input_scale == "log1p"
        self._stored = sums_stored_values(self._config)
        num = reader.num_cells
        self._codes, self._depth, self._detected = reader.codes, np.zeros(num), np.zeros(num, np.int32)
        self._sums = GeneSums(given.num_groups, reader.num_genes)
        kinds = ("low_counts", "low_genes", "no_counts")
        self._dropped = {n: np.zeros(len(given.group), np.int64) for n in kinds}
        self._largest, self._whole = 0.0, True
        # for the fused loop: unused columns go to a slot of their own
        self._every = bool((reader.columns >= 0).all())
        self._columns = np.where(reader.columns < 0, reader.num_genes, reader.columns).astype(np.int32)
        self._added = np.zeros((given.num_groups, reader.num_genes + 1, 3))

    def add(self, block: Block) -> None:
        """Check a block, note depth and detected genes, filter its cells and add the rest to the gene sums."""
        _check_once(self._reader.file, block)
        first = self._reader.piece.start
        own = slice(block.start - first, block.stop - first)
        if not self._add_fused(block, own):
            self._add_slowly(block, own)
        self._check_zeros(block, own)

    def _check_zeros(self, block: Block, own: slice) -> None:
        """Refuse a cell with values that are all zero: what a library cannot find in a file it reads as zeros."""
        file = self._reader.file
        for row in np.flatnonzero((np.diff(block.indptr) > 0) & (self._depth[own] == 0)).tolist():
            first, stop = int(block.indptr[row]), int(block.indptr[row + 1])
            if not block.data[first:stop].any():
                name = file.cell_names(block.start + row, block.start + row + 1)[0]
                raise UserError(
                    f"{file.path}: cell '{name}' has {stop - first} stored values that are all zero; the file is "
                    "damaged, or was written so: copy it again, or write it again after X.eliminate_zeros()"
                )

    def _add_fused(self, block: Block, own: slice) -> bool:
        """Do all at once for whole float32 counts of usual size; return whether the block has such."""
        if self._log or block.data.dtype != np.float32:
            return False
        top = np.uint32(highest_bits(block.data.view(np.uint32)))
        if top > LARGEST_FUSED.view(np.uint32):
            return False
        group = group_of_cells(self._codes[own], self._given.group)
        least = np.array([self._config.min_counts, self._config.min_genes], np.float64)
        whole = scan_counts(
            block.indptr, block.indices, block.data, self._columns, self._every, group, least, not self._stored,
            self._depth[own], self._detected[own], self._added,
        )  # fmt: skip
        if not whole:
            _check(self._reader.file, block, self._config)  # says where
        self._largest = max(self._largest, float(top.view(np.float32)))
        self._filter(own)
        self._sums.count(group_of_cells(self._codes[own], self._given.group))
        return True

    def _add_slowly(self, block: Block, own: slice) -> None:
        whole, largest = _check(self._reader.file, block, self._config)
        self._whole, self._largest = self._whole and whole, max(self._largest, largest)
        # the depths, and most recipes' sums, are those of the values before the logarithm
        plain = replace(block, data=np.expm1(block.data, dtype=np.float64)) if self._log else block
        columns, depth = self._reader.columns, self._depth[own]
        row_totals(plain.indptr, plain.indices, plain.data, columns, depth, self._detected[own])
        self._filter(own)
        group = group_of_cells(self._codes[own], self._given.group)
        divisor = None if self._log or self._stored else depth
        self._sums.add(block if self._stored else plain, columns, group, divisor)

    def _filter(self, own: slice) -> None:
        """Mark the dropped cells in the codes and count them by condition."""
        codes, depth, detected = self._codes[own], self._depth[own], self._detected[own]
        known = codes >= 0
        shallow = known & (depth < self._config.min_counts)
        few = known & ~shallow & (detected < self._config.min_genes)
        empty = known & (depth == 0)
        for name, which in (("low_counts", shallow), ("low_genes", few), ("no_counts", empty)):
            self._dropped[name] += np.bincount(codes[which], minlength=len(self._dropped[name]))
        codes[shallow | few] = DROPPED

    def arrays(self) -> dict[str, Any]:
        """Return all that was found."""
        self._sums.values += self._added[:, :-1]
        cells = {"codes": self._codes, "depth": self._depth, "detected": self._detected}
        found = {"largest": np.array(self._largest), "whole": np.array(self._whole)}
        return {**cells, **found, **self._dropped, **self._sums.arrays()}


def _merge(passes: Passes, conditions: pd.DataFrame, look: np.ndarray, given: ScanSettings) -> Scan:
    """Put the results of all pieces together, in their order."""
    config, num = given.config, len(conditions)
    sums = GeneSums(given.num_groups, len(passes.inputs.genes))
    group = conditions.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    depths, genes, visible = StreamingMedian(), StreamingMedian(), StreamingMedian()
    left, low_counts, low_genes, no_counts = (np.zeros(num, np.int64) for _ in range(4))
    largest, whole = 0.0, True
    for found in passes.results("scan"):
        sums.add_arrays(found)
        largest, whole = max(largest, float(found["largest"])), whole and bool(found["whole"])
        low_counts += found["low_counts"]
        low_genes += found["low_genes"]
        no_counts += found["no_counts"]
        kept = found["codes"] >= 0
        codes, depth = found["codes"][kept], found["depth"][kept].astype(np.float32)
        left += np.bincount(codes, minlength=num)
        depths.add(group[codes], depth)
        genes.add(group[codes], found["detected"][kept].astype(np.float32))
        seen = look[codes] & (depth > 0)
        visible.add(np.zeros(int(seen.sum()), np.int64), depth[seen])
    if config.input_scale == "log1p" and whole and largest > _LARGEST_LOG1P:
        raise UserError(
            f"{passes.inputs.files[0].path}: declared log1p, but every value is a whole number and the largest is "
            f"{largest:g}: these are counts; set data.input_scale=counts"
        )
    if not left.any():
        raise UserError(
            f"no cell passes data.min_counts={config.min_counts} and data.min_genes={config.min_genes}; lower them"
        )
    if no_counts.any():
        logger.warning(
            "%d of %d cells have no counts at all; qc.csv tells where (without_counts)",
            no_counts.sum(),
            conditions["n_cells"].sum(),
        )
    table = conditions[["cell_type", "batch"]].assign(
        cells_read=conditions["n_cells"], without_counts=no_counts, dropped_min_counts=low_counts,
        dropped_min_genes=low_genes, cells_kept=left,
    )  # fmt: skip
    quality = table.groupby(["cell_type", "batch"], sort=False).sum().reset_index()
    medians = {
        "median_counts": depths.medians(len(quality)),
        "median_genes": genes.medians(len(quality)),
    }
    return Scan(sums, largest, left, quality.assign(**medians), float(visible.medians(1)[0]))


def _check_once(file: CountsFile, block: Block) -> None:
    """Refuse a row with two values for one gene: readers differ in which of them, or their sum, they take."""
    twice = repeated_column(block.indptr, block.indices, len(file.genes))
    if twice >= 0:
        raise UserError(
            f"{file.path}: the sparse matrix has two values in one place ({_where(file, block, twice)}); add them "
            "up with X.sum_duplicates() and write the file again"
        )


def _check(file: CountsFile, block: Block, config: DataConfig) -> tuple[bool, float]:
    """Check a block's values; return whether all are whole numbers, and the largest."""
    whole, largest = are_counts(block.data)
    if whole and np.isfinite(largest) and largest <= np.iinfo(np.uint32).max:
        return True, float(largest)
    negative, broken, fraction = find_faults(block.data)
    at = f"{file.path}: {config.layer}"
    if broken >= 0:
        raise UserError(
            f"{at} has a missing or infinite value ({_where(file, block, broken)}); mend or drop it"
        )
    if negative >= 0:
        raise UserError(
            f"{at} has negative values ({block.data[negative]:g}, {_where(file, block, negative)}); it is scaled "
            "or centred data: give raw counts (data.layer) or log1p values (data.input_scale=log1p)"
        )
    if fraction >= 0 and config.input_scale == "counts":
        value, place = block.data[fraction], _where(file, block, fraction)
        if largest <= _LARGEST_LOG1P:
            raise UserError(
                f"{at} is declared as counts but looks log-transformed ({value:g}, {place}, largest "
                f"{largest:g}); set data.input_scale=log1p, or data.layer to where the counts are (raw, layers/NAME)"
            )
        raise UserError(
            f"{at} is declared as counts but is not whole numbers ({value:g}, {place}); "
            "set data.layer to where the raw counts are (X, raw or layers/NAME)"
        )
    if config.input_scale == "counts" and largest > np.iinfo(np.uint32).max:
        raise UserError(f"{at} has a count of {largest:g}, more than 2^32; these are no counts")
    return fraction < 0, float(largest)


def _where(file: CountsFile, block: Block, k: int) -> str:
    row = block.start + int(np.searchsorted(block.indptr, k, "right")) - 1
    return f"gene '{file.genes[block.indices[k]]}', cell '{file.cell_names(row, row + 1)[0]}'"
