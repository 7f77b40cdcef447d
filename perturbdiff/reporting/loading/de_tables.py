"""The tables of differential expression of a run as matrices, read once, and what the figures need of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from perturbdiff.evaluation.metrics.bounds import Collapse, collapse
from perturbdiff.reporting.loading.results import POOLED, Run
from perturbdiff.runtime.errors import UserError

STEP = 0.01
"""Width of the bins of −log10 q. Ties within one count as half in `Split.separation`."""

_MOST = 46.0  # −log10 q from here on is one bin: the tables hold q in float32
_COLUMNS = ("q", "log2fc", "mean", "control_mean")


@dataclass(frozen=True)
class Side:
    """Real or predicted test results of the whole pool: matrices [perturbations × genes], float32.

    ``q`` is NaN where a gene was not tested, ``fold`` is the log2 fold change, ``change`` the change of the mean
    from control in log1p units.
    """

    perturbations: tuple[str, ...]
    genes: tuple[str, ...]
    q: np.ndarray
    fold: np.ndarray
    change: np.ndarray


@dataclass(frozen=True)
class Split:
    """−log10 of an adjusted p-value, binned by ``STEP``, for true DE genes and for the others."""

    true: np.ndarray
    other: np.ndarray

    @cached_property
    def separation(self) -> float:
        """Return the probability that a true DE gene has a smaller q than another gene. 0.5 is a coin's."""
        if not self.true.sum() or not self.other.sum():
            return float("nan")
        below = np.cumsum(self.other) - self.other
        share = (self.true * (below + 0.5 * self.other)).sum()
        return float(share / self.true.sum() / self.other.sum())

    def median(self, *, true: bool) -> float:
        """Return the median of −log10 q of one of the groups, to the width of a bin, or NaN if it is empty."""
        counts = self.true if true else self.other
        if not counts.sum():
            return float("nan")
        return float(np.searchsorted(np.cumsum(counts), counts.sum() / 2) * STEP)


@dataclass(frozen=True)
class Effects:
    """What a run's figures need of its DE tables.

    Attributes
    ----------
    table
        A row per perturbation: perturbation, de_real, de_predicted (numbers of DE genes), size_real,
        size_predicted (Euclidean norms of the mean change from control, log1p).
    truth, predicted
        −log10 q of the real and of the predicted test, for genes with real q < alpha and the others.
    collapse
        How alike the changes of different perturbations are, or None.
    names
        The perturbations of ``collapse.pairs``' row numbers.
    """

    table: pd.DataFrame
    truth: Split
    predicted: Split
    collapse: Collapse | None
    names: tuple[str, ...]


def read_side(run: Run, name: str) -> Side | None:
    """Read ``de_real`` or ``de_pred`` of the whole pool, or None if the folder does not hold it.

    Raises
    ------
    UserError
        If the file cannot be read.
    """
    path = run.path / f"{name}.parquet"
    if not path.is_file():
        return None
    try:
        table = _pooled(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}); run evaluate again") from None
    if not table.num_rows:
        return None
    rows, perturbations = _codes(table["perturbation"], path)
    columns, genes = _codes(table["gene"], path)
    values = {c: np.full((len(perturbations), len(genes)), np.nan, np.float32) for c in _COLUMNS}
    for column, matrix in values.items():
        matrix[rows, columns] = table[column].to_numpy()
    return Side(perturbations, genes, values["q"], values["log2fc"], values["mean"] - values["control_mean"])


def _pooled(path: Path) -> pa.Table:
    """Read the rows of the whole pool: only the row groups that can hold some, which is ten times faster."""
    kind = "scope_kind"
    with pq.ParquetFile(path, read_dictionary=[kind, "perturbation", "gene"]) as file:
        column = file.schema_arrow.names.index(kind)
        groups = []
        for i in range(file.num_row_groups):
            known = file.metadata.row_group(i).column(column).statistics
            if known is None or not known.has_min_max or known.min <= POOLED[0] <= known.max:
                groups.append(i)
        table = file.read_row_groups(groups, columns=[kind, "perturbation", "gene", *_COLUMNS])
    kept = pc.equal(table[kind].cast(pa.string()), POOLED[0])  # pyright: ignore[reportAttributeAccessIssue]
    return table if pc.all(kept).as_py() else table.filter(kept)  # pyright: ignore[reportAttributeAccessIssue]


