"""The command `merge` for sampling: join the parts of one run into the predictions file of a single run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import LABELS, SET
from perturbdiff.io.input_file import InputFile
from perturbdiff.io.matrices import Block
from perturbdiff.io.opening import open_root
from perturbdiff.method import SOURCES
from perturbdiff.predictions import DEPTH, KIND, NAMED, PredictionWriter, format_of
from perturbdiff.runtime import job_shards
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

_VALUES = 1 << 18  # read at once


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
    folder = format_of(Path(out)) == ".zarr"
    with job_shards.merging(
        parts, out, "sample", _is_part, unsharded={"shard": [0, 1]}, folder=folder, force=force
    ) as merge:
        if not merge.stage.skip:
            results = [record["results"] for record in merge.records]
            merge.stage.results |= {k: sum(int(part[k]) for part in results) for k in ("conditions", "cells")}
            _write(merge.stage.path, merge.parts, [int(part["cells"]) for part in results])
    return Path(out)


def _is_part(path: Path, manifest: Mapping[str, Any]) -> bool:
    return manifest["stage"] == "sample"


def _write(path: Path, parts: Sequence[Path], numbers: Sequence[int]) -> None:
    """Write the predicted cells of all parts, then the controls of all parts."""
    facts, genes, predicted = _heads(parts)
    names = {key: str(facts[key]) for key in ("method", "control", "dataset")}
    depth = float(facts["target_sum"])
    with (
        PredictionWriter(path, genes, target_sum=depth, facts=facts, predicted=predicted, **names) as writer,
        track("joining", 0) as work,
    ):
        for source in SOURCES:
            for part, number in zip(parts, numbers, strict=True):
                with _opened(part) as file:
                    rows = (0, number) if source == SOURCES[0] else (number, file.n_cells)
                    for block, obs in _pieces(file, *rows):
                        if (obs["source"] != source).any():
                            raise UserError(
                                f"{part}: does not have the {number} predicted cells that its manifest tells of, "
                                "then controls; make this part again"
                            )
                        writer.append(block.as_csr(len(genes)), obs)
                        work.advance(len(obs))


def _heads(parts: Sequence[Path]) -> tuple[dict[str, Any], list[str], np.ndarray | None]:
    """Return what the joined file declares, its genes and, with counts, which of them are predicted."""
    declared, genes, predicted = [], [], None
    for part in parts:
        with _opened(part) as file:
            declared.append(file.declared)
            genes.append(file.genes)
            if file.declared.get("scale") == "counts":
                predicted = file.gene_column("predicted")
        if genes[-1] != genes[0]:
            raise UserError(f"{part}: has other genes than {parts[0]}; make the parts again")
    whole = dict(declared[0])
    if "conditions_seen" in whole:
        whole["conditions_seen"] = sum(int(one["conditions_seen"]) for one in declared)
        first = [str(name) for one in declared for name in one.get("first_seen", ())][:NAMED]
        whole |= {"first_seen": first} if first else {}
    return whole, genes[0], predicted


@contextlib.contextmanager
def _opened(part: Path) -> Iterator[InputFile]:
    with contextlib.closing(InputFile(part, open_root(part), may_be_empty=True)) as file:
        if file.declared.get("kind") != KIND:
            raise UserError(
                f"{part}: cannot be read as predictions that 'perturbdiff sample' wrote; make this part again"
            )
        yield file


def _pieces(file: InputFile, start: int, stop: int) -> Iterator[tuple[Block, pd.DataFrame]]:
    """Yield the values and labels of rows ``start`` to ``stop``."""
    depth = [DEPTH] if file.declared.get("scale") == "counts" else []
    columns = {name: file.open_column(name) for name in (*LABELS, "source", "cell", SET, *depth)}
    for block in file.blocks(start, stop, _VALUES):
        yield block, pd.DataFrame({k: c.values(block.start, block.stop) for k, c in columns.items()})
