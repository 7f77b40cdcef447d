"""matplotlib figures as small inline SVG: colours that follow the page, unique ids, equal bytes for equal data."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe-Ito, without its yellow (too pale on white) and black (the page's ink).
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#8A8F98"
# A scatter of more points than this is drawn as an image inside the SVG.
DENSE = 1200
WIDTH = 4.6
NARROW = 3.5  # of figures in narrow columns: their text keeps its size on the page
PNG_DPI = 160
DOTS = "dots"  # group of points that becomes one path, named DOTS-diameter-
_BATCHES = 6  # overlapping points of one path do not add up, but those of different paths do
MOST_POINTS = 3000
"""Points of one kind drawn in a panel. Of more, an even draw is shown."""
_MARKERS = 200  # up to here points keep their marker and are single elements of the SVG

# Stand-ins that become CSS colours on the page, and in an exported SVG they are what they say.
INK, RULE, PAPER = "#22272E", "#D5D9DF", "#FDFDFC"
# Colours too dark for a dark page become variables that the style sheet sets for either.
_PAGE_COLORS = {
    INK: "currentColor",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    "#0072B2": "var(--blue)",
    "#8C6BB1": "var(--purple)",
}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "perturbdiff",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "figure.dpi": 72.0,
    "savefig.dpi": 200.0,
    "path.simplify": True,
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn, everywhere the same."""

    color: str
    marker: str
    dash: str = "-"


@dataclass(frozen=True)
class Plot:
    """A drawn figure: the markup for the page, files of its own (PNG on the page's light ground), its numbers."""

    name: str
    title: str
    svg: str
    file: str
    png: bytes = field(repr=False)
    data: pd.DataFrame


def export(plots: Iterable[Plot], folder: Path) -> None:
    """Write every figure into ``folder`` as SVG and PNG, and its numbers as CSV."""
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(plot.file, encoding="utf-8")
        (folder / f"{plot.name}.png").write_bytes(plot.png)
        tabular.write_csv(plot.data, folder / f"{plot.name}.csv")


