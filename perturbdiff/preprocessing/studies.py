"""Surveys many studies, assigns them to composites, and sums over their cells."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import heapq
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.gene_names import KINDS, kinds_of, main_kind
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_lists import short_paths
from perturbdiff.genes.gene_sums import GeneSums
from perturbdiff.io.counts import CountsFile
from perturbdiff.io.derived_matrices import CscMatrix, innermost
from perturbdiff.preprocessing.gene_passes import SecondPass
from perturbdiff.preprocessing.passes import DROPPED, VALUES_PER_PIECE, Piece, PieceReader, load, save
from perturbdiff.preprocessing.scan import ScanSettings, scan_piece
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing, nearest

logger = logging.getLogger(__name__)

NUM_COMPOSITES = 23
"""The paper merges 1,139 studies into this number of composites."""
_SETTINGS = (
    "layer", "gene_key", "input_scale", "keep", "duplicate_genes", "min_counts", "min_genes", "hvg_flavor",
)  # fmt: skip
_FORMAT = 1
_LARGEST_LOG1P = 20.0


@dataclass(frozen=True)
class Study:
    """One file of counts.

    Attributes
    ----------
    name
        Its file name, with its folder if file names repeat.
    path
        Path of the file.
    n_cells
        Number of rows.
    genes
        Numbers of its genes among the names of the corpus, int32, in the file's order.
    num_values
        Number of stored values.
    num_pieces
        Number of tasks that read it. It is 1 if the matrix is stored by columns, because its rows cannot be read
        separately.
    """

    name: str
    path: Path
    n_cells: int
    genes: np.ndarray
    num_values: int
    num_pieces: int


@dataclass(frozen=True)
class Corpus:
    """All studies, in the order of their names, and every gene that any of them has."""

    studies: list[Study]
    names: np.ndarray

    @property
    def cells(self) -> np.ndarray:
        """Number of cells in each study, int64."""
        return np.array([study.n_cells for study in self.studies], np.int64)


def study_paths(sources: Sequence[Path]) -> list[Path]:
    """Return the files of studies. A text file (.txt) stands for the paths that it lists, relative to its folder.

    Raises
    ------
    UserError
        If there is no study, a list cannot be read or a study occurs twice.
    """
    paths: list[Path] = []
    for path in map(Path, sources):
        if path.suffix == ".txt":
            if not path.is_file():
                raise UserError(f"list of studies not found: {path}")
            lines = [line.strip() for line in path.read_text().splitlines()]
            paths += [path.parent / line for line in lines if line and not line.startswith("#")]
        else:
            paths.append(path)
    if not paths:
        raise UserError("no study given; give files of raw counts, or a .txt file that lists them")
    places = pd.Index([str(path.resolve()) for path in paths])
    if not places.is_unique:
        raise UserError(f"{places[places.duplicated()][0]}: given twice; give each study once")
    return paths


def survey(paths: Sequence[Path], config: DataConfig, scratch: Path) -> Corpus:
    """Open every study once, and return the numbers of cells and the genes.

    Gene names and equal gene lists are kept once in memory. A study's list takes 4 bytes per gene.

    Raises
    ------
    UserError
        If a study cannot be read, has another kind of gene names than the others, or shares no gene with them.
    """
    number: dict[str, int] = {}
    lists: dict[bytes, np.ndarray] = {}
    studies = []
    for name, path in sorted(zip(short_paths(paths), paths, strict=True)):
        file = CountsFile(path, config, scratch / "survey")
        try:
            genes = np.array([number.setdefault(gene, len(number)) for gene in file.genes], np.int32)
            genes = lists.setdefault(genes.tobytes(), genes)
            by_columns, values = isinstance(innermost(file.matrix), CscMatrix), file.matrix.num_values
            num_pieces = 1 if by_columns else max(1, -(-values // VALUES_PER_PIECE))
            studies.append(Study(name, path, file.n_cells, genes, values, num_pieces))
        finally:
            file.close()
    corpus = Corpus(studies, np.array(list(number), object))
    _check_names(corpus)
    return corpus


def _check_names(corpus: Corpus) -> None:
    """Raise a `UserError` unless all studies have one kind of gene names and each shares genes with another."""
    kind_of_name = kinds_of(corpus.names.tolist())
    first: dict[int, Study] = {}
    shared = np.zeros(len(corpus.names), np.int64)
    for study in corpus.studies:
        first.setdefault(main_kind(kind_of_name[study.genes]), study)
        shared[study.genes] += 1
    if len(first) > 1:
        (a, one), (b, other) = list(first.items())[:2]
        raise UserError(
            f"{one.path} has {KINDS[a]} ({listing(corpus.names[one.genes[:2]])}), {other.path} {KINDS[b]} "
            f"({listing(corpus.names[other.genes[:2]])}); set data.gene_key to a var column of the same kind in "
            "all studies"
        )
    alone = [s for s in corpus.studies if not (shared[s.genes] > 1).any()]
    if alone and len(corpus.studies) > 1:
        raise UserError(
            f"{alone[0].path}: shares no gene with any other study (e.g. {listing(corpus.names[alone[0].genes[:3]])});"
            " give studies of one organism with the same kind of gene names"
        )


def balanced(corpus: Corpus, num: int | None) -> list[str]:
    """Return a composite for each study, so that composites have similar numbers of cells.

    Studies are assigned from the largest to the smallest, each to the composite that has the fewest cells so far. Ties
    are resolved by the study's name and the composite's number. The result depends only on names and sizes.

    Parameters
    ----------
    corpus
        The studies.
    num
        Number of composites. None for `NUM_COMPOSITES`, or for one per study if there are fewer studies.

    Raises
    ------
    UserError
        If there are fewer studies than ``num``.
    """
    studies = corpus.studies
    if num is not None and num > len(studies):
        raise UserError(f"--composites {num}: there are only {len(studies)} studies; give at most as many")
    count = min(NUM_COMPOSITES, len(studies)) if num is None else num
    labels = [f"composite-{k + 1:0{max(2, len(str(count)))}d}" for k in range(count)]
    heap = [(0, k) for k in range(count)]
    chosen = [""] * len(studies)
    for place in sorted(range(len(studies)), key=lambda i: (-studies[i].n_cells, studies[i].name)):
        cells, k = heapq.heappop(heap)
        chosen[place] = labels[k]
        heapq.heappush(heap, (cells + studies[place].n_cells, k))
    return chosen


def from_table(corpus: Corpus, table: Path) -> list[str]:
    """Return the composite of each study from a CSV with the columns ``study, composite``.

    The CSV names a study by its file name, by more of its path if file names repeat, or by its path.

    Raises
    ------
    UserError
        If the table cannot be read, lacks a study or contains two composites for it.
    """
    assigned = _read_table(table)
    studies = corpus.studies
    chosen: list[str] = []
    for study in studies:
        label = next((assigned[key] for key in (study.name, str(study.path)) if key in assigned), None)
        if label is None:
            raise UserError(
                f"{table}: has no row for study '{study.name}'{nearest(study.name, assigned)} give it a composite"
            )
        chosen.append(label)
    extra = sorted(set(assigned) - {s.name for s in studies} - {str(s.path) for s in studies})
    if extra:
        logger.warning("%s: %d studies are not given and left out (%s)", table, len(extra), listing(extra, 4))
    return chosen


def _read_table(table: Path) -> dict[str, str]:
    if not table.is_file():
        raise UserError(f"table of composites not found: {table}")
    try:
        with table.open(newline="") as handle:
            rows = list(csv.DictReader(handle))
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"{table}: is not a CSV file; give one with the columns study, composite") from None
    assigned: dict[str, str] = {}
    for number, row in enumerate(rows, 2):
        study, composite = (row.get("study") or "").strip(), (row.get("composite") or "").strip()
        if not study or not composite:
            raise UserError(
                f"{table}, line {number}: needs a study and a composite (columns study, composite)"
            )
        if assigned.setdefault(study, composite) != composite:
            raise UserError(f"{table}, line {number}: '{study}' has two composites; give it one")
    if not assigned:
        raise UserError(f"{table}: has no rows; give the columns study, composite")
    return assigned


@dataclass(frozen=True)
class StudyPiece:
    """Rows ``start`` to ``stop`` of a study, its size and time of change, and the file for the sums of the rows."""

    path: Path
    n_cells: int
    start: int
    stop: int
    config: DataConfig
    signature: tuple[int, int]
    result: Path


@dataclass(frozen=True)
class SecondTask:
    """The second pass of a flavor over one piece of a composite.

    Attributes
    ----------
    piece
        The piece, whose first pass is done.
    columns
        File with the position of each gene of the study among the composite's, int32.
    num_genes
        Number of genes of the composite.
    work
        The work to do.
    result
        File for the sums.
    """

    piece: StudyPiece
    columns: Path
    num_genes: int
    work: SecondPass
    result: Path


class StudyReader(PieceReader):
    """Reads a piece of a study as the passes of preprocess read theirs. All its cells have one condition."""

    def __init__(self, piece: StudyPiece, file: CountsFile, columns: np.ndarray, num_genes: int) -> None:
        self.piece = Piece(0, 0, piece.start, piece.stop, piece.start)
        self.file, self.columns, self.num_genes = file, columns, num_genes
        self.codes = np.where(file.kept(piece.start, piece.stop), 0, DROPPED).astype(np.int32)
        self._result = piece.result

    def saved(self, name: str) -> dict[str, np.ndarray]:
        """Return what the first pass saved, whatever its name."""
        return load(self._result)


def pieces_of(study: Study, config: DataConfig, scratch: Path) -> list[StudyPiece]:
    """Return the tasks of a study's first pass."""
    path, scratch = study.path.absolute(), scratch.absolute()
    settings = {name: getattr(config, name) for name in _SETTINGS}
    signature = files.signature(path)
    tables = [files.signature(table) for table in config.files.values()]
    state = name_of([_FORMAT, VALUES_PER_PIECE, settings, path.resolve(), signature, *tables])
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
    """Read a piece's cells once and save their sums, unless they exist already.

    Raises
    ------
    UserError
        If the file cannot be read, was changed meanwhile or differs from ``config``.
    """
    if not piece.result.exists():
        with _opened(piece) as file:
            num = len(file.genes)
            reader = StudyReader(piece, file, np.arange(num, dtype=np.int32), num)
            save(piece.result, _first(reader, piece.config))


