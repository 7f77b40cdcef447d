"""Figures of differential expression and of telling perturbations apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from perturbdiff.report.figures.page_tables import Cell, Row, Table, number, small
from perturbdiff.report.figures.score_plots import MOST_METHODS
from perturbdiff.report.figures.svg import (
    INK,
    NARROW,
    PALETTE,
    PAPER,
    WIDTH,
    Look,
    Plot,
    canvas,
    counting,
    draw,
    legend_text,
    logarithmic,
    named_rows,
    panels,
    points,
    shorten,
    slug,
    spread,
)
from perturbdiff.report.loading.de_tables import STEP, Split

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_PANELS = 6
"""Methods with a panel of their own. The numbers beside a figure hold all."""
_BINS = 60
_TICKS = (0.0, 0.3, 1.3, 3.0, 10.0, 30.0)

_TRUE, _OTHER = PALETTE[0], PALETTE[1]


def separations(name: str, title: str, groups: Mapping[str, Split], alpha: float) -> Plot:
    """Draw −log10 of the adjusted p for true DE genes (above each line) and for the others (below it).

    One panel per method on a root scale, each side scaled to its own peak. Ticks are medians, the number is the
    probability that a true DE gene has the smaller q.

    Parameters
    ----------
    groups
        Distributions by the label of their row: the real test first, then the methods.
    alpha
        A dashed line marks where a gene counts as DE.
    """
    shown = list(groups)[: MOST_METHODS + 1]
    top = max(3.0, _high(groups[shown[0]]))
    edges = np.linspace(0, np.sqrt(top), _BINS + 1)
    beyond = edges[-1] * np.array([1.03, 1.1])  # a wider bar for all that is farther right
    with canvas(WIDTH, 0.95 + 0.46 * len(shown)) as (figure, axes):
        for row, label in enumerate(shown):
            for true, color, sign in ((True, _TRUE, -1.0), (False, _OTHER, 1.0)):
                counts = _binned(groups[label], edges, true=true)
                height = sign * 0.42 * counts / max(1.0, float(counts.max()))
                style = {"baseline": row, "fill": True, "color": color, "alpha": 0.75, "lw": 0}
                axes.stairs(row + height[:-1], edges, **style)
                axes.stairs(row + height[-1:], beyond, **style)
                middle = np.sqrt(groups[label].median(true=true))
                middle = middle if middle < edges[-1] else beyond.mean()
                axes.plot([middle, middle], [row, row + sign * 0.46], color=INK, lw=1.6)
            axes.axhline(row, color=INK, lw=0.5)
            separation = groups[label].separation
            text = "n/a" if np.isnan(separation) else f"{separation:.2f}"
            axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", fontweight="bold")
        axes.axvline(np.sqrt(-np.log10(alpha)), color=INK, lw=0.9, ls=(0, (4, 3)))
        _separation_axes(axes, shown, top, beyond)
        handles = [
            Patch(fc=_TRUE, alpha=0.75),
            Patch(fc=_OTHER, alpha=0.75),
            Line2D([], [], color=INK, lw=1.6),
        ]
        words = ("true DE genes", "other genes", "median")
        figure.legend(handles, words, loc="outside upper left", ncols=3, handlelength=1.0, columnspacing=1.2)
        return draw(figure, name, title, _separation_data(groups, edges))


def _separation_axes(axes: Axes, shown: Sequence[str], top: float, beyond: np.ndarray) -> None:
    named_rows(axes, [shorten(label, 24) for label in shown])
    axes.set(xlim=(0, beyond[-1]), xlabel="−log₁₀ adjusted p (root scale)")
    ticks = [t for t in _TICKS if t <= 0.75 * top]
    axes.set_xticks([*np.sqrt(ticks), beyond.mean()], [*(f"{t:g}" for t in ticks), f"> {top:.0f}"])


def _high(split: Split) -> float:
    """Return the −log10 q below which 99 % of the true DE genes lie."""
    if not split.true.sum():
        return 0.0
    return float(np.searchsorted(np.cumsum(split.true), 0.99 * split.true.sum()) * STEP)


def _binned(split: Split, edges: np.ndarray, *, true: bool) -> np.ndarray:
    """Return counts in bins of the root of −log10 q, the last of them for all beyond."""
    counts = split.true if true else split.other
    middle = np.sqrt((np.arange(len(counts)) + 0.5) * STEP)
    return np.histogram(middle, np.append(edges, np.inf), weights=counts)[0]


def _separation_data(groups: Mapping[str, Split], edges: np.ndarray) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "method": label,
                "genes": "true DE" if true else "other",
                "lower": edges**2,
                "upper": np.append(edges[1:] ** 2, np.inf),
                "count": _binned(split, edges, true=true),
                "median": split.median(true=true),
                "separation": split.separation,
            }
        )
        for label, split in groups.items()
        for true in (True, False)
    ]
    return pd.concat(frames, ignore_index=True)


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
                )
            for called, fill in ((q < alpha, style.color), (~(q < alpha), PAPER)):
                axes.plot(
                    fold[called], place[called], style.marker, ms=5, mfc=fill, mec=style.color, mew=1.2, ls=""
                )
        axes.plot(real, rows, "|", color=INK, ms=10, mew=2.2, ls="")
        ends = genes[["real", *methods]].to_numpy(np.float64)
        reach = 1.08 * max(0.5, float(np.nanmax(np.abs(ends[np.isfinite(ends)]), initial=0.5)))
        axes.set(xlim=(-reach, reach), xlabel="log₂ fold change")
        named_rows(axes, [shorten(g, 18) for g in genes["gene"]])
        axes.xaxis.set_major_locator(MaxNLocator(5))
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
            axes.stairs(100 * shares[method], edges, fill=True, color=look[method].color, alpha=0.75, lw=0)
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
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(3))
        figure.supxlabel(f"rank of the right perturbation, 0 is first, of {total:,}", fontsize=9)
        figure.supylabel("% of perturbations", fontsize=9)
        data = pd.DataFrame({"lower": edges[:-1], "upper": edges[1:], "chance": chance})
        frames = [data.assign(method=m, share=s, n=len(ranks[m])) for m, s in shares.items()]
        return draw(figure, name, title, pd.concat(frames, ignore_index=True))


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
            most = 3000 // max(1, len(shown))
            points(
                axes,
                x,
                y,
                style.color,
                size=14 if len(x) < 100 else 7,
                marker=style.marker,
                alpha=0.6,
                most=most,
            )
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
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(4))


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
