"""The stage ``export``: predictions of whole counts as a file for a competition."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.io.input_file import InputFile
from perturbdiff.io.opening import open_root
from perturbdiff.predictions import KIND
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.files import existing
from perturbdiff.runtime.progress import track
from perturbdiff.splits.store_export import H5Writer
from perturbdiff.submission.cell_survey import CellSurvey, blocks, survey
from perturbdiff.submission.requirements import CONTEXT, RULES, Panel, Rules, read_panel

logger = logging.getLogger(__name__)

_FEW_VALUES = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Request:
    """What is to be exported.

    Attributes
    ----------
    predictions
        File that `sample` wrote with ``values="counts"``.
    rules
        A key of `RULES`.
    genes, perturbations, contexts
        See `perturbdiff.submission.requirements.read_panel`.
    cells
        Number of cells of each perturbation in each context, where another is asked for than the rules say.
    context_column
        Column of the predictions that names the context: ``cell_type`` or ``batch``.
    """

    predictions: Path
    rules: str
    genes: Path
    perturbations: Path | None = None
    contexts: tuple[str, ...] | None = None
    cells: int | None = None
    context_column: str = "cell_type"

    def read(self) -> tuple[Rules, Panel]:
        """Return the rules and the panel.

        Raises
        ------
        UserError
            If there are no such rules, a file of the panel cannot be read, or the rules need one that was not given.
        """
        if self.rules not in RULES:
            raise UserError(
                f"--for '{self.rules}'{nearest(self.rules, RULES)} is not known: {listing(RULES)}"
            )
        rules = RULES[self.rules]
        panel = read_panel(self.genes, self.perturbations, self.contexts)
        if rules.panel and panel.perturbations is None:
            raise UserError(
                f"export: --for {self.rules} needs the list of perturbations; give the competition's pert_counts.csv "
                "by --perturbations"
            )
        if rules.panel and panel.contexts is None:
            raise UserError(
                "export: the contexts are not known; keep the competition's manifest.json beside pert_counts.csv, or "
                "give them by --contexts A,B,C"
            )
        return (rules if self.cells is None else replace(rules, cells=self.cells)), panel


def check(request: Request) -> CellSurvey:
    """Look at what would be exported, and write nothing.

    Returns
    -------
    CellSurvey
        Its ``problems`` are all things that would be rejected.

    Raises
    ------
    UserError
        If the files cannot be read, or are not predictions of counts.
    """
    with _opened(request.predictions) as file:
        return survey(file, *request.read(), request.context_column)


def export(request: Request, out: Path, *, force: bool = False) -> Path:
    """Write a submission: h5ad with ``target_gene`` and ``context``, float32 CSR of whole numbers.

    Parameters
    ----------
    request
        What to export.
    out
        File to write, .h5ad.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If anything would be rejected; the message has a line for each thing. Nothing is written then.
    """
    if out.suffix != ".h5ad":
        raise UserError(f"{out}: a submission is one .h5ad file; give it that ending")
    rules, panel = request.read()
    files = {"predictions": request.predictions, "genes": request.genes}
    files |= {"perturbations": request.perturbations} if request.perturbations else {}
    settings: dict[str, Any] = {"for": request.rules, "context": request.context_column, "cells": rules.cells}
    settings |= {"contexts": list(panel.contexts or ())}
    with provenance.stage("export", out, config=settings, inputs=files, force=force) as stage:
        if not stage.skip:
            with _opened(request.predictions) as file:
                found = survey(file, rules, panel, request.context_column)
                if found.problems:
                    raise UserError(
                        f"{request.predictions}: would be rejected as {rules.what}", found.problems
                    )
                _tell(file, found, rules)
                _write(stage.path, file, found, panel, rules.columns)
            stage.results |= {"cells": len(found.table), "largest_sum": found.largest}
    return out


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[InputFile]:
    if provenance.beside(existing(path, "predictions"), "manifest").is_file():
        provenance.verify(path)
    with contextlib.closing(InputFile(path, open_root(path), may_be_empty=True)) as file:
        if file.declared.get("kind") != KIND:
            raise UserError(f"{path}: is no predictions file; give one that 'perturbdiff sample' wrote")
        if file.declared.get("scale") != "counts":
            raise UserError(
                f"{path}: its values are {file.declared.get('scale')}, and whole counts are asked for; sample again "
                "with --values counts"
            )
        yield file


def _tell(file: InputFile, found: CellSurvey, rules: Rules) -> None:
    """Log what is not in the submission, and which genes the model did not predict."""
    if found.genes.extra:
        logger.info("%d genes of the predictions are not in the panel and left out", len(found.genes.extra))
    if left := file.n_cells - len(found.table):
        logger.info("%d control cells are left out", left)
    logger.info("genes that are not predicted: %s", file.declared.get("unpredicted_genes", "not said"))
    logger.info("%s: %d cells, largest sum %.0f counts", rules.what, len(found.table), found.largest)


def _write(path: Path, file: InputFile, found: CellSurvey, panel: Panel, columns: tuple[str, ...]) -> None:
    integer = np.dtype(np.int32 if found.num_values <= _FEW_VALUES else np.int64)
    shape = (len(found.table), len(panel.genes))
    writer = H5Writer(path, shape, found.num_values, np.dtype(np.float32), integer, "gzip")
    labels = pd.DataFrame(dict.fromkeys(columns, found.table["perturbation"]))
    labels[CONTEXT] = found.table["context"]
    try:
        with track("exporting cells", len(found.table)) as progress:
            for cells, values in blocks(file, found):
                obs = labels.iloc[cells]
                indices = np.asarray(values.indices).astype(integer, copy=False)
                data = np.asarray(values.data).astype(np.float32)
                writer.append(
                    obs.set_axis(pd.Index(cells.astype(str), dtype=object)),
                    np.asarray(values.indptr), indices, data,
                )  # fmt: skip
                progress.advance(len(cells))
        writer.close(pd.DataFrame(index=pd.Index(panel.genes, dtype=object)), {})
    finally:
        writer.release()
