"""Semantic tables: frozen vectors of perturbations, cell types or genes from a file, and their match with labels.

The vectors come from elsewhere: a protein language model, a model of molecules, texts (paper, App. Covariate
Encoder). docs/embeddings.md says what the files look like.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import Agent, agents
from perturbdiff.io.opening import read_npz
from perturbdiff.runtime import files, tabular
from perturbdiff.runtime.errors import UserError, listing, nearest

if TYPE_CHECKING:
    from perturbdiff.config.settings import ModelConfig

SemanticKind = Literal["perturbation", "cell_type", "gene"]
SEMANTIC_KINDS: tuple[SemanticKind, ...] = ("perturbation", "cell_type", "gene")
_SUFFIXES = (".parquet", ".npz")
_DAMAGED = (
    OSError, ValueError, EOFError, AttributeError, TypeError, NotImplementedError, zipfile.BadZipFile
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """Vectors by name.

    Attributes
    ----------
    names
        Each once.
    vectors
        float32 [n, e], finite.

    Raises
    ------
    UserError
        If names and vectors do not fit together, a name occurs twice or a number is not finite.
    """

    names: tuple[str, ...]
    vectors: np.ndarray
    _rows: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(map(str, self.names)))
        object.__setattr__(self, "vectors", np.ascontiguousarray(self.vectors, dtype=np.float32))
        problem = _problem(self.names, self.vectors)
        if problem:
            raise UserError(f"semantic table: {problem}")
        for row, name in enumerate(self.names):  # the row of the exact name, set below, takes precedence
            self._rows.setdefault(name.strip(), row)
        self._rows.update({name: row for row, name in enumerate(self.names)})

    @property
    def width(self) -> int:
        """Length of a vector."""
        return self.vectors.shape[1]

    def row(self, name: str) -> int | None:
        """Return the row of a name, compared exactly and then without surrounding blanks, or None."""
        return self._rows.get(name, self._rows.get(name.strip()))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.row(name) is not None

    def joined(self, other: EmbeddingTable) -> EmbeddingTable:
        """Return this table with the rows of ``other`` whose names it lacks."""
        if other.width != self.width:
            raise UserError(
                f"semantic table: its vectors have {other.width} numbers, the model's {self.width}; "
                "make it with the same encoder"
            )
        new = [row for row, name in enumerate(other.names) if name not in self]
        names = (*self.names, *(other.names[row] for row in new))
        return EmbeddingTable(names, np.concatenate([self.vectors, other.vectors[new]]))

    def beside(self, other: EmbeddingTable) -> EmbeddingTable:
        """Return vectors of all names of both tables: those of this one, those of ``other``, and what is known.

        Each table is centred and scaled to mean square 1, so that both count alike. A name that a table lacks has zeros
        there, which is the table's mean. Two last numbers say which table has the name, 1 or 0.
        """
        names = (*self.names, *(name for name in other.names if name not in self))
        parts, known = [], []
        for table in (self, other):
            centred = table.vectors - table.vectors.mean(axis=0, dtype=np.float64)
            scaled = centred / max(float(np.sqrt(np.mean(centred**2))), 1e-12)
            rows = [table.row(name) for name in names]
            parts.append(np.array([np.zeros(table.width) if row is None else scaled[row] for row in rows]))
            known.append([[float(row is not None)] for row in rows])
        return EmbeddingTable(names, np.concatenate([*parts, *map(np.array, known)], axis=1))

    @classmethod
    def read(cls, path: Path) -> EmbeddingTable:
        """Read a parquet or npz file; see docs/embeddings.md.

        Raises
        ------
        UserError
            If there is no such file, or it is no table of names and finite vectors of one length.
        """
        files.existing(path, "semantic table")
        if path.suffix not in _SUFFIXES:
            raise UserError(
                f"{path}: a semantic table is a .parquet or .npz file, not '{path.suffix or 'without a suffix'}'"
            )
        names, vectors = _read_parquet(path) if path.suffix == ".parquet" else _read_npz(path)
        try:
            return cls(tuple(names), vectors)
        except UserError as error:
            raise UserError(str(error).replace("semantic table", str(path), 1)) from None

    def write(self, path: Path) -> None:
        """Write the table as .parquet (a column ``name``, then the numbers) or .npz; equal tables, equal bytes.

        Raises
        ------
        UserError
            If the suffix is another, or the place cannot be written.
        """
        if path.suffix not in _SUFFIXES:
            raise UserError(f"{path}: a semantic table is written as .parquet or .npz")
        with files.writing(path) as partial:
            if path.suffix == ".parquet":
                columns = {f"v{i}": self.vectors[:, i] for i in range(self.width)}
                pd.DataFrame({"name": list(self.names), **columns}).to_parquet(partial, index=False)
            else:
                partial.write_bytes(self.to_npz())

    def to_npz(self) -> bytes:
        """Return the table as the bytes of an npz file."""
        buffer = io.BytesIO()
        np.savez(buffer, names=np.array(self.names, dtype=np.str_), vectors=self.vectors)
        return buffer.getvalue()


def write_as(table: EmbeddingTable, path: Path, suffix: str) -> None:
    """Write a table in the format of a suffix (see `EmbeddingTable.write`) to a path without one."""
    with_suffix = path.with_name(path.name + suffix)
    table.write(with_suffix)
    with_suffix.replace(path)


@dataclass(frozen=True)
class SemanticRows:
    """Vectors of labels, and how they were found.

    Attributes
    ----------
    vectors
        float32 [labels, e].
    agent
        Labels that took their agent's vector, their dose left away.
    combined
        Labels made of several agents' vectors.
    missing
        Labels without a vector; they took the table's mean.
    """

    vectors: np.ndarray
    agent: tuple[str, ...] = ()
    combined: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def report(self, kind: str) -> str:
        """Return one line on which labels have which vectors."""
        line = f"{kind}: {len(self.vectors)} labels, vectors of {self.vectors.shape[1]} numbers"
        for what, labels in (
            ("by agent, without the dose", self.agent),
            ("combinations", self.combined),
            ("not in the table, its mean instead", self.missing),
        ):
            if labels:
                line += f"; {what}: {listing(labels, 5)}"
        return line


def semantic_rows(
    labels: Sequence[str],
    table: EmbeddingTable,
    settings: ModelConfig,
    *,
    kind: SemanticKind = "perturbation",
    control: str | None = None,
    control_by_name: bool = False,
) -> SemanticRows:
    """Return the vectors of ``labels`` from a table.

    A name is looked up as it is, then without surrounding blanks. A perturbation that the table lacks is taken
    apart: its agent without the dose, or the mean or sum of its agents (``combination``).

    Parameters
    ----------
    labels
        What to look up.
    table
        Where.
    settings
        ``control_embedding``, ``combination``, ``combination_separator`` and ``missing_embedding`` are used.
    kind
        What the labels are; only perturbations are taken apart.
    control
        The label of the control, whose vector is the mean of the table's rows (paper) or, with
        ``control_embedding='scalar'``, the mean of all its numbers in every place (released).
    control_by_name
        The control is looked up as any other label.

    Raises
    ------
    UserError
        If labels are not in the table and ``missing_embedding`` is ``error``.
    """
    mean = table.vectors.mean(axis=0, dtype=np.float64)
    of_control = np.full_like(mean, mean.mean()) if settings.control_embedding == "scalar" else mean
    vectors = np.empty((len(labels), table.width), np.float32)
    notes: dict[str, list[str]] = {"agent": [], "combined": [], "missing": []}
    for place, label in enumerate(labels):
        if label == control and not control_by_name:
            vectors[place] = of_control
            continue
        vector, how = find(label, table, settings, parts=kind == "perturbation", control=control)
        vectors[place] = mean if vector is None else vector
        if how:
            notes[how].append(label)
    missing = notes["missing"]
    if missing and settings.missing_embedding == "error":
        raise UserError(
            f"the semantic table lacks {kind} {listing(missing)}{nearest(missing[0], table.names)}; add them to the "
            "table, or take its mean for them with --set model.missing_embedding=mean"
        )
    return SemanticRows(vectors, *(tuple(notes[how]) for how in ("agent", "combined", "missing")))


def find(
    label: str,
    table: EmbeddingTable,
    settings: ModelConfig,
    *,
    parts: bool = True,
    control: str | None = None,
) -> tuple[np.ndarray | None, str]:
    """Return a label's vector [e] or None, and how it was found: '', ``agent``, ``combined`` or ``missing``.

    With ``parts`` a label that the table lacks is taken apart; ``control`` is no agent of a combination.
    """
    whole = table.row(label)
    if whole is not None:
        return table.vectors[whole], ""
    of_label = agents(label, settings.combination_separator, names=table, control=control) if parts else ()
    rows = [_agent_row(agent, table) for agent in of_label]
    known = [row for row in rows if row is not None]
    if not rows or len(known) < len(rows):
        return None, "missing"
    if len(rows) == 1:
        return table.vectors[known[0]], "agent"
    vectors = table.vectors[known].astype(np.float64)
    return (vectors.sum(0) if settings.combination == "sum" else vectors.mean(0)), "combined"


def _agent_row(agent: Agent, table: EmbeddingTable) -> int | None:
    """Return the row of an agent at its dose if the table has one, else of the agent."""
    name, dose = agent
    exact = None if dose is None else table.row(f"{name}@{dose:g}")
    return table.row(name) if exact is None else exact


def _problem(names: Sequence[str], vectors: np.ndarray) -> str:
    """Return what is wrong with a table, or an empty string."""
    if vectors.ndim != 2 or not vectors.size:
        return "it is empty" if not vectors.size else "the vectors are not a matrix [names, numbers]"
    if len(names) != len(vectors):
        return f"{len(names)} names for {len(vectors)} vectors"
    index = pd.Index(names)
    if not index.is_unique:
        return f"names occur twice: {listing(index[index.duplicated()].unique())}; give each name one vector"
    wrong = ~np.isfinite(vectors).all(axis=1)
    if wrong.any():
        return f"vectors with missing or infinite numbers: {listing(index[wrong])}"
    return ""


def _read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    frame = tabular.read_parquet(path, "write names as text and vectors as float32")
    if "name" not in frame and frame.index.name == "name":
        frame = frame.reset_index()
    if "name" not in frame:
        raise UserError(f"{path}: lacks the column 'name'; it has {listing(frame.columns, 4)}")
    unnamed = int(np.sum(pd.isna(frame["name"].to_numpy(object))))
    if unnamed:
        raise UserError(f"{path}: column 'name' has {unnamed} missing values")
    names = frame.pop("name").astype(str).tolist()
    if list(frame.columns) == ["vector"] and frame["vector"].dtype == object:
        lengths = {np.size(value) for value in frame["vector"]}
        if len(lengths) > 1:
            raise UserError(f"{path}: vectors of different lengths, {listing(map(str, sorted(lengths)), 4)}")
        try:
            return names, np.stack([np.asarray(value, np.float32) for value in frame["vector"]])
        except (TypeError, ValueError):
            raise UserError(f"{path}: column 'vector' does not hold lists of numbers") from None
    for column in frame:
        kind = frame[column].dtype
        if not pd.api.types.is_numeric_dtype(kind) or pd.api.types.is_complex_dtype(kind):
            raise UserError(
                f"{path}: column '{column}' is not a number; all columns but 'name' are the vector"
            )
    return names, frame.to_numpy(np.float32, na_value=np.nan)


def _read_npz(path: Path) -> tuple[list[str], np.ndarray]:
    try:
        names, vectors = read_npz(path, ("names", "vectors"))
    except KeyError:
        raise UserError(f"{path}: needs the arrays 'names' and 'vectors'") from None
    except _DAMAGED as error:
        pickled = zipfile.is_zipfile(path) and "allow_pickle" in str(error)
        hint = "it holds pickled objects" if pickled else "it is not an npz file"
        raise UserError(
            f"{path}: cannot be read, {hint}; write names as text and vectors as float32"
        ) from None
    if names.dtype.kind not in "US" or names.ndim != 1:
        raise UserError(f"{path}: 'names' must be a list of texts, not {names.dtype} {list(names.shape)}")
    if vectors.dtype.kind not in "fiu":
        raise UserError(f"{path}: 'vectors' must be numbers, not {vectors.dtype}")
    return [n.decode() if isinstance(n, bytes) else str(n) for n in names.tolist()], vectors.astype(
        np.float32
    )
