"""The first pass over the inputs: checks every value, filters cells and computes the sums for gene selection."""

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
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_MOST_WAITING = 400_000  # 16 bytes each
LARGEST_FUSED = np.float32(2**24)
"""Largest count for `scan_counts`. All counts up to it are whole float32 numbers and fit into int32."""
_LARGEST_LOG1P = 20.0


class StreamingMedian:
    """Counts how often each value occurs in each group. Memory grows with the number of different values.

    Values are non-negative float32 numbers, whose bit patterns have the same order as the values.
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
        """Return the median of each group, float64 [num_groups], or nan for a group without values."""
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
    """Return the position of the second value of a row in one of the ``columns`` columns, or -1 if there is none."""
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
    """Return the largest of float32 values that are read as uint32.

    These numbers have the same order as the values, with negative and undefined values above all others.
    """
    top = np.uint32(0)
    for k in range(len(bits)):
        top = max(top, bits[k])
    return int(top)


@kernel
def _row_totals(data: np.ndarray) -> tuple[int, int, int]:
    """Return the sum of values up to 2^24, the number of positive ones, and whether any is fractional."""
    total, positive, wrong = np.int64(0), np.int64(0), np.int32(0)
    for k in range(len(data)):
        whole = np.int32(data[k])
        total += whole
        positive += whole > 0
        wrong |= np.int32(np.float32(whole) != data[k])
    return int(total), int(positive), int(wrong)


@kernel
def _used_totals(data: np.ndarray, indices: np.ndarray, columns: np.ndarray, unused: int) -> tuple[int, int]:
    """Return the sum and the number of positive values in the used columns."""
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
    """Scan a block of float32 counts up to `LARGEST_FUSED`. Return whether all are whole numbers.

    Parameters
    ----------
    columns
        Position of each column among G genes, or G if it is not used.
    every
        Whether all columns are used.
    group
        Group of ``sums`` for each row, or -1 for none.
    least
        Minimum counts and minimum detected genes of a row that is added to the sums, float64 [2].
    divide
        Whether values are divided by their row's depth before they are added. Rows without counts are not added.
    depth, detected
        Output: the sum of a row's used values, and the number of its positive ones.
    sums
        Float64 [groups, G + 1, 3]: for every positive value, the value, its square and 1 are added.
    """
    wrong, unused = np.int32(0), sums.shape[1] - 1
    for i in range(len(indptr) - 1):
        a, b = indptr[i], indptr[i + 1]
        values, places = data[a:b], indices[a:b]
        total, positive, fraction = _row_totals(values)
        wrong |= fraction
        if not every:
            total, positive = _used_totals(values, places, columns, unused)
        depth[i], detected[i] = total, positive
        g = group[i]
        if g >= 0 and total > 0 and total >= least[0] and positive >= least[1]:
            factor = 1.0 / total if divide else 1.0
            of_group = sums[g]
            for k in range(len(values)):
                j = np.uint32(columns[places[k]])
                value = values[k] * factor
                of_group[j, 0] += value
                of_group[j, 1] += value * value
                of_group[j, 2] += values[k] > 0
    return wrong == 0


@kernel
def are_counts(data: np.ndarray) -> tuple[bool, float]:
    """Return whether all values are whole and not negative, and the largest value. There is no branch per value."""
    wrong, largest = False, data.dtype.type(0)
    for k in range(len(data)):
        value = data[k]
        wrong |= (value < 0) | (value != np.floor(value))
        largest = value if value > largest else largest
    return not wrong, largest


@kernel
def find_faults(data: np.ndarray) -> tuple[int, int, int]:
    """Return the first positions of a negative, a non-finite and a fractional value, or -1 for none."""
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
    """Write each row's sum and number of positive values over the used columns (those not mapped to -1)."""
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
    """Settings of the first pass.

    Attributes
    ----------
    config
        Settings of the data.
    group
        Group of the gene sums for each condition, or -1 for one that gene selection must not use, int32.
    num_groups
        Number of groups of the gene sums.
    """

    config: DataConfig
    group: np.ndarray
    num_groups: int


