"""Figures of differential expression and of telling perturbations apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from perturbdiff.reporting.figures.axes import (
    counting,
    logarithmic,
    named_rows,
    plain,
    points,
    reading,
    round_ticks,
    spread,
)
from perturbdiff.reporting.figures.hover import name_points
from perturbdiff.reporting.figures.number_texts import number, small
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.figures.svg import (
    INK,
    NARROW,
    PAPER,
    WIDTH,
    Look,
    Plot,
    canvas,
    draw,
    legend_text,
    of_method,
    panels,
    shorten,
    slug,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_PANELS = 6
"""Methods with a panel of their own. The numbers beside a figure hold all."""


def paired_dots(
    name: str, genes: pd.DataFrame, methods: Sequence[str], alpha: float, look: Mapping[str, Look]
) -> Plot:
    """Draw the true and the predicted log2 fold change of a perturbation's strongest DE genes.

    Parameters
    ----------
    genes
        Genes of one perturbation (see `de_tables.top_genes`): gene, real, and a column for each method and its q.
    methods
        At most two. An open symbol says that the method does not call the gene DE.
    """
    perturbation, count = str(genes["perturbation"].iloc[0]), int(genes["de_genes"].iloc[0])
    rows = np.arange(len(genes))
    real = genes["real"].to_numpy(np.float64)
    with canvas(NARROW, 0.95 + 0.19 * len(genes)) as (figure, axes):
        axes.axvline(0, color=INK, lw=0.8)
        for i, method in enumerate(methods):
            fold, q = (genes[c].to_numpy(np.float64) for c in (method, f"{method} q"))
            place = rows + (0.0 if len(methods) == 1 else (-0.14, 0.16)[i])
            style = look[method]
            if i == 0:
                axes.hlines(
                    place,
                    np.minimum(real, fold),
                    np.maximum(real, fold),
                    color=style.color,
                    lw=1.0,
                    alpha=0.5,
                    gid=of_method(method),
                )
            for called, fill in ((q < alpha, style.color), (~(q < alpha), PAPER)):
                axes.plot(
                    fold[called], place[called], style.marker, ms=5, mfc=fill, mec=style.color, mew=1.2, ls="",
                    gid=of_method(method),
                )  # fmt: skip
            said = [
                f"predicted {plain(f, 3)}, adjusted p {small(p)}\nreal {plain(r, 3)}"
                for f, p, r in zip(fold, q, real, strict=True)
            ]
            name_points(axes, fold, place, method, genes["gene"].tolist(), said)
        axes.plot(real, rows, "|", color=INK, ms=10, mew=2.2, ls="")
        name_points(axes, real, rows, "", genes["gene"].tolist(), [f"real {plain(r, 3)}" for r in real])
        ends = genes[["real", *methods]].to_numpy(np.float64)
        reach = 1.08 * max(0.5, float(np.nanmax(np.abs(ends[np.isfinite(ends)]), initial=0.5)))
        axes.set(xlim=(-reach, reach), xlabel="log₂ fold change to control")
        named_rows(axes, [shorten(g, 18) for g in genes["gene"]])
        round_ticks(axes.xaxis, 4)
        axes.set_title(f"{shorten(perturbation, 22)} · {count:,} DE genes", loc="left", fontweight="bold")
        handles = [Line2D([], [], color=INK, marker="|", ms=8, mew=2.2, ls="")]
        handles += [Line2D([], [], color=look[m].color, marker=look[m].marker, ms=5, ls="") for m in methods]
        words = ["real", *(legend_text(m, 16) for m in methods)]
        figure.legend(
            handles, words, loc="outside lower center", ncols=3, handlelength=0.8, columnspacing=1.2
        )
        title = f"Strongest DE genes of {perturbation}, true and predicted"
        return draw(figure, name, title, genes)


def rank_histograms(
    name: str, title: str, ranks: Mapping[str, np.ndarray], total: int, look: Mapping[str, Look]
) -> Plot:
    """Draw at which rank the right perturbation stands among the real changes. The dashed line is chance.

    Parameters
    ----------
    ranks
        Ranks for each method, from 0 for the most similar to at most ``total`` − 1.
    total
        Perturbations among which is ranked. More than 20 are put into 20 bins.
    """
    bins = min(total, 20)
    edges = np.linspace(0, total, bins + 1) if total > bins else np.arange(total + 1)
    shown = list(ranks)[:MOST_PANELS]
    shares = {m: np.histogram(r, edges)[0] / max(1, len(r)) for m, r in ranks.items()}
    top = max([0.05, *(float(shares[m].max(initial=0)) for m in shown)])
    lines = -(-len(shown) // 2)
    with panels(len(shown), 2, WIDTH, 0.5 + 1.12 * lines, sharey=True, sharex=True) as (figure, grid):
        chance = np.diff(edges) / total
        for axes, method in zip(grid, shown, strict=True):
            filled = {"fill": True, "color": look[method].color, "alpha": 0.75, "lw": 0}
            axes.stairs(100 * shares[method], edges, gid=of_method(method), **filled)
            _name_bins(axes, method, edges, 100 * shares[method], 100 * chance)
            axes.stairs(100 * chance, edges, color=INK, lw=1.0, ls=(0, (4, 3)), baseline=None)
            right = 100 * float((ranks[method] == 0).mean()) if len(ranks[method]) else 0.0
            axes.text(
                0.97,
                0.92,
                f"first: {right:.0f} %",
                transform=axes.transAxes,
                ha="right",
                va="top",
                fontsize=8,
            )
            axes.set_title(shorten(method, 26), loc="left", fontsize=9)
            axes.set(xlim=(0, total), ylim=(0, 105 * top))
            axes.grid(visible=False, axis="x")
            round_ticks(axes.xaxis, 4, whole=True)
            round_ticks(axes.yaxis, 3)
        figure.supxlabel(f"rank of the right perturbation, 0 is first, of {total:,}", fontsize=9)
        figure.supylabel("% of perturbations", fontsize=9)
        data = pd.DataFrame({"lower": edges[:-1], "upper": edges[1:], "chance": chance})
        frames = [data.assign(method=m, share=s, n=len(ranks[m])) for m, s in shares.items()]
        return draw(figure, name, title, pd.concat(frames, ignore_index=True))


def _name_bins(axes: Axes, method: str, edges: np.ndarray, shares: np.ndarray, chance: np.ndarray) -> None:
    middles = (edges[:-1] + edges[1:]) / 2
    ends = [(math.ceil(low), math.ceil(high) - 1) for low, high in itertools.pairwise(edges)]
    names = [f"rank {low}" if low == high else f"ranks {low} to {high}" for low, high in ends]
    said = [
        f"{plain(s, 3)} % of perturbations, by chance {plain(c, 3)} %"
        for s, c in zip(shares, chance, strict=True)
    ]
    name_points(axes, middles, shares, method, names, said)


def sizes(
    name: str,
    title: str,
    tables: Mapping[str, pd.DataFrame],
    columns: tuple[str, str],
    labels: tuple[str, str],
    look: Mapping[str, Look],
) -> Plot:
    """Draw how large a perturbation's effect is, real (x) against predicted (y), a panel per method.

    Parameters
    ----------
    tables
        For each method a table with a row per perturbation (see `de_tables.Effects`).
    columns
        Columns of the real and of the predicted size. They are numbers of genes if their names start with ``de``.
    labels
        Labels of the axes.
    """
    counts = columns[0].startswith("de")
    shown = list(tables)[:MOST_PANELS]
    every = np.concatenate([tables[m][list(columns)].to_numpy(np.float64).ravel() for m in shown])
    low, high, wide = spread(every[every > 0])
    across = 3 if len(shown) > 2 else 2
    height = 0.5 + (1.45 if across == 3 else 2.05) * -(-len(shown) // across)
    with panels(len(shown), across, WIDTH, height, sharey=True, sharex=True) as (figure, grid):
        for axes, method in zip(grid, shown, strict=True):
            x, y = (tables[method][c].to_numpy(np.float64) for c in columns)
            if counts:
                counting(axes, float(every.max(initial=1)), "x", "y")
                axes.set(
                    xlim=(-0.3, 1.5 * max(every.max(initial=1), 1)),
                    ylim=(-0.3, 1.5 * max(every.max(initial=1), 1)),
                )
            else:
                _size_axes(axes, low, high, wide=wide)
            axes.plot([0, 1e9], [0, 1e9], color=INK, lw=0.8, ls=(0, (4, 3)))
            style = look[method]
            most, size = 3000 // max(1, len(shown)), 14 if len(x) < 100 else 7
            drawing = {"size": size, "marker": style.marker, "alpha": 0.6, "most": most, "method": method}
            kept = points(axes, x, y, style.color, **drawing)
            labels_of = tables[method]["perturbation"].tolist()
            names = [str(labels_of[i]) for i in kept]
            unit = " DE genes" if counts else ""
            sizes_of = [(float(x[i]), float(y[i])) for i in kept]
            said = [f"real {reading(a)}, predicted {reading(b)}{unit}" for a, b in sizes_of]
            name_points(axes, x[kept], y[kept], method, names, said)
            axes.set_box_aspect(1)
            axes.set_title(shorten(method, 20), loc="left", fontsize=8.5)
        figure.supxlabel(labels[0], fontsize=9)
        figure.supylabel(labels[1], fontsize=9)
        frames = [t[["perturbation", *columns]].assign(method=m) for m, t in tables.items()]
        return draw(figure, name, title, pd.concat(frames, ignore_index=True))


def _size_axes(axes: Axes, low: float, high: float, *, wide: bool) -> None:
    if wide:
        logarithmic(axes, "x", "y")
        axes.set(xlim=(low, high), ylim=(low, high))
        return
    axes.set(xlim=(0, high), ylim=(0, high))
    round_ticks(axes.xaxis, 4)
    round_ticks(axes.yaxis, 4)


def gene_table(genes: pd.DataFrame, method: str, alpha: float, prefix: str) -> Table:
    """Return the strongest DE genes of one perturbation.

    Parameters
    ----------
    genes
        See `de_tables.top_genes`.
    method
        Whose predictions are shown. Its columns are in ``genes``.
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
