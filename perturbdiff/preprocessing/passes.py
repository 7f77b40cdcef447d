"""Passes over the cells of raw inputs. A pass has a task for each *piece*, which writes its result to a file.

A piece is a range of rows of one input. Pieces depend only on the inputs, not on the number of workers or the memory,
and results are merged in the order of pieces. Equal inputs therefore give equal bits. A piece whose result is in the
scratch folder is done, so a killed run continues there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.config.settings import DataConfig
from perturbdiff.io.counts import CountsFile, Inputs
from perturbdiff.io.matrices import Block
from perturbdiff.runtime.task_runner import TaskRunner

VALUES_PER_PIECE = 100_000_000
"""Number of stored values in a piece: about 100,000 cells, which take some seconds."""

DROPPED = -1
"""Code of a cell that a filter removed."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of input ``file``. ``first`` is the number of the first one among all cells."""

    number: int
    file: int
    start: int
    stop: int
    first: int


class PieceReader:
    """The argument of a pass's body: one piece and what is known of it.

    Attributes
    ----------
    piece
        The rows.
    file
        The open input, for messages and names of cells.
    scratch
        Folder of all results.
    num_genes
        Number of genes of all inputs together.
    columns
        Position of each column of the file among these genes, or -1 if it is not used, int32.
    codes
        Condition of each cell of the piece, or `DROPPED` for cells that a filter removed, int32.
    """

    def __init__(self, task: _Task, file: CountsFile) -> None:
        self.piece, self.file, self.scratch = task.piece, file, task.scratch
        self.columns = np.load(task.scratch / f"columns-{task.piece.file:04d}.npy")
        self.num_genes = task.num_genes
        if task.filtered is None:
            every = np.load(task.scratch / "codes.npy", mmap_mode="r")
            self.codes = np.array(every[task.piece.first : task.piece.first + self.num_cells])
        else:
            self.codes = self.saved(task.filtered)["codes"]

    @property
    def num_cells(self) -> int:
        """Number of rows in the piece."""
        return self.piece.stop - self.piece.start

    def blocks(self) -> Iterator[Block]:
        """Yield the piece's rows in blocks, whose ``start`` and ``stop`` are rows of the file."""
        return self.file.blocks(self.piece.start, self.piece.stop)

    def saved(self, name: str) -> dict[str, np.ndarray]:
        """Return what an earlier pass saved for this piece."""
        return load(_result(self.scratch, name, self.piece))


Body = Callable[[PieceReader, Any], dict[str, np.ndarray]]
"""Reads a piece and returns arrays to save. It is defined at the top level of a module."""


@dataclass(frozen=True)
class _Task:
    """One piece of one pass, in the form that is sent to a worker."""

    piece: Piece
    path: Path
    config: DataConfig
    scratch: Path
    num_genes: int
    name: str
    body: Body
    argument: Any
    filtered: str | None


class Passes:
    """The passes over one set of inputs.

    Parameters
    ----------
    inputs
        The open inputs.
    crew
        Runs the tasks.
    scratch
        Folder of results, which all workers can read.

    Attributes
    ----------
    pieces
        All pieces, in order.
    filtered
        Name of the pass whose ``codes`` say which cells are left. None before any filter.
    """

    def __init__(self, inputs: Inputs, crew: TaskRunner, scratch: Path) -> None:
        self.inputs, self.crew, self.scratch = inputs, crew, scratch.absolute()
        self.pieces = plan_pieces(inputs)
        self.filtered: str | None = None
        self.scratch.mkdir(exist_ok=True)
        for number, file in enumerate(inputs.files):
            columns = inputs.columns_of(file, inputs.genes)
            save(self.scratch / f"columns-{number:04d}.npy", columns)
        paths = [file.path.absolute() for file in inputs.files]
        crew.run(
            _prepare,
            [(path, inputs.config, self._scratch_of(number)) for number, path in enumerate(paths)],
            label="opening inputs", unit="files",
        )  # fmt: skip

    def _scratch_of(self, file: int) -> Path:
        return self.scratch / f"input-{file:04d}"

    def set_codes(self, codes: np.ndarray) -> None:
        """Save the condition of every cell, int32 [cells], for all passes."""
        save(self.scratch / "codes.npy", codes)

    def run(self, name: str, body: Body, argument: Any = None, *, label: str) -> None:
        """Run ``body`` over all pieces that have no result of this name yet."""
        left = [piece for piece in self.pieces if not _result(self.scratch, name, piece).exists()]
        files, genes = self.inputs.files, len(self.inputs.genes)
        tasks = [
            _Task(
                p, files[p.file].path.absolute(), self.inputs.config, self.scratch, genes, name, body, argument,
                self.filtered,
            )
            for p in left
        ]  # fmt: skip
        self.crew.run(_run, tasks, weights=[p.stop - p.start for p in left], label=label)

    def results(self, name: str) -> Iterator[dict[str, np.ndarray]]:
        """Yield the results of a finished pass in the order of pieces, one at a time."""
        for piece in self.pieces:
            yield load(_result(self.scratch, name, piece))


def plan_pieces(inputs: Inputs) -> list[Piece]:
    """Cut the inputs into pieces of about `VALUES_PER_PIECE` stored values."""
    pieces: list[Piece] = []
    for number, (file, offset) in enumerate(zip(inputs.files, inputs.offsets, strict=False)):
        count = max(1, -(-file.matrix.num_values // VALUES_PER_PIECE))
        edges = np.linspace(0, file.n_cells, min(count, file.n_cells) + 1).astype(np.int64).tolist()
        for start, stop in itertools.pairwise(edges):
            pieces.append(Piece(len(pieces), number, start, stop, int(offset) + start))
    return pieces


def save(path: Path, arrays: np.ndarray | dict[str, np.ndarray]) -> None:
    """Write one array (npy) or several (npz). The file appears only when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as sink:
        if isinstance(arrays, dict):
            np.savez(sink, **arrays)  # type: ignore[arg-type]
        else:
            np.save(sink, arrays)
        sink.flush()
        os.fsync(sink.fileno())
    partial.replace(path)


def _result(scratch: Path, name: str, piece: Piece) -> Path:
    return scratch / f"{name}-{piece.number:05d}.npz"


def load(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file that `save` wrote."""
    with np.load(path) as arrays:
        return dict(arrays)


def _prepare(arguments: tuple[Path, DataConfig, Path]) -> None:
    """Convert an input that cannot be read by rows (see `CountsFile.prepare`)."""
    file = CountsFile(*arguments, checked=True)
    try:
        file.prepare()
    finally:
        file.close()


def _run(task: _Task) -> None:
    file = CountsFile(task.path, task.config, task.scratch / f"input-{task.piece.file:04d}", checked=True)
    try:
        arrays = task.body(PieceReader(task, file), task.argument)
    finally:
        file.close()
    save(_result(task.scratch, task.name, task.piece), arrays)
