"""Many studies and the composite data sets they are merged into: what they hold, and which goes where."""

from __future__ import annotations

import csv
import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_lists import KINDS, kinds_of, main_kind, unique_names
from perturbdiff.io.counts import CountsFile
from perturbdiff.io.matrices import CscMatrix
from perturbdiff.preprocessing.passes import VALUES_PER_PIECE
from perturbdiff.runtime.errors import UserError, listing, nearest

logger = logging.getLogger(__name__)

NUM_COMPOSITES = 23
"""The paper merges 1,139 studies into as many."""


@dataclass(frozen=True)
class Study:
    """One file of counts.

    Attributes
    ----------
    name
        Its file name, with its folder where file names repeat.
    path
        Where it is.
    n_cells
        Its rows.
    genes
        Number of each of its genes among the names of the corpus, int32, in the file's order.
    num_values
        Stored values.
    num_pieces
        Tasks that reading it is cut into. One where the matrix is stored by columns: ranges of its rows cannot be
        read by themselves.
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
        """Cells of each study, int64."""
        return np.array([study.n_cells for study in self.studies], np.int64)


def study_paths(given: Sequence[Path]) -> list[Path]:
    """Return the files of studies; a text file (.txt) stands for the paths it lists, relative to its folder.

    Raises
    ------
    UserError
        If nothing is given, a list cannot be read or a study is given twice.
    """
    found: list[Path] = []
    for path in map(Path, given):
        if path.suffix == ".txt":
            if not path.is_file():
                raise UserError(f"list of studies not found: {path}")
            lines = [line.strip() for line in path.read_text().splitlines()]
            found += [path.parent / line for line in lines if line and not line.startswith("#")]
        else:
            found.append(path)
    if not found:
        raise UserError("no study given; give files of raw counts, or a .txt file that lists them")
    places = pd.Index([str(path.resolve()) for path in found])
    if not places.is_unique:
        raise UserError(f"{places[places.duplicated()][0]}: given twice; give each study once")
    return found


def survey(paths: Sequence[Path], config: DataConfig, scratch: Path) -> Corpus:
    """Open every study once: its number of cells and its genes.

    Names are held once, a study's genes as 4 bytes each, and equal gene lists once.

    Raises
    ------
    UserError
        If a study cannot be read, names its genes in another way than the others or shares none with them.
    """
    number: dict[str, int] = {}
    lists: dict[bytes, np.ndarray] = {}
    studies = []
    for name, path in sorted(zip(unique_names(paths), paths, strict=True)):
        file = CountsFile(path, config, scratch / "survey")
        try:
            genes = np.array([number.setdefault(gene, len(number)) for gene in file.genes], np.int32)
            genes = lists.setdefault(genes.tobytes(), genes)
            by_columns, values = isinstance(file.matrix, CscMatrix), file.matrix.num_values
            num_pieces = 1 if by_columns else max(1, -(-values // VALUES_PER_PIECE))
            studies.append(Study(name, path, file.n_cells, genes, values, num_pieces))
        finally:
            file.close()
    corpus = Corpus(studies, np.array(list(number), object))
    _check_names(corpus)
    return corpus


def _check_names(corpus: Corpus) -> None:
    """Raise a `UserError` unless the studies name their genes in one way and each shares some with another."""
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
    """Return a composite for each study so that composites have similar numbers of cells.

    The largest study goes first, each to the composite that has the fewest cells so far; ties go by the study's
    name and the composite's number. The result depends on names and sizes alone.

    Parameters
    ----------
    corpus
        The studies.
    num
        Number of composites; None for `NUM_COMPOSITES`, or one for each study if there are fewer.

    Raises
    ------
    UserError
        If there are fewer studies than composites were asked for.
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
    """Return the composite that a CSV with the columns ``study, composite`` gives for each study.

    A study is known by its file name, by more of its path if file names repeat, or by its path.

    Raises
    ------
    UserError
        If the table cannot be read, lacks a study or gives it two composites.
    """
    given = _read_table(table)
    studies = corpus.studies
    chosen: list[str] = []
    for study in studies:
        label = next((given[key] for key in (study.name, str(study.path)) if key in given), None)
        if label is None:
            raise UserError(
                f"{table}: has no row for study '{study.name}'{nearest(study.name, given)} give it a composite"
            )
        chosen.append(label)
    extra = sorted(set(given) - {s.name for s in studies} - {str(s.path) for s in studies})
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
    given: dict[str, str] = {}
    for number, row in enumerate(rows, 2):
        study, composite = (row.get("study") or "").strip(), (row.get("composite") or "").strip()
        if not study or not composite:
            raise UserError(
                f"{table}, line {number}: needs a study and a composite (columns study, composite)"
            )
        if given.setdefault(study, composite) != composite:
            raise UserError(f"{table}, line {number}: '{study}' has two composites; give it one")
    if not given:
        raise UserError(f"{table}: has no rows; give the columns study, composite")
    return given