def _first(reader: StudyReader, config: DataConfig) -> dict[str, np.ndarray]:
    """Return the result of the scan of preprocess for a piece, and the depths of its cells as a histogram."""
    scan = scan_piece(reader, ScanSettings(config, np.zeros(1, np.int32), 1))
    if config.input_scale == "log1p" and bool(scan["whole"]) and float(scan["largest"]) > _LARGEST_LOG1P:
        raise UserError(
            f"{reader.file.path}: declared log1p, but its values are whole numbers up to {float(scan['largest']):g}: "
            "these are counts; set data.input_scale=counts"
        )
    kept = {name: values for name, values in scan.items() if name.startswith("sums_")}
    depth = np.asarray(scan["depth"], np.float32)
    seen = (scan["codes"] >= 0) & (depth > 0)
    kept["depths"], kept["cells_with_depth"] = np.unique(depth[seen], return_counts=True)
    if config.hvg_flavor != "seurat":  # the other flavors need them in a second pass
        kept |= {"depth": scan["depth"], "codes": scan["codes"]}
    return kept


def check_unchanged(pieces: Iterable[StudyPiece]) -> None:
    """Raise a `UserError`, and delete the sums, if the file of a piece has changed since its task was made."""
    for piece in pieces:
        if files.signature(piece.path) != piece.signature:
            piece.result.unlink(missing_ok=True)
            raise UserError(f"{piece.path}: was changed while it was read; run again")


