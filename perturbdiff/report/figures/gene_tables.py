"""The strongest DE genes of a perturbation as a table: real and predicted fold change, direction, predicted q."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from perturbdiff.report.figures.page_tables import Cell, Row, Table, number, small
from perturbdiff.report.figures.svg import slug


def gene_table(genes: pd.DataFrame, method: str, alpha: float, prefix: str) -> Table:
    """Return the strongest DE genes of one perturbation.

    Parameters
    ----------
    genes
        See `effects.top_genes`.
    method
        Whose predictions are shown; its columns are in ``genes``.
    alpha
        Below this q a gene is called DE.
    prefix
        Start of the table's name.
    """
    folds = genes[["real", method]].to_numpy(np.float64)
    top = float(np.max(np.abs(folds[np.isfinite(folds)]), initial=0.0)) or 1.0
    rows = []
    for record in genes.to_dict("records"):
        true, ours, q = (float(record[c]) for c in ("real", method, f"{method} q"))
        agrees = not math.isnan(ours) and np.sign(true) == np.sign(ours)
        cells = (
            Cell(number(true, 2), "num", bar=_bar(true, top), value=true),
            Cell(number(ours, 2), "num", bar=_bar(ours, top), value=ours),
            Cell("same" if agrees else "no", "" if agrees else "off"),
            Cell(small(q), "num" if q < alpha else "num faint", value=q),
        )
        rows.append(Row(str(record["gene"]), cells))
    perturbation, count = str(genes["perturbation"].iloc[0]), int(genes["de_genes"].iloc[0])
    heads = ("Gene", "log₂FC real", "log₂FC predicted", "direction", "q predicted")
    title = f"{perturbation} · {count:,} DE genes"
    return Table(heads, tuple(rows), title, name=f"{prefix}-{slug(perturbation)}")


def _bar(value: float, top: float) -> float:
    return 0.0 if math.isnan(value) else float(np.clip(value / top, -1.0, 1.0))
