"""The command `merge` for sampling: join the parts of one run into the predictions file of a single run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.conditions.condition import LABELS
from perturbdiff.io import opening
from perturbdiff.method import SOURCES
from perturbdiff.predictions import NAMED, PredictionWriter, format_of
from perturbdiff.runtime import job_shards, provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

_ROWS = 1024  # cells held in memory at once


def merge(parts: Sequence[Path], out: Path, *, force: bool = False) -> Path:
    """Join the parts that `sample` wrote with ``shard=(I, N)``.

    The file and its manifest equal those of a single run to the last byte. Cells are copied in pieces.

    Parameters
    ----------
    parts
        All N files, .h5ad or .zarr, in any order.
    out
        File to write, .h5ad or .zarr.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a file is not a part or is damaged, or if parts are missing, given twice or from different runs.
    """
    out = Path(out)
    folder = format_of(out) == ".zarr"
    found, records = job_shards.ordered([Path(part) for part in parts], "sample", _is_part)
    base = {key: records[0][key] for key in job_shards.DETERMINE}
    base["config"] = {**base["config"], "shard": [0, 1]}
    with provenance.stage(
        "sample", out, config={}, inputs=job_shards.roles(found), folder=folder, force=force, base=base
    ) as stage:
        if not stage.skip:
            stage.results |= {
                name: sum(int(record["results"][name]) for record in records)
                for name in ("conditions", "cells")
            }
            _write(stage.path, found, [int(record["results"]["cells"]) for record in records])
            stage.notes["parts"] = len(found)
    return out


def _is_part(path: Path, manifest: Mapping[str, Any]) -> bool:
    return manifest["stage"] == "sample"


def _write(path: Path, parts: Sequence[Path], predicted: Sequence[int]) -> None:
    """Write the predicted cells of all parts, then the controls of all parts."""
    facts, genes = _heads(parts)
    given = {key: str(facts[key]) for key in ("method", "control", "dataset")}
    with (
        PredictionWriter(path, genes, target_sum=float(facts["target_sum"]), facts=facts, **given) as writer,
        track("joining", 0) as work,
    ):
        for source in SOURCES:
            for part, number in zip(parts, predicted, strict=True):
                with _Cells(part) as cells:
                    span = (0, number) if source == SOURCES[0] else (number, cells.number)
                    for values, obs in cells.pieces(*span):
                        if (obs["source"] != source).any():
                            raise UserError(
                                f"{part}: does not have the {number} predicted cells that its manifest tells of, "
                                "then controls; make this part again"
                            )
                        writer.append(values, obs)
                        work.advance(len(obs))


def _heads(parts: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata of the joined file, and its genes."""
    facts, genes = [], []
    for part in parts:
        with _Cells(part) as cells:
            facts.append(cells.facts)
            genes.append(cells.genes)
        if genes[-1] != genes[0]:
            raise UserError(f"{part}: has other genes than {parts[0]}; make the parts again")
    whole = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in facts[0].items()
    }
    if "conditions_seen" in whole:
        whole["conditions_seen"] = sum(int(one["conditions_seen"]) for one in facts)
        first = [str(name) for one in facts for name in one.get("first_seen", ())][:NAMED]
        whole |= {"first_seen": first} if first else {}
    return whole, genes[0]


class _Cells:
    """A predictions file that is read in pieces; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable():
            root = opening.open_root(path)
            self._root, obs = root, root["obs"]
            self.facts: dict[str, Any] = dict(_element(root["uns"])["perturbdiff"])
            self.genes = [str(gene) for gene in _element(root["var"]).index]
            self.number = root["X"]["indptr"].shape[0] - 1
            self._names = obs["cell"].asstr() if isinstance(root, h5py.File) else obs["cell"]
            self._labels = {
                name: np.asarray(_element(obs[name]["categories"]), dtype=object)
                for name in (*LABELS, "source")
            }

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (AttributeError, KeyError, OSError, ValueError) as error:
            raise UserError(
                f"{self.path}: cannot be read as predictions that 'perturbdiff sample' wrote "
                f"({' '.join(str(error).split())}); make this part again"
            ) from None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[sparse.csr_matrix, pd.DataFrame]]:
        """Yield the values and labels of the cells from ``start`` to ``stop``."""
        for first in range(start, stop, _ROWS):
            with self._readable():
                found = self._rows(first, min(first + _ROWS, stop))
            yield found

    def _rows(self, first: int, last: int) -> tuple[sparse.csr_matrix, pd.DataFrame]:
        matrix, obs = self._root["X"], self._root["obs"]
        edges = np.asarray(matrix["indptr"][first : last + 1], dtype=np.int64)
        data, columns = (np.asarray(matrix[name][edges[0] : edges[-1]]) for name in ("data", "indices"))
        values = sparse.csr_matrix((data, columns, edges - edges[0]), shape=(last - first, len(self.genes)))
        found = {
            name: labels[np.asarray(obs[name]["codes"][first:last])] for name, labels in self._labels.items()
        }
        return values, pd.DataFrame({**found, "cell": np.asarray(self._names[first:last], dtype=object)})

    def __enter__(self) -> _Cells:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._root, h5py.File):
            self._root.close()


def _element(stored: Any) -> Any:
    return anndata.io.read_elem(stored)