def _codes(column: pa.ChunkedArray, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return for each row the number of its label, and the labels in the order of their names."""
    if column.null_count:
        raise UserError(f"{path}: a row without perturbation or gene; run evaluate again")
    joined = column.unify_dictionaries().combine_chunks()
    joined = joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined
    labels = joined.dictionary.to_pylist()
    codes = joined.indices.to_numpy(zero_copy_only=False)
    used = np.flatnonzero(np.bincount(codes, minlength=len(labels)))
    order = sorted(used.tolist(), key=lambda i: labels[i])
    place = np.zeros(len(labels), np.int64)
    place[order] = np.arange(len(order))
    return place[codes], tuple(str(labels[i]) for i in order)


def paired_sides(run: Run) -> tuple[Side, Side] | None:
    """Return both sides on the perturbations and genes that they share, or None if there are none."""
    real, predicted = read_side(run, "de_real"), read_side(run, "de_pred")
    if real is None or predicted is None:
        return None
    if (real.perturbations, real.genes) == (predicted.perturbations, predicted.genes):
        return real, predicted
    perturbations = _both(real.perturbations, predicted.perturbations)
    genes = _both(real.genes, predicted.genes)
    if not perturbations or not genes:
        return None
    return _kept(real, perturbations, genes), _kept(predicted, perturbations, genes)


def _both(a: Sequence[str], b: Sequence[str]) -> tuple[str, ...]:
    other = set(b)
    return tuple(x for x in a if x in other)


def _kept(side: Side, perturbations: tuple[str, ...], genes: tuple[str, ...]) -> Side:
    rows = pd.Index(side.perturbations).get_indexer(pd.Index(perturbations))
    columns = pd.Index(side.genes).get_indexer(pd.Index(genes))
    matrices = (matrix[np.ix_(rows, columns)] for matrix in (side.q, side.fold, side.change))
    return Side(perturbations, genes, *matrices)


def effects(real: Side, predicted: Side, alpha: float) -> Effects:
    """Summarise both sides of a run, see `Effects`.

    Parameters
    ----------
    real, predicted
        Test results for the same perturbations and genes.
    alpha
        A gene is DE where q is below it.
    """
    true = real.q < alpha
    table = pd.DataFrame(
        {
            "perturbation": real.perturbations,
            "de_real": true.sum(axis=1),
            "de_predicted": (predicted.q < alpha).sum(axis=1),
            "size_real": _norms(real.change),
            "size_predicted": _norms(predicted.change),
        }
    )
    collapsed = collapse(np.nan_to_num(real.change), np.nan_to_num(predicted.change))
    return Effects(
        table, _split(real.q, true), _split(predicted.q, true), collapsed, tuple(real.perturbations)
    )


def _norms(change: np.ndarray) -> np.ndarray:
    return np.sqrt(np.nansum(np.square(change, dtype=np.float64), axis=1))


def _split(q: np.ndarray, true: np.ndarray) -> Split:
    known = np.isfinite(q)
    with np.errstate(divide="ignore"):
        bins = np.minimum(-np.log10(q[known]), _MOST) / STEP
    place = np.clip(np.floor(bins + 1e-4), 0, None).astype(np.int64)
    size = int(_MOST / STEP) + 1
    groups = true[known]
    return Split(*(np.bincount(place[g], minlength=size) for g in (groups, ~groups)))


def top_genes(
    real: Side, others: Sequence[tuple[str, Side]], alpha: float, *, perturbations: int, genes: int
) -> list[pd.DataFrame]:
    """Return the strongest DE genes of the perturbations with most of them, real and predicted.

    Genes with real q < ``alpha`` over the whole pool, by descending |log2 fold change|, then q, then name. A
    perturbation without such a gene is left out.

    Returns
    -------
    list of DataFrame
        One per perturbation: perturbation, de_genes (how many it has), gene, real (log2 fold change) and for each
        of ``others`` (name, predicted side) columns ``NAME`` and ``NAME q``.
    """
    true = real.q < alpha
    counts = true.sum(axis=1)
    order = [i for i in np.argsort(-counts, kind="stable")[:perturbations] if counts[i]]
    tables = []
    names = np.array(real.genes)
    rows_of = [pd.Index(side.perturbations) for _, side in others]
    genes_of = [pd.Index(side.genes) for _, side in others]
    for i in order:
        size = np.where(true[i], np.abs(np.nan_to_num(real.fold[i])), -1.0)
        chosen = np.lexsort((names, real.q[i], -size))[: min(genes, counts[i])]
        columns: dict[str, object] = {
            "perturbation": real.perturbations[i],
            "de_genes": int(counts[i]),
            "gene": [real.genes[g] for g in chosen],
            "real": real.fold[i, chosen],
        }
        for (name, side), of_rows, of_genes in zip(others, rows_of, genes_of, strict=True):
            row = of_rows.get_indexer(pd.Index([real.perturbations[i]]))[0]
            place = of_genes.get_indexer(pd.Index(names[chosen]))
            lacks = (place < 0) | (row < 0)
            columns[name] = np.where(lacks, np.nan, side.fold[row, place])
            columns[f"{name} q"] = np.where(lacks, np.nan, side.q[row, place])
        tables.append(pd.DataFrame(columns))
    return tables
