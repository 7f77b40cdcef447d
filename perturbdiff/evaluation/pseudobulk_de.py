"""DE between pseudobulks of replicates, beside the test of cells: how many DE genes hold from replicate to replicate.

Cells of one donor or guide are not independent, so that a test of cells finds genes that differ between replicates and
not by the perturbation (Squair et al. 2021, Nature Communications 12:5692). Counts are summed over the cells of each
replicate, and these sums are compared by DESeq2 (Love et al. 2014, Genome Biology 15:550; pydeseq2).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from perturbdiff.conditions.condition import Condition, Group
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cell_sources import StoreReader
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.condition_pass import Scored
from perturbdiff.evaluation.scoring.scopes import POOLED, Unit
from perturbdiff.io.columns import Texts, row_ranges
from perturbdiff.io.matrices import Sparse
from perturbdiff.io.row_file import RowFile
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.large_arrays import long_array
from perturbdiff.runtime.progress import track

LEAST_CELLS = 10  # a sum over fewer cells is mostly noise
_CELLS_AT_ONCE = 4096

Sums = dict[str, np.ndarray]
"""Sum of counts (float64 [G]) and, last, number of cells of each replicate, float64 [G + 1]."""


@dataclass(frozen=True)
class Replicates:
    """The replicate of each real cell.

    Attributes
    ----------
    pairs
        What is compared; the real side is read.
    codes
        Number of the replicate of each row of the truth, −1 for a cell without one.
    names
        Replicates by number.
    """

    pairs: Pairing
    codes: np.ndarray
    names: list[str]

    @classmethod
    def read(cls, pairs: Pairing, column: str) -> Replicates:
        """Read obs column ``column`` of the truth.

        Raises
        ------
        UserError
            If there is no such column.
        """
        reader = pairs.real.reader
        if isinstance(reader, StoreReader):
            return cls(pairs, *reader.labels(column))
        if not isinstance(reader, RowFile):
            raise UserError(f"{Path(reader.path)}: its cells have no column '{column}'")
        texts, found = Texts(), reader.open_column(column, "--replicate-col")
        codes = long_array(reader.n_cells, np.dtype(np.int32))
        for start, stop in row_ranges(reader.n_cells):
            codes[start:stop] = found.codes(start, stop, texts)
        return cls(pairs, codes, texts.names)

    @property
    def has_counts(self) -> bool:
        """Whether the truth holds counts, and not log1p values alone."""
        reader = self.pairs.real.reader
        return reader.has_counts if isinstance(reader, StoreReader) else self.pairs.real.depth is not None

    def of_condition(self, condition: Condition) -> Sums:
        """Return the sums of a condition's cells."""
        return self._sums(self.pairs.real.rows[condition])

    def of_controls(self) -> Mapping[Group, Sums]:
        """Return the sums of each group's controls."""
        return {group: self._sums(rows) for group, rows in self.pairs.controls.items()}

    def _sums(self, rows: np.ndarray) -> Sums:
        sums: Sums = {}
        for part in np.split(rows, range(_CELLS_AT_ONCE, len(rows), _CELLS_AT_ONCE)):
            counts, codes = self._counts(part), self.codes[part]
            for code in np.unique(codes[codes >= 0]):
                chosen = codes == code
                total = np.asarray(counts[chosen].sum(axis=0, dtype=np.float64)).ravel()
                add(sums, {self.names[code]: np.append(total, chosen.sum())})
        return sums

    def _counts(self, rows: np.ndarray) -> Sparse:
        reader = self.pairs.real.reader
        return reader.counts(rows) if isinstance(reader, StoreReader) else reader.expression(rows)


def add(sums: Sums, more: Mapping[str, np.ndarray]) -> Sums:
    """Add ``more`` to ``sums`` and return it."""
    for name, values in more.items():
        sums[name] = sums[name] + values if name in sums else values
    return sums


TABLE, SUMMARY = "de_pseudobulk.parquet", "pseudobulk.csv"
_LEAST_REPLICATES = 2
_LEAST_COUNTS = 10  # of a gene in all samples of a test


@dataclass(frozen=True)
class Tested:
    """The test of one perturbation.

    Attributes
    ----------
    p, q, log2_fold
        float64 [G]; NaN for genes that were not tested.
    design
        ``paired`` (within replicates), ``unpaired`` or empty.
    replicates
        Numbers of replicates of the perturbation and of the controls.
    reason
        Why there is no test; empty if there is one.
    """

    p: np.ndarray
    q: np.ndarray
    log2_fold: np.ndarray
    design: str
    replicates: tuple[int, int]
    reason: str = ""


