"""matplotlib figures as small inline SVG: colours that follow the page, unique ids, equal bytes for equal data."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import matplotlib as mpl
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from perturbdiff.reporting.figures.hover import NO_POINTS, Drawing, Points, placed, titles
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Fourteen colours that stay apart for eyes that see no red or no green, on light and on dark ground (figures.css holds
# their dark twins). Neighbours of alike colours differ in their markers.
PALETTE = (
    "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#8C6BB1", "#333D01", "#600A53",
    "#290E9B", "#B4065F", "#733A37", "#716328", "#6C2CB4", "#05437A", "#0C665A",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#8A8F98"
WIDTH = 4.6
NARROW = 3.5  # of figures in narrow columns: their text keeps its size on the page
PNG_DPI = 160
DOTS = "dots"  # group of points that becomes one path, named DOTS-diameter-
_BATCHES = 6  # overlapping points of one path do not add up, but those of different paths do
# Stand-ins that become CSS colours on the page, and in an exported SVG they are what they say.
INK, RULE, PAPER = "#22272E", "#D5D9DF", "#FDFDFC"
# The style sheet sets these for light and for dark pages.
_PAGE_COLORS = {
    INK: "currentColor",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    **{color: f"var(--m{i})" for i, color in enumerate(PALETTE, start=1)},
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
    "axes.formatter.useoffset": False,  # no 1e-5+9.6e-1 at the end of an axis
    "axes.formatter.limits": (-12, 12),
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn, everywhere the same."""

    color: str
    marker: str
    dash: str = "-"


@dataclass(frozen=True)
class Plot:
    """A drawn figure: the markup for the page, files of its own (PNG on the page's light ground), its numbers.

    ``points`` are what the page names when they are pointed at.
    """

    name: str
    title: str
    svg: str
    file: str
    png: bytes = field(repr=False)
    data: pd.DataFrame
    points: Points = NO_POINTS


def export(plots: Iterable[Plot], folder: Path) -> None:
    """Write every figure into ``folder`` as SVG and PNG, and its numbers as CSV."""
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(plot.file, encoding="utf-8")
        (folder / f"{plot.name}.png").write_bytes(plot.png)
        tabular.write_csv(plot.data, folder / f"{plot.name}.csv")


def looks(
    models: Sequence[str], ceilings: Sequence[str] = (), families: Mapping[str, str] | None = None
) -> dict[str, Look]:
    """Return a look for each method: a colour of its own for up to 14, then again with another marker.

    Methods of one family (by name, without one a method is its own) have a colour in common and differ in marker.
    """
    names = list(dict.fromkeys(models))
    family = {name: (families or {}).get(name, name) for name in names}
    order = list(dict.fromkeys(family.values()))
    seen: Counter[str] = Counter()
    by_method = {}
    for name in names:
        place = order.index(family[name])
        turn = place // len(PALETTE) + seen[family[name]]
        seen[family[name]] += 1
        hue = place % len(PALETTE)
        marker = MARKERS[(hue + turn) % len(MARKERS)]
        by_method[name] = Look(PALETTE[hue], marker, ("-", "--", ":")[turn % 3])
    return {**by_method, **{name: Look(GREY, "D") for name in ceilings}}


def of_method(method: str) -> str:
    """Return the id that marks an element of a figure as this method's, so that the page can switch it off."""
    return f"m-{method.encode().hex()}"


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
        figure = Drawing(figsize=(width, height), layout="constrained")
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
    points = placed(figure)
    figure.set_layout_engine("none")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font(-family)?: ?([\d.]+px )?[^;\"]*sans-serif", _short_font, text)
    text = re.sub(r"\n\s*", "\n", text)
    text = visible(_compact(text))
    inline = _inline(text.replace("</svg>", f"{titles(points)}</svg>"), name, title)
    return Plot(name, title, inline, text, image(figure), data, points)


def image(figure: Figure) -> bytes:
    """Return a figure as PNG on the page's light ground."""
    buffer = io.BytesIO()
    figure.set(dpi=PNG_DPI, facecolor=PAPER)
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _compact(text: str) -> str:
    """Give coordinates two decimals and make one path of each group of points."""
    text = re.sub(rf'<g id="{DOTS}-[^"]*">.*?</g>\s*</g>', _one_path, text, flags=re.DOTALL)
    text = re.sub(r'<g id="m-([0-9a-f]*)">', lambda found: f"<g{_method(found[1])}>", text)
    return re.sub(r"<(?!image)[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)


def _method(code: str) -> str:
    """Return the attribute that names a method, given the end of an id of `of_method`."""
    return f' data-method="{escape(bytes.fromhex(code).decode())}"' if code else ""


def _one_path(group: re.Match[str]) -> str:
    """Return points as strokes of no length with round ends: 15 bytes a point, and still text in the file."""
    points = re.findall(r'<use [^>]*x="([-\d.]+)" y="([-\d.]+)"', group[0])
    fill = re.search(r"<use [^>]*fill: (#\w+)", group[0])
    opacity = re.search(r"<use [^>]*opacity: ([\d.]+)", group[0])
    clip = re.search(r'clip-path="[^"]*"', group[0])
    size = re.match(rf'<g id="{DOTS}-([\d.]+)-\d+-(?:m-([0-9a-f]*))?"', group[0])
    if not (points and fill and size):
        return group[0]
    alpha = f"; stroke-opacity: {opacity[1]}" if opacity else ""
    look = f"fill: none; stroke: {fill[1]}; stroke-width: {size[1]}; stroke-linecap: round{alpha}"
    paths = []
    for i in range(min(_BATCHES, len(points))):
        marks = "".join(f"M{float(x):.1f} {float(y):.1f}h0" for x, y in points[i::_BATCHES])
        paths.append(f'<path d="{marks}" style="{look}"/>')
    owner = _method(size[2] or "")
    return f"<g{owner} {clip[0] if clip else ''}>\n" + "\n".join(paths) + "\n</g>"


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


def legend_text(label: str, length: int = 28) -> str:
    """Return a label for a legend, which would hide one whose first letter is '_'."""
    return f"\u200b{shorten(label, length)}"


def slug(*parts: str) -> str:
    """Return a name for files and ids made of letters, digits and hyphens."""
    text = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    return text or "figure"