@dataclass
class Scan:
    """Result of the first pass.

    Attributes
    ----------
    sums
        Sums by batch and gene over the cells that gene selection may use.
    largest
        Largest stored value.
    left
        Number of cells of each condition that passed the filters.
    quality
        Table ``cell_type, batch, cells_read, without_counts, dropped_min_counts, dropped_min_genes, cells_kept``,
        ``median_counts`` (over all genes) and ``median_genes`` (detected), the medians of kept cells.
    median_depth
        Median depth of the cells with counts that gene selection may use, or nan if there are none. It is the default
        target of scanpy's normalize_total.
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
        Passes over the inputs, with the condition of every cell set.
    conditions
        ``cell_type, batch, perturbation, n_cells`` (of the input).
    look
        Whether gene selection may use each condition, bool.

    Raises
    ------
    UserError
        If a value is negative, not finite or contradicts ``input_scale``, a cell has two values for one gene, or no
        cell passes the filters.
    """
    config = passes.inputs.config
    settings = ScanSettings(config, *gene_groups(conditions, look, by_batch=config.hvg_by_batch))
    passes.run("scan", scan_piece, settings, label="reading cells")
    passes.filtered = "scan"
    return _merge(passes, conditions, look, settings)


def scan_piece(reader: PieceReader, settings: ScanSettings) -> dict[str, np.ndarray]:
    """Scan one piece.

    Returns
    -------
    For each cell ``depth`` (sum of its counts over all genes, or of expm1 for log1p input, float64), ``detected``
    (number of genes with counts, int32) and ``codes`` (int32). Also the gene sums, the ``largest`` value, whether all
    values are ``whole`` numbers, and the number of cells that each filter dropped by condition. A cell that two filters
    would drop counts for the first.
    """
    piece = _Piece(reader, settings)
    for block in reader.blocks():
        piece.add(block)
    return piece.arrays()


class _Piece:
    """Collects the results of a piece, block by block."""

    def __init__(self, reader: PieceReader, settings: ScanSettings) -> None:
        self._reader, self._settings, self._config = reader, settings, settings.config
        self._log = self._config.unit == "log1p"
        self._stored = sums_stored_values(self._config)
        num = reader.num_cells
        self._codes, self._depth, self._detected = reader.codes, np.zeros(num), np.zeros(num, np.int32)
        self._sums = GeneSums(settings.num_groups, reader.num_genes)
        kinds = ("low_counts", "low_genes", "no_counts")
        self._dropped = {n: np.zeros(len(settings.group), np.int64) for n in kinds}
        self._largest, self._whole = 0.0, True
        # for the fused loop, in which unused columns have a slot of their own
        self._every = bool((reader.columns >= 0).all())
        self._columns = np.where(reader.columns < 0, reader.num_genes, reader.columns).astype(np.int32)
        self._added = np.zeros((settings.num_groups, reader.num_genes + 1, 3))

    def add(self, block: Block) -> None:
        """Check a block, note depth and detected genes, filter its cells and add the rest to the gene sums."""
        _check_once(self._reader.file, block)
        first = self._reader.piece.start
        cells = slice(block.start - first, block.stop - first)
        if not self._add_fused(block, cells):
            self._add_slowly(block, cells)
        self._check_zeros(block, cells)

    def _check_zeros(self, block: Block, cells: slice) -> None:
        """Refuse a cell whose stored values are all zero, because libraries read missing data of a file as zeros."""
        file = self._reader.file
        for row in np.flatnonzero((np.diff(block.indptr) > 0) & (self._depth[cells] == 0)).tolist():
            first, stop = int(block.indptr[row]), int(block.indptr[row + 1])
            if not block.data[first:stop].any():
                name = file.cell_names(block.start + row, block.start + row + 1)[0]
                raise UserError(
                    f"{file.path}: cell '{name}' has {stop - first} stored values that are all zero; the file is "
                    "damaged, or was written so: copy it again, or write it again after X.eliminate_zeros()"
                )

    def _add_fused(self, block: Block, cells: slice) -> bool:
        """Add a block of whole float32 counts of usual size in one loop. Return False if the block has other values."""
        if self._log or block.data.dtype != np.float32:
            return False
        top = np.uint32(highest_bits(block.data.view(np.uint32)))
        if top > LARGEST_FUSED.view(np.uint32):
            return False
        group = group_of_cells(self._codes[cells], self._settings.group)
        least = np.array([self._config.min_counts, self._config.min_genes], np.float64)
        whole = scan_counts(
            block.indptr, block.indices, block.data, self._columns, self._every, group, least, not self._stored,
            self._depth[cells], self._detected[cells], self._added,
        )  # fmt: skip
        if not whole:
            _check(self._reader.file, block, self._config)  # raises an error that names the value
        self._largest = max(self._largest, float(top.view(np.float32)))
        self._filter(cells)
        self._sums.count(group_of_cells(self._codes[cells], self._settings.group))
        return True

    def _add_slowly(self, block: Block, cells: slice) -> None:
        whole, largest = _check(self._reader.file, block, self._config)
        self._whole, self._largest = self._whole and whole, max(self._largest, largest)
        # depths, and the sums of most flavors, are of the values before the logarithm
        plain = replace(block, data=np.expm1(block.data, dtype=np.float64)) if self._log else block
        columns, depth = self._reader.columns, self._depth[cells]
        row_totals(plain.indptr, plain.indices, plain.data, columns, depth, self._detected[cells])
        self._filter(cells)
        group = group_of_cells(self._codes[cells], self._settings.group)
        divisor = None if self._log or self._stored else depth
        self._sums.add(block if self._stored else plain, columns, group, divisor)

    def _filter(self, cells: slice) -> None:
        """Mark the dropped cells in the codes and count them by condition."""
        codes, depth, detected = self._codes[cells], self._depth[cells], self._detected[cells]
        known = codes >= 0
        shallow = known & (depth < self._config.min_counts)
        few = known & ~shallow & (detected < self._config.min_genes)
        empty = known & (depth == 0)
        for name, which in (("low_counts", shallow), ("low_genes", few), ("no_counts", empty)):
            self._dropped[name] += np.bincount(codes[which], minlength=len(self._dropped[name]))
        codes[shallow | few] = DROPPED

    def arrays(self) -> dict[str, Any]:
        """Return the results of the piece."""
        self._sums.values += self._added[:, :-1]
        cells = {"codes": self._codes, "depth": self._depth, "detected": self._detected}
        values = {"largest": np.array(self._largest), "whole": np.array(self._whole)}
        return {**cells, **values, **self._dropped, **self._sums.arrays()}


