"""Maps covariate labels to embedding ids, and the genes of a store to the gene list of a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.conditions.gene_names import unshared
from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.compiled import kernel
from perturbdiff.runtime.errors import UserError, listing, nearest

Kind = Literal["perturbation", "cell_type", "batch", "datasets"]
KINDS: tuple[Kind, ...] = ("perturbation", "cell_type", "batch", "datasets")
FORMAT = 1


@dataclass(frozen=True)
class Vocabulary:
    """Labels of each covariate and their ids. Id 0 means "none or unknown", and the first label has id 1.

    Attributes
    ----------
    perturbation, cell_type, batch, datasets
        Labels in the order of their ids, without repeats.
    control
        The perturbation label of control cells. Controls of stores that use another label share its id.
    """

    perturbation: tuple[str, ...]
    cell_type: tuple[str, ...]
    batch: tuple[str, ...]
    datasets: tuple[str, ...] = ("all",)
    control: str = "control"
    _ids: dict[str, dict[str, int]] = field(
        default_factory=dict[str, dict[str, int]], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for kind in KINDS:
            labels = getattr(self, kind)
            ids = {label: i for i, label in enumerate(labels, start=1)}
            if len(ids) != len(labels):
                twice = next(label for i, label in enumerate(labels) if label in labels[:i])
                raise UserError(f"vocabulary: {kind} '{twice}' occurs twice; every label needs one id")
            self._ids[kind] = ids
        if self.control not in self._ids["perturbation"]:
            raise UserError(f"vocabulary: the control label '{self.control}' is not among its perturbations")

    @classmethod
    def from_conditions(
        cls, tables: Sequence[pd.DataFrame], *, control: str, datasets: Sequence[str] = ("all",)
    ) -> Vocabulary:
        """Collect and sort the labels of condition tables (`Store.conditions`, one for each store).

        Controls get the label ``control``, whatever label their store uses.
        """
        labels: dict[str, set[str]] = {"perturbation": {control}, "cell_type": set(), "batch": set()}
        for table in tables:
            perturbed = table[~table["is_control"].to_numpy(bool)]
            labels["perturbation"] |= set(perturbed["perturbation"].astype(str))
            labels["cell_type"] |= set(table["cell_type"].astype(str))
            labels["batch"] |= set(table["batch"].astype(str))
        ordered = {kind: tuple(sorted(names)) for kind, names in labels.items()}
        return cls(**ordered, datasets=tuple(datasets), control=control)

    def size(self, kind: Kind) -> int:
        """Return the number of ids of a covariate, including the reserved id 0."""
        return len(self._ids[kind]) + 1

    def __contains__(self, item: tuple[Kind, str]) -> bool:
        kind, label = item
        return label in self._ids[kind]

    def encode(self, kind: Kind, labels: Iterable[str], *, strict: bool = False) -> np.ndarray:
        """Return the ids of ``labels`` as int64 [n]. An unknown label gets 0.

        Raises
        ------
        UserError
            If ``strict`` and a label is unknown.
        """
        ids = self._ids[kind]
        labels = [str(label) for label in labels]
        unknown = [label for label in dict.fromkeys(labels) if label not in ids] if strict else []
        if unknown:
            raise UserError(
                f"the model was not trained with {kind} {listing(unknown)}{nearest(unknown[0], ids)}; "
                f"leave these conditions out, or train a model with them or with semantic vectors (--embedding)"
            )
        return np.array([ids.get(label, 0) for label in labels], dtype=np.int64)

    def encode_conditions(self, conditions: pd.DataFrame) -> dict[Kind, np.ndarray]:
        """Return int64 ids [n_conditions] of the three covariates of a condition table."""
        perturbation: np.ndarray = conditions["perturbation"].astype(str).to_numpy(object)
        if "is_control" in conditions:
            perturbation = np.where(conditions["is_control"].to_numpy(bool), self.control, perturbation)
        return {
            "perturbation": self.encode("perturbation", perturbation),
            "cell_type": self.encode("cell_type", conditions["cell_type"]),
            "batch": self.encode("batch", conditions["batch"]),
        }

    def extended(self, other: Vocabulary) -> Vocabulary:
        """Return this vocabulary with the missing labels of ``other`` appended. Old ids do not change."""

        def grown(kind: Kind) -> tuple[str, ...]:
            old, new = getattr(self, kind), getattr(other, kind)
            if kind == "perturbation":  # both control labels mean the same
                new = tuple(label for label in new if label != other.control)
            return (*old, *(label for label in new if label not in self._ids[kind]))

        return Vocabulary(**{kind: grown(kind) for kind in KINDS}, control=self.control)

    def with_labels(self, kind: Kind, labels: Iterable[str]) -> Vocabulary:
        """Return this vocabulary with the missing ones of ``labels`` appended to a covariate."""
        new = tuple(label for label in dict.fromkeys(labels) if label not in self._ids[kind])
        return dataclasses.replace(self, **{kind: (*getattr(self, kind), *new)})

    def without(self, kind: Kind, labels: Iterable[str]) -> Vocabulary:
        """Return this vocabulary without some labels of a covariate. The ids of the others change."""
        gone = set(labels)
        return dataclasses.replace(
            self, **{kind: tuple(label for label in getattr(self, kind) if label not in gone)}
        )

    def to_json(self, path: Path) -> None:
        """Write the labels in the order of their ids."""
        record = {
            "format": FORMAT,
            "control": self.control,
            **{kind: list(getattr(self, kind)) for kind in KINDS},
        }
        files.write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def from_json(cls, path: Path) -> Vocabulary:
        """Read what `to_json` wrote.

        Raises
        ------
        UserError
            If the file is missing, not a vocabulary of this package, or of a newer format.
        """
        record = untrusted.read(files.existing(path, "vocabulary"), "JSON")
        try:
            labels = {kind: _labels(record[kind]) for kind in KINDS}
            version, control = int(record["format"]), _labels([record["control"]])[0]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{path}: not a vocabulary of this package ({error})") from None
        if version > FORMAT:
            raise UserError(f"{path}: format {version} is newer than this version reads; update perturbdiff")
        return cls(**labels, control=control)


def _labels(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        raise TypeError("labels must be a list of texts")
    return tuple(value)


class GeneMap:
    """Places a store's columns in the order of a model's gene list, by name.

    Genes that the store lacks are zero. Genes that the model does not know are left out.

    Parameters
    ----------
    source
        Names of the columns of the store.
    target
        Names of the columns of the model.
    name, target_name
        Names of the source and of the owner of the target, for messages.

    Attributes
    ----------
    columns
        int32 [len(source)]: target column of each source column, or -1 if it is left out.
    missing, extra
        Names that only the target has, and names that only the source has.

    Raises
    ------
    UserError
        If a name occurs twice, or if the lists have no name in common.
    """

    def __init__(
        self, source: Sequence[str], target: Sequence[str], *, name: str = "input", target_name: str = "model"
    ) -> None:
        self.source, self.target, self.name = list(map(str, source)), list(map(str, target)), name
        self.target_name = target_name
        for what, genes in ((name, self.source), (f"gene list of the {target_name}", self.target)):
            index = pd.Index(genes)
            if not index.is_unique:
                twice = index[index.duplicated()].unique()
                raise UserError(f"{what}: genes occur twice: {listing(twice)}; make the names unique")
        position = {gene: i for i, gene in enumerate(self.target)}
        self.columns = np.array([position.get(gene, -1) for gene in self.source], dtype=np.int32)
        present = set(self.source)
        self.missing = [gene for gene in self.target if gene not in present]
        self.extra = [gene for gene, column in zip(self.source, self.columns, strict=True) if column < 0]
        if len(self.missing) == len(self.target):
            raise UserError(f"{name}: {unshared(self.source, self.target, 'here', f'the {target_name}')}")

    @property
    def identity(self) -> bool:
        """Whether source and target are the same list in the same order."""
        return self.source == self.target

    def report(self) -> str:
        """Return one line that says how the genes match."""
        shared = len(self.target) - len(self.missing)
        line = f"{self.name}: {shared} of the {self.target_name}'s {len(self.target)} genes found"
        if self.missing:
            line += f"; set to zero: {listing(self.missing, 5)}"
        if self.extra:
            line += f"; not used: {listing(self.extra, 5)}"
        return line

    def apply(self, matrix: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return ``matrix`` [n, source] as CSR [n, target] in the same units."""
        if self.identity:
            return matrix
        placed = self.columns[np.asarray(matrix.indices)]
        keep = placed >= 0
        counted = np.concatenate([[0], np.cumsum(keep)])
        indptr = counted[np.asarray(matrix.indptr)]
        result = sparse.csr_matrix(
            (np.asarray(matrix.data)[keep], placed[keep], indptr), shape=(len(indptr) - 1, len(self.target))
        )
        result.sort_indices()
        return result

    def dense(
        self, matrix: sparse.csr_matrix, out: np.ndarray | None = None, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Return ``matrix`` [n, source] as float32 [n, target].

        With ``out`` [N, target], row i of ``matrix`` is written to its row ``rows[i]`` (default: row i).
        """
        indptr = np.asarray(matrix.indptr, np.int64)  # fixed types: the kernel is compiled once
        data, indices = np.asarray(matrix.data, np.float32), np.asarray(matrix.indices, np.int32)
        if out is None:
            out = np.empty((len(indptr) - 1, len(self.target)), dtype=np.float32)
        place = np.arange(len(indptr) - 1) if rows is None else np.asarray(rows, np.int64)
        _scatter(data, indices, indptr, self.columns, place, out)
        return out


@kernel
def _scatter(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    columns: np.ndarray,
    rows: np.ndarray,
    out: np.ndarray,
) -> None:
    for i in range(len(rows)):
        row = rows[i]
        out[row, :] = 0
        for position in range(indptr[i], indptr[i + 1]):
            column = columns[indices[position]]
            if column >= 0:
                out[row, column] = data[position]
