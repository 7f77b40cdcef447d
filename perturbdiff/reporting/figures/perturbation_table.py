"""The table of all conditions that were scored, and the cards that its rows open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures.number_texts import amount, decimals_for, number
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.loading.de_tables import Side, top_genes
from perturbdiff.reporting.loading.metric_columns import ENERGY, PDCORR, Column, metric_columns, named
from perturbdiff.reporting.loading.results import POOLED, Run

MOST_ROWS = 4000
"""Rows on the page: a page of more would be slow and large."""
TOP_GENES = 10
_OVERLAP = ("DEOver", "DEOver_10")  # of these the first that was scored
_CARD = (ENERGY, PDCORR, "PDS_cos", *_OVERLAP, "DirAgr", "AUPRC")
_RESULTS = {"win": "mark better", "tie": "mark", "loss": "mark worse"}
_KEY = ["cell_type", "batch", "perturbation"]


@dataclass(frozen=True)
class PerturbationTable:
    """A row for each condition, and what its card shows.

    Attributes
    ----------
    table
        The rows: cells, our scores beside the other method's.
    note
        What the columns mean, and what was left out.
    cards
        By column and row number of ``table``: scores of every method, genes and pictures.
    """

    table: Table
    note: str
    cards: dict[str, Any] = field(repr=False)


def perturbations(
    prefix: str,
    runs: Sequence[Run],
    focus: Run,
    other: Run | None,
    sides: Mapping[str, tuple[Side, Side]],
    pictures: Mapping[str, str],
) -> PerturbationTable | None:
    """Return the table of conditions, our worst energy distance first, or None if nothing was scored by condition.

    Parameters
    ----------
    prefix
        Start of the table's name.
    runs
        All methods and ceilings of a data set.
    focus, other
        Whose scores the table shows, and whom they are compared with.
    sides
        For ``focus`` and ``other`` the real and predicted test results, as far as they are known.
    pictures
        The id of a condition's picture of cells on the page, by its label ("cell type|batch|perturbation").
    """
    columns = metric_columns(runs)
    keys = _conditions(focus, columns)
    if keys.empty:
        return None
    every = _chosen(columns)
    scores = {m.name: {r.method: _column(r, m.name, keys) for r in runs} for m in every}
    first = named(every, ENERGY) or every[0]
    worst = pd.Series(scores[first.name][focus.method]) * (1.0 if first.direction == "lower" else -1.0)
    order = worst.sort_values(ascending=False, kind="stable", na_position="last").index.to_numpy()[:MOST_ROWS]
    shown = keys.iloc[order].reset_index(drop=True)
    scores = {m: {who: v[order] for who, v in by.items()} for m, by in scores.items()}
    table = _table(f"{prefix}-perturbations", shown, every, scores, focus, other)
    cards = _cards(shown, every, scores, runs, focus, other)
    cards |= _genes(shown, sides, focus, other)
    labels = shown["cell_type"] + "|" + shown["batch"] + "|" + shown["perturbation"]
    cards["pictures"] = {i: pictures[label] for i, label in enumerate(labels) if label in pictures}
    return PerturbationTable(table, _note(first, len(keys), len(shown), focus, other), cards)


def _conditions(run: Run, columns: Sequence[Column]) -> pd.DataFrame:
    """Return the labels and numbers of real and predicted cells of what was scored, a row each."""
    table = run.conditions
    if table is not None and len(table):
        sizes = {
            c: table[c] if c in table else pd.Series(math.nan, table.index)
            for c in ("n_cells", "n_predicted")
        }
        return table[_KEY].fillna("").assign(**sizes).reset_index(drop=True)
    metric = named(columns, ENERGY) or named(columns, PDCORR)
    scored = (
        []
        if metric is None
        else run.values(metric.name).reset_index()[["scope", "perturbation"]].to_numpy(str)
    )
    keys = pd.DataFrame([(*_labels(scope), name) for scope, name in scored], columns=pd.Index(_KEY))
    return keys.assign(n_cells=math.nan, n_predicted=math.nan)


def _labels(scope: str) -> tuple[str, str]:
    """Return cell type and batch of a scope. A context is known by one of them, the pool by none."""
    if scope == POOLED[1]:
        return "", ""
    cell_type, _, batch = scope.partition("|")
    return cell_type, batch


def _chosen(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics of the cards, of two kinds of DE overlap the first that was scored."""
    found = [m for name in _CARD if (m := named(columns, name)) is not None]
    overlaps = [m for m in found if m.name in _OVERLAP]
    return [m for m in found if m not in overlaps[1:]] or list(columns[:1])


def _column(run: Run, metric: str, keys: pd.DataFrame) -> np.ndarray:
    """Return a metric for each row: of the condition, else of its context, else of the pool. NaN: not defined."""
    values = run.values(metric)
    known: dict[Any, float] = dict(zip(values.index, values.to_numpy(np.float64), strict=True))
    found = np.full(len(keys), math.nan)
    for i, (cell_type, batch, name) in enumerate(keys[_KEY].to_numpy(str)):
        for scope in (f"{cell_type}|{batch}", cell_type, batch, POOLED[1]):
            if (scope, name) in known:
                found[i] = known[scope, name]
                break
    return found