def write_pseudobulk(
    folder: Path, pairs: Pairing, scored: Scored, config: EvaluateConfig
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Test the real cells of each perturbation by replicate and write ``de_pseudobulk.parquet`` and ``pseudobulk.csv``.

    Parameters
    ----------
    config
        Its ``replicate_column`` is the obs column of the truth that names the replicates.

    Returns
    -------
    tuple
        Facts for the summary, and findings: why there is no table, or not of all perturbations.

    Raises
    ------
    UserError
        If there is no such column.
    """
    assert config.replicate_column is not None
    replicates = Replicates.read(pairs, config.replicate_column)
    if reason := _missing(replicates, scored):
        return {}, [{"kind": "pseudobulk", "text": f"no DE of pseudobulks: {reason}", "count": 1}]
    groups, rows = replicates.of_controls(), []
    writer: pq.ParquetWriter | None = None
    total = sum(len(tested.unit.perturbations) for tested in scored.tested)
    with track("pseudobulk", total, "tests") as progress:
        for tested in scored.tested:
            real = tested.comparison(config).real
            controls = _pooled([groups[g] for g in {c.group for c in tested.unit.conditions} if g in groups])
            for i, name in enumerate(tested.unit.perturbations):
                found = replicate_test(_sums_of(replicates, tested.unit, name), controls, len(pairs.genes))
                for scope in tested.unit.scopes:
                    rows.append(_summary(scope, name, found, real.significant[i], real.log2_fold[i], config))
                    if not found.reason:
                        table = _table(scope, name, pairs.genes, found)
                        writer = writer or pq.ParquetWriter(folder / TABLE, table.schema, compression="zstd")
                        writer.write_table(table)
                progress.advance()
    if writer is not None:
        writer.close()
    summary = pd.DataFrame(rows)
    tabular.write_csv(summary, folder / SUMMARY)
    return _facts(summary, config.replicate_column), _left_out(summary)


def _missing(replicates: Replicates, scored: Scored) -> str:
    """Return what stands in the way of any test; empty if nothing does."""
    path = replicates.pairs.real.reader.path
    if not scored.wanted.tests:
        return "the chosen metrics need no test of cells to compare with"
    if not replicates.has_counts:
        return f"{path.name} holds log1p values, and a test of replicates needs counts"
    if importlib.util.find_spec("pydeseq2") is None:
        return "pydeseq2 is not installed; install it with pip install 'perturbdiff[pseudobulk]'"
    return ""


def _pooled(parts: Sequence[Mapping[str, np.ndarray]]) -> Sums:
    sums: Sums = {}
    for part in parts:
        add(sums, part)
    return sums


def _sums_of(replicates: Replicates, unit: Unit, perturbation: str) -> Sums:
    own = [c for c in unit.conditions if c.perturbation == perturbation]
    return _pooled([replicates.of_condition(condition) for condition in own])


def replicate_test(perturbed: Sums, controls: Sums, num_genes: int) -> Tested:
    """Compare a perturbation's replicates with those of the controls.

    Replicates of fewer than 10 cells are left out. If at least two replicates are on both sides (donors, batches),
    the test is within these replicates; otherwise (guides) the two groups of replicates are compared.
    """
    sides = [{n: s for n, s in side.items() if s[-1] >= LEAST_CELLS} for side in (perturbed, controls)]
    shared = sorted(sides[0].keys() & sides[1].keys())
    design = "paired" if len(shared) >= _LEAST_REPLICATES else "unpaired"
    names = [shared, shared] if design == "paired" else [sorted(side) for side in sides]
    counted = len(names[0]), len(names[1])
    nothing = np.full(num_genes, np.nan)
    if min(counted) < _LEAST_REPLICATES:
        reason = (
            f"{counted[0]} replicates of at least {LEAST_CELLS} cells, {counted[1]} of the controls; "
            f"{_LEAST_REPLICATES} on each side are needed"
        )
        return Tested(nothing, nothing, nothing, "", counted, reason)
    samples = np.rint([side[n][:-1] for side, own in zip(sides, names, strict=True) for n in own])
    genes = np.flatnonzero(samples.sum(axis=0) >= _LEAST_COUNTS)
    if len(genes) < 2:
        reason = f"fewer than two genes have {_LEAST_COUNTS} counts"
        return Tested(nothing, nothing, nothing, "", counted, reason)
    side = np.repeat(["perturbed", "control"], counted)
    replicate = np.array([f"r{shared.index(n)}" for n in shared * 2]) if design == "paired" else None
    columns = _deseq2(samples[:, genes].astype(np.int64), side, replicate)
    found = np.full((3, num_genes), np.nan)
    found[:, genes] = columns
    p, q, log2_fold = found
    return Tested(p, q, log2_fold, design, counted)


def _deseq2(counts: np.ndarray, side: np.ndarray, replicate: np.ndarray | None) -> np.ndarray:
    """Return p, q and log2 fold change of each gene, float64 [3, genes], from counts [samples, genes]."""
    from pydeseq2.dds import DeseqDataSet  # pyright: ignore[reportMissingImports]
    from pydeseq2.default_inference import DefaultInference  # pyright: ignore[reportMissingImports]
    from pydeseq2.ds import DeseqStats  # pyright: ignore[reportMissingImports]

    samples = [f"s{i}" for i in range(len(counts))]
    about = pd.DataFrame({"side": side}, index=pd.Index(samples))
    if replicate is not None:
        about["replicate"] = replicate
    inference = DefaultInference(n_cpus=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on few samples, which the summary tells
        data = DeseqDataSet(
            counts=pd.DataFrame(counts, index=pd.Index(samples)).rename(columns=str),
            metadata=about,
            design="~side" if replicate is None else "~replicate + side",
            size_factors_fit_type="poscounts",
            inference=inference,
            quiet=True,
        )
        data.deseq2()
        result = DeseqStats(data, contrast=["side", "perturbed", "control"], inference=inference, quiet=True)
        result.summary()
    return result.results_df[["pvalue", "padj", "log2FoldChange"]].to_numpy(np.float64).T


def _summary(
    scope: tuple[str, str],
    name: str,
    found: Tested,
    significant: np.ndarray,
    log2_fold: np.ndarray,
    config: EvaluateConfig,
) -> dict[str, Any]:
    """Return a row of the summary: DE genes of cells, of replicates, and those of both with the same sign."""
    with np.errstate(invalid="ignore"):
        holds = found.q < config.alpha
        survive = significant & holds & (np.sign(found.log2_fold) == np.sign(log2_fold))
    num, kept = int(significant.sum()), int(survive.sum())
    tested = not found.reason
    return {
        "scope_kind": scope[0],
        "scope": scope[1],
        "perturbation": name,
        "design": found.design,
        "replicates": found.replicates[0],
        "control_replicates": found.replicates[1],
        "n_DE_cells": num,
        "n_DE_pseudobulk": int(holds.sum()) if tested else np.nan,
        "n_survive": kept if tested else np.nan,
        "share": kept / num if tested and num else np.nan,
        "reason": found.reason,
    }


def _table(scope: tuple[str, str], name: str, genes: Sequence[str], found: Tested) -> pa.Table:
    """Return a row per gene."""

    def repeated(text: str) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(genes), np.int32)), pa.array([text]))

    return pa.table(
        {
            "scope_kind": repeated(scope[0]),
            "scope": repeated(scope[1]),
            "perturbation": repeated(name),
            "gene": pa.array(list(genes)),
            "p": found.p,
            "q": found.q,
            "log2fc": found.log2_fold,
        }
    )


def _facts(summary: pd.DataFrame, column: str) -> dict[str, Any]:
    """Return how many perturbations of the pool were tested, and what share of their DE genes holds."""
    pooled = summary[summary["scope_kind"] == POOLED]
    tested = pooled[pooled["reason"] == ""]
    cells, kept = float(tested["n_DE_cells"].sum()), float(tested["n_survive"].sum())
    share = kept / cells if cells else None
    return {"pseudobulk": {"column": column, "tested": len(tested), "tests": len(pooled), "survive": share}}


def _left_out(summary: pd.DataFrame) -> list[dict[str, Any]]:
    without = summary[summary["reason"] != ""]
    if without.empty:
        return []
    first = without.iloc[0]
    text = (
        f"no DE of pseudobulks for {len(without)} of {len(summary)} perturbations and scopes (first: "
        f"{first['perturbation']} in {first['scope']}: {first['reason']})"
    )
    return [{"kind": "pseudobulk", "text": text, "count": len(without)}]