def _merge(passes: Passes, conditions: pd.DataFrame, look: np.ndarray, settings: ScanSettings) -> Scan:
    """Merge the results of all pieces, in their order."""
    config, num = settings.config, len(conditions)
    sums = GeneSums(settings.num_groups, len(passes.inputs.genes))
    group = conditions.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    depths, genes, visible = StreamingMedian(), StreamingMedian(), StreamingMedian()
    left, low_counts, low_genes, no_counts = (np.zeros(num, np.int64) for _ in range(4))
    largest, whole = 0.0, True
    for piece in passes.results("scan"):
        sums.add_arrays(piece)
        largest, whole = max(largest, float(piece["largest"])), whole and bool(piece["whole"])
        low_counts += piece["low_counts"]
        low_genes += piece["low_genes"]
        no_counts += piece["no_counts"]
        kept = piece["codes"] >= 0
        codes, depth = piece["codes"][kept], piece["depth"][kept].astype(np.float32)
        left += np.bincount(codes, minlength=num)
        depths.add(group[codes], depth)
        genes.add(group[codes], piece["detected"][kept].astype(np.float32))
        seen = look[codes] & (depth > 0)
        visible.add(np.zeros(int(seen.sum()), np.int64), depth[seen])
    if config.unit == "log1p" and whole and largest > _LARGEST_LOG1P:
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
    """Refuse a row with two values for one gene, because some readers use one of them and others their sum."""
    twice = repeated_column(block.indptr, block.indices, len(file.genes))
    if twice >= 0:
        raise UserError(
            f"{file.path}: the sparse matrix has two values in one place ({_where(file, block, twice)}); add them "
            "up with X.sum_duplicates() and write the file again"
        )


def _check(file: CountsFile, block: Block, config: DataConfig) -> tuple[bool, float]:
    """Check a block's values. Return whether all are whole numbers, and the largest value."""
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
            f"or centred data; {_elsewhere(file, config)}"
        )
    if fraction >= 0 and config.input_scale == "counts":
        value, place = block.data[fraction], _where(file, block, fraction)
        if largest <= _LARGEST_LOG1P:
            raise UserError(
                f"{at} is declared as counts but looks log-transformed ({value:g}, {place}, largest "
                f"{largest:g}); {_elsewhere(file, config)}, or keep these values with --set data.input_scale=log1p"
            )
        raise UserError(
            f"{at} is declared as counts but is not whole numbers ({value:g}, {place}); {_elsewhere(file, config)}"
        )
    if config.input_scale == "counts" and largest > np.iinfo(np.uint32).max:
        raise UserError(f"{at} has a count of {largest:g}, more than 2^32; these are no counts")
    return fraction < 0, float(largest)


def _elsewhere(file: CountsFile, config: DataConfig) -> str:
    """Return where the raw counts may be instead."""
    others = [place for place in file.places if place not in (config.layer, f"layers/{config.layer}")]
    if not others:
        return "the file has no other matrix for data.layer: give the file with the raw counts"
    return f"name the place of the raw counts by --set data.layer=… ({listing(others)})"


def _where(file: CountsFile, block: Block, k: int) -> str:
    row = block.start + int(np.searchsorted(block.indptr, k, "right")) - 1
    return f"gene '{file.genes[block.indices[k]]}', cell '{file.cell_names(row, row + 1)[0]}'"