def _outcomes(ours: np.ndarray, theirs: np.ndarray, direction: str) -> list[str]:
    known = np.isfinite(ours) & np.isfinite(theirs) & (direction in ("higher", "lower"))
    better = (ours < theirs) if direction == "lower" else (ours > theirs)
    words = np.where(ours == theirs, "tie", np.where(better, "win", "loss"))
    return [str(word) if k else "" for word, k in zip(words, known, strict=True)]


def _table(
    name: str,
    keys: pd.DataFrame,
    metrics: Sequence[Column],
    scores: Mapping[str, Mapping[str, np.ndarray]],
    focus: Run,
    other: Run | None,
) -> Table:
    shown = [m for m in metrics if m.name in (ENERGY, PDCORR, *_OVERLAP)] or list(metrics)
    heads, below, fields = ["Perturbation"], {}, []
    for key, head in (("cell_type", "cell type"), ("batch", "batch")):
        if keys[key].nunique() > 1:
            heads.append(head)
            fields.append([Cell(str(v)) for v in keys[key]])
    if np.isfinite(keys["n_cells"].to_numpy(np.float64)).any():
        heads.append("cells")
        fields.append([Cell(amount(v), "num", value=float(v)) for v in keys["n_cells"]])
    for i, metric in enumerate(shown):
        ours = scores[metric.name][focus.method]
        below[len(heads)] = focus.method
        heads.append(metric.heading)
        fields.append(_numbers(ours))
        if i or other is None:
            continue
        theirs = scores[metric.name][other.method]
        below |= {len(heads): other.method, len(heads) + 1: f"in {metric.label}"}
        heads += [metric.heading, "result"]
        fields.append(_numbers(theirs))
        fields.append(
            [Cell(w or "n/a", _RESULTS.get(w, "na")) for w in _outcomes(ours, theirs, metric.direction)]
        )
    rows = zip(keys["perturbation"], zip(*fields, strict=True), strict=True)
    lines = tuple(Row(str(head), cells) for head, cells in rows)
    return Table(tuple(heads), lines, name=name, below=tuple(below.get(i, "") for i in range(len(heads))))


def _numbers(values: np.ndarray) -> list[Cell]:
    digits = min(4, decimals_for(values.tolist()))
    return [Cell(number(v, digits), "num" if math.isfinite(v) else "num na", value=float(v)) for v in values]


def _cards(
    keys: pd.DataFrame,
    metrics: Sequence[Column],
    scores: Mapping[str, Mapping[str, np.ndarray]],
    runs: Sequence[Run],
    focus: Run,
    other: Run | None,
) -> dict[str, Any]:
    """Return what the cards show of scores: a list [metrics][methods][rows], and the methods by name."""
    methods = [r.method for r in runs]
    return {
        "methods": methods,
        "ceilings": [r.method for r in runs if r.kind == "ceiling"],
        "ours": focus.method,
        "other": "" if other is None else other.method,
        "metrics": [[m.heading, m.direction] for m in metrics],
        "scores": [[scores[m.name][who].tolist() for who in methods] for m in metrics],
        "labels": [list(row) for row in keys[_KEY].itertuples(index=False, name=None)],
        "cells": keys["n_cells"].astype(float).tolist(),
        "predicted": keys["n_predicted"].astype(float).tolist(),
    }


def _genes(
    keys: pd.DataFrame,
    sides: Mapping[str, tuple[Side, Side]],
    focus: Run,
    other: Run | None,
) -> dict[str, Any]:
    """Return the strongest truly changed genes of each perturbation: number, log2 fold changes real and predicted."""
    if focus.method not in sides:
        return {"genes": {}, "names": []}
    names: dict[str, int] = {}
    predicted = [
        (r.method, sides[r.method][1]) for r in (focus, other) if r is not None and r.method in sides
    ]
    real = sides[focus.method][0]
    wanted = set(keys["perturbation"])
    found: dict[str, Any] = {}
    for table in top_genes(
        real, predicted, focus.alpha, perturbations=len(real.perturbations), genes=TOP_GENES
    ):
        perturbation = str(table["perturbation"].iloc[0])
        if perturbation not in wanted:
            continue
        codes = [names.setdefault(str(g), len(names)) for g in table["gene"]]
        folds = [table[c].astype(float).tolist() for c in ("real", *(method for method, _ in predicted))]
        found[perturbation] = [int(table["de_genes"].iloc[0]), codes, *folds]
    return {"genes": found, "names": list(names)}


def _note(metric: Column, total: int, shown: int, focus: Run, other: Run | None) -> str:
    said = [
        f"The worst of {focus.method} first, by {metric.label}. A name opens a card with all methods and genes."
    ]
    if other is not None:
        said.append(f"Result: whether {focus.method} is better than {other.method} in {metric.label} there.")
    said.append(
        "A metric that was not scored in a condition is that of its cell type or batch, else of the pool."
    )
    if shown < total:
        said.append(f"The {shown:,} worst of {total:,} conditions. metrics.csv of each run holds all.")
    return " ".join(said)