def looks(
    models: Sequence[str], ceilings: Sequence[str] = (), families: Mapping[str, str] | None = None
) -> dict[str, Look]:
    """Return a look for each method: a colour first, then another marker once the colours are used up.

    Methods of one family (by name, without one a method is its own) have a colour in common and differ in marker.
    """
    names = list(dict.fromkeys(models))
    family = {name: (families or {}).get(name, name) for name in names}
    order = list(dict.fromkeys(family.values()))
    turns = math.ceil(len(order) / len(PALETTE))
    seen: Counter[str] = Counter()
    by_method = {}
    for name in names:
        turn, place = divmod(order.index(family[name]), len(PALETTE))
        color = PALETTE[(place + 2 * turn) % len(PALETTE)]
        shape = turn + turns * seen[family[name]]
        seen[family[name]] += 1
        by_method[name] = Look(color, MARKERS[shape % len(MARKERS)], ("-", "--", ":")[shape % 3])
    return {**by_method, **{name: Look(GREY, "D") for name in ceilings}}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Set matplotlib's parameters to the house style, whatever the machine's own are."""
    with mpl.rc_context():
        dict.update(
            mpl.rcParams, _parameters()
        )  # checked once, because a checked update for each figure is slow
        yield


@functools.cache
def _parameters() -> dict[str, Any]:
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast("Any", _STYLE))
        return {key: value for key, value in dict.items(mpl.rcParams) if key != "backend"}


@contextlib.contextmanager
def canvas(width: float = WIDTH, height: float = 3.4) -> Iterator[tuple[Figure, Axes]]:
    """Yield a styled figure and its axes, with sizes in inches."""
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


@contextlib.contextmanager
def panels(
    number: int, columns: int, width: float, height: float, **shared: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a styled figure and the axes of its panels, in lines of ``columns``. Sizes are in inches."""
    with canvas(width, height) as (figure, single):
        single.remove()
        grid = figure.subplots(-(-number // columns), columns, squeeze=False, **shared).ravel()
        for axes in grid[number:]:
            axes.set_visible(False)
        yield figure, list(grid[:number])


def draw(figure: Figure, name: str, title: str, data: pd.DataFrame) -> Plot:
    """Turn a figure into a `Plot`. Call it inside its `canvas` block."""
    buffer = io.StringIO()
    blank = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # print_svg draws once, while savefig would draw twice for the layout, which the image uses too. Both are made now,
    # because the figures of many runs would take gigabytes if they were kept until the end.
    FigureCanvasSVG(figure).print_svg(buffer, metadata=blank)
    figure.set_layout_engine("none")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font(-family)?: ?([\d.]+px )?[^;\"]*sans-serif", _short_font, text)
    text = re.sub(r"\n\s*", "\n", text)
    text = visible(_compact(text))
    return Plot(name, title, _inline(text, name, title), text, image(figure), data)


def image(figure: Figure) -> bytes:
    """Return a figure as PNG on the page's light ground."""
    buffer = io.BytesIO()
    figure.set(dpi=PNG_DPI, facecolor=PAPER)
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _compact(text: str) -> str:
    """Give coordinates two decimals and make one path of each group of points."""
    text = re.sub(rf'<g id="{DOTS}-[^"]*">.*?</g>\s*</g>', _one_path, text, flags=re.DOTALL)
    return re.sub(r"<(?!image)[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)


def _one_path(group: re.Match[str]) -> str:
    """Return points as strokes of no length with round ends: 15 bytes a point, and still text in the file."""
    points = re.findall(r'<use [^>]*x="([-\d.]+)" y="([-\d.]+)"', group[0])
    fill = re.search(r"<use [^>]*fill: (#\w+)", group[0])
    opacity = re.search(r"<use [^>]*opacity: ([\d.]+)", group[0])
    clip = re.search(r'clip-path="[^"]*"', group[0])
    size = re.match(rf'<g id="{DOTS}-([\d.]+)-', group[0])
    if not (points and fill and size):
        return group[0]
    alpha = f"; stroke-opacity: {opacity[1]}" if opacity else ""
    look = f"fill: none; stroke: {fill[1]}; stroke-width: {size[1]}; stroke-linecap: round{alpha}"
    paths = []
    for i in range(min(_BATCHES, len(points))):
        marks = "".join(f"M{float(x):.1f} {float(y):.1f}h0" for x, y in points[i::_BATCHES])
        paths.append(f'<path d="{marks}" style="{look}"/>')
    return f"<g {clip[0] if clip else ''}>\n" + "\n".join(paths) + "\n</g>"


def _short_font(match: re.Match[str]) -> str:
    return f"font{match[1] or ''}: {match[2] or ''}sans-serif"


def _inline(text: str, name: str, title: str) -> str:
    """Make ids unique on the page, colours the page's own and the size fluid."""
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    for color, page in _PAGE_COLORS.items():
        text = text.replace(color.lower(), page)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg {box[0] if box else ""} role="img" aria-label="{label}">{rest}'.strip()


def page_color(color: str) -> str:
    """Return the CSS colour that stands on the page for a colour of the figures."""
    return _PAGE_COLORS.get(color, color)


def shorten(label: str, length: int = 26) -> str:
    """Return a label cut in its middle, so that its ends stay recognisable."""
    if len(label) <= length:
        return label
    tail = (length - 1) // 3
    return f"{label[: length - 1 - tail]}…{label[-tail:]}"


def slug(*parts: str) -> str:
    """Return a name for files and ids made of letters, digits and hyphens."""
    text = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    return text or "figure"


def spread(values: np.ndarray, *, plain: bool = False) -> tuple[float, float, bool]:
    """Return padded limits and whether a logarithmic axis serves better (all positive, wide spread).

    ``plain`` asks for the limits of a linear axis.
    """
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0, False
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > 30 and not plain:
        return low / 1.3, high * 1.3, True
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return low - pad, high + pad, False


def logarithmic(
    axes: Axes,
    *directions: str,
    subs: tuple[float, ...] = (1.0, 3.0),
    most: int | None = None,
    label: Callable[[float, Any], str] = lambda value, _: f"{value:g}",
) -> None:
    """Make axes logarithmic with plain numbers, at most ``most`` of them, because labels are never read as formulas."""
    for direction in directions:
        axes.set(**{f"{direction}scale": "log"})
        axis = axes.xaxis if direction == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=subs, numticks=most))
        axis.set_major_formatter(FuncFormatter(label))
        axis.set_minor_formatter(NullFormatter())


def bare_rows(axes: Axes) -> None:
    """Draw no ticks, grid lines and spine along the y axis, whose places are rows."""
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def named_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Give each row a label on the y axis, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    bare_rows(axes)


def counting(axes: Axes, top: float, *directions: str) -> None:
    """Make axes of counts logarithmic from 1 on, with a place for 0."""
    ticks = [0.0, *(float(10**i) for i in range(9) if 10**i <= max(top, 1.0))]
    if len(ticks) < 4:
        ticks = sorted({*ticks, *(3.0 * t for t in ticks if 3 * t <= top)})
    for direction in directions:
        scale = axes.set_xscale if direction == "x" else axes.set_yscale
        scale("symlog", linthresh=1.0, linscale=0.5)
        axis = axes.xaxis if direction == "x" else axes.yaxis
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())


def sampled(n: int, most: int = MOST_POINTS) -> np.ndarray:
    """Return which of ``n`` points are drawn: all, or an even draw that is always the same."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, most, replace=False))


def points(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    color: str,
    *,
    size: float = 12.0,
    alpha: float = 0.5,
    marker: str = "o",
    most: int = MOST_POINTS,
) -> None:
    """Draw points. Many become small round dots that cost few bytes.

    Parameters
    ----------
    x, y
        Coordinates [points]. Those not finite are left out.
    size
        Area in square points.
    most
        Points drawn. Of more, an even draw.
    """
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(x) <= _MARKERS:
        axes.scatter(x, y, s=size, color=color, alpha=alpha, marker=marker, lw=0)
        return
    chosen = sampled(len(x), most)
    gid = f"{DOTS}-{np.sqrt(size):.1f}-{len(axes.collections)}"
    axes.scatter(x[chosen], y[chosen], s=size, color=color, alpha=alpha, lw=0, gid=gid)


def legend_text(label: str, length: int = 28) -> str:
    """Return a label for a legend, which would hide one whose first letter is '_'."""
    return f"\u200b{shorten(label, length)}"
