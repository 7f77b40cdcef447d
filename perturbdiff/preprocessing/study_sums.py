"""Sums over the cells of a study that gene selection needs; they add over studies, whatever composite these join.

Each task reads a range of a study's rows and leaves a file, named by what the study is now and how it is read. A
task whose file is there is done, so a run that was stopped goes on, and so does one with other composites.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_sums import GeneSums
from perturbdiff.genes.selection import SecondPass
from perturbdiff.io.counts import CountsFile
from perturbdiff.preprocessing.composites import Study
from perturbdiff.preprocessing.passes import VALUES_PER_PIECE, Piece, PieceReader, load, save
from perturbdiff.preprocessing.scan import ScanSettings, scan_piece
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError

_SETTINGS = ("layer", "gene_key", "input_scale", "min_counts", "min_genes", "hvg_flavor")
_FORMAT = 1
_LARGEST_LOG1P = 20.0


@dataclass(frozen=True)
class StudyPiece:
    """Rows ``start`` to ``stop`` of a study, its size and time of change, and the file that takes the rows' sums."""

    path: Path
    n_cells: int
    start: int
    stop: int
    config: DataConfig
    signature: tuple[int, int]
    result: Path


@dataclass(frozen=True)
class SecondTask:
    """What the second pass of a flavor does with a piece, in a composite.

    Attributes
    ----------
    piece
        The piece, whose first pass is done.
    columns
        File with the place of each gene of the study among the composite's, int32.
    num_genes
        Genes of the composite.
    work
        What to do.
    result
        File that takes the sums.
    """

    piece: StudyPiece
    columns: Path
    num_genes: int
    work: SecondPass
    result: Path


class StudyReader(PieceReader):
    """A piece of a study as the passes of preprocess read theirs: all its cells are of one condition."""

    def __init__(self, piece: StudyPiece, file: CountsFile, columns: np.ndarray, num_genes: int) -> None:
        self.piece = Piece(0, 0, piece.start, piece.stop, piece.start)
        self.file, self.columns, self.num_genes = file, columns, num_genes
        self.codes = np.zeros(self.num_cells, np.int32)
        self._result = piece.result

    def saved(self, name: str) -> dict[str, np.ndarray]:
        """Return what the first pass saved, whatever its name."""
        return load(self._result)


def pieces_of(study: Study, config: DataConfig, scratch: Path) -> list[StudyPiece]:
    """Return the tasks of a study's first pass."""
    path, scratch = study.path.absolute(), scratch.absolute()
    settings = {name: getattr(config, name) for name in _SETTINGS}
    signature = files.signature(path)
    state = name_of([_FORMAT, VALUES_PER_PIECE, settings, path.resolve(), signature])
    edges = np.linspace(0, study.n_cells, min(study.num_pieces, study.n_cells) + 1).astype(np.int64).tolist()
    return [
        StudyPiece(path, study.n_cells, a, b, config, signature, scratch / f"{state}-{a:012d}.npz")
        for a, b in pairwise(edges)
    ]


def name_of(record: Any) -> str:
    """Return a short name that depends on all of ``record``."""
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def sum_piece(piece: StudyPiece) -> None:
    """Read a piece's cells once and save their sums; nothing to do if they are there.

    Raises
    ------
    UserError
        If the file cannot be read, was changed meanwhile or does not hold what ``config`` declares.
    """
    if not piece.result.exists():
        with _opened(piece) as file:
            num = len(file.genes)
            reader = StudyReader(piece, file, np.arange(num, dtype=np.int32), num)
            save(piece.result, _first(reader, piece.config))


def _first(reader: StudyReader, config: DataConfig) -> dict[str, np.ndarray]:
    """Return what the scan of preprocess finds in a piece, and the depths of its cells as a histogram."""
    found = scan_piece(reader, ScanSettings(config, np.zeros(1, np.int32), 1))
    if config.input_scale == "log1p" and bool(found["whole"]) and float(found["largest"]) > _LARGEST_LOG1P:
        raise UserError(
            f"{reader.file.path}: declared log1p, but its values are whole numbers up to {float(found['largest']):g}: "
            "these are counts; set data.input_scale=counts"
        )
    kept = {name: values for name, values in found.items() if name.startswith("sums_")}
    depth = np.asarray(found["depth"], np.float32)
    seen = (found["codes"] >= 0) & (depth > 0)
    kept["depths"], kept["cells_with_depth"] = np.unique(depth[seen], return_counts=True)
    if config.hvg_flavor != "seurat":  # its second pass needs them
        kept |= {"depth": found["depth"], "codes": found["codes"]}
    return kept


def check_unchanged(pieces: Iterable[StudyPiece]) -> None:
    """Raise a `UserError`, and forget the sums, if the file of a piece was changed since its task was made."""
    for piece in pieces:
        if files.signature(piece.path) != piece.signature:
            piece.result.unlink(missing_ok=True)
            raise UserError(f"{piece.path}: was changed while it was read; run again")


def sum_again(task: SecondTask) -> None:
    """Read a piece's cells for the second pass of a flavor and save the sums; nothing to do if they are there."""
    if not task.result.exists():
        with _opened(task.piece) as file:
            reader = StudyReader(task.piece, file, np.load(task.columns), task.num_genes)
            reader.codes = reader.saved("scan")["codes"]
            save(task.result, task.work.body(reader, task.work.request))


@contextlib.contextmanager
def _opened(piece: StudyPiece) -> Iterator[CountsFile]:
    """Open the file of a piece; what its conversion to row order leaves is removed."""
    scratch = piece.result.with_suffix(".rows")
    file = CountsFile(piece.path, piece.config, scratch, checked=True)
    try:
        if file.n_cells != piece.n_cells:
            raise UserError(f"{piece.path}: was changed while it was read; run again")
        file.prepare()
        yield file
    finally:
        file.close()
        files.remove(scratch)


def merge(parts: Iterable[tuple[StudyPiece, np.ndarray]], num_genes: int) -> tuple[GeneSums, float]:
    """Return the sums of several pieces as one data set, and its median depth.

    Parameters
    ----------
    parts
        Finished pieces, each with the place of its file's genes among the merged ones, -1 for those that are left
        out, int32 [G of the file]. A gene that a file lacks counts 0 in its cells. Their order fixes the rounding.
    num_genes
        Number of merged genes.

    Returns
    -------
    sums
        One group.
    median
        Of the depths of cells that have any counts; nan if none has.
    """
    sums, values, cells = GeneSums(1, num_genes), [np.empty(0, np.float32)], [np.empty(0, np.int64)]
    for piece, place in parts:
        saved, used = load(piece.result), place >= 0
        for number in range(len(saved["sums_batches"])):  # none if no cell passed the filters
            sums.values[0, place[used]] += saved["sums_values"][number][used]
            sums.cells[0] += saved["sums_cells"][number]
        merged = add_histograms([*values, saved["depths"]], [*cells, saved["cells_with_depth"]])
        values, cells = [merged[0]], [merged[1]]
    return sums, median_of(values[0], cells[0])


def add_histograms(
    values: Sequence[np.ndarray], cells: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct ``values`` of several histograms, ascending, and the sum of their ``cells``, int64."""
    distinct, place = np.unique(np.concatenate(values), return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, place, np.concatenate(cells))
    return distinct, total


def median_of(values: np.ndarray, cells: np.ndarray) -> float:
    """Return the exact median of a histogram, computed as numpy does for float32; nan without cells."""
    ends = np.cumsum(cells)
    if not len(ends):
        return float("nan")
    middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], "right")
    return float(np.mean(values[middle]))