def sum_again(task: SecondTask) -> None:
    """Read a piece's cells for the second pass of a flavor and save the sums, unless they exist already."""
    if not task.result.exists():
        with _opened(task.piece) as file:
            reader = StudyReader(task.piece, file, np.load(task.columns), task.num_genes)
            reader.codes = reader.saved("scan")["codes"]
            save(task.result, task.work.body(reader, task.work.request))


@contextlib.contextmanager
def _opened(piece: StudyPiece) -> Iterator[CountsFile]:
    """Open the file of a piece. Temporary files of its conversion to row order are removed afterwards."""
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
    """Return the sums of several pieces, merged to one data set, and its median depth.

    Parameters
    ----------
    parts
        Finished pieces, each with the positions of its file's genes among the merged ones, or -1 for those that are
        left out, int32 [G of the file]. A gene that a file lacks has count 0 in its cells. The order of pieces
        determines the rounding.
    num_genes
        Number of merged genes.

    Returns
    -------
    sums
        Sums of one group.
    median
        Median depth of the cells with counts, or nan if there are none.
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
    """Return the distinct ``values`` of several histograms, ascending, and the sums of their ``cells``, int64."""
    distinct, place = np.unique(np.concatenate(values), return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, place, np.concatenate(cells))
    return distinct, total


def median_of(values: np.ndarray, cells: np.ndarray) -> float:
    """Return the exact median of a histogram, as numpy computes it for float32, or nan if there are no cells."""
    ends = np.cumsum(cells)
    if not len(ends):
        return float("nan")
    middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], "right")
    return float(np.mean(values[middle]))
