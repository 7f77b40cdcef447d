"""What the registry says, as text for the command line."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from perturbdiff.datasets.fetching import cost
from perturbdiff.datasets.registry import Dataset, here, registered
from perturbdiff.runtime.progress import byte_size

_UNKNOWN = "not known"
_WIDTH = 110


def table() -> str:
    """Return a line for each data set: its name, size, whether it lies here, and what it is."""
    rows = [("name", "size", "here", "what")]
    for name, dataset in registered().items():
        rows.append((name, _size(dataset), _here(dataset), dataset.title))
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = ["  ".join([*(row[k].ljust(widths[k]) for k in range(3)), row[3]]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _size(dataset: Dataset) -> str:
    size = dataset.size
    if size is None:
        return _UNKNOWN
    return byte_size(size)


def _here(dataset: Dataset) -> str:
    parts = dataset.files
    there = sum(here(part) is not None for part in parts)
    return "yes" if there == len(parts) else f"{there}/{len(parts)}" if there else "no"


def facts(dataset: Dataset) -> dict[str, Any]:
    """Return all that the registry says of a data set, and how many of its files lie here."""
    parts = dataset.files
    return {
        **asdict(dataset),
        "files": len(parts),
        "files_here": sum(here(part) is not None for part in parts),
    }


def render(dataset: Dataset) -> str:
    """Return all that the registry says of a data set, for a person."""
    counts = (dataset.cells, dataset.genes, dataset.values)
    cells, genes, values = (_UNKNOWN if number is None else f"{number:,}" for number in counts)
    sums = {"SHA-256": dataset.sha256, "MD5": dataset.md5}
    published = next((f"{kind} {digest}" for kind, digest in sums.items() if digest), _UNKNOWN)
    query = dataset.census and f"Census of {dataset.census.version}, {dataset.census.filter}"
    lines = [
        ("what", dataset.title),
        ("file", dataset.file + (" (parts {} to {})".format(*dataset.parts) if dataset.parts else "")),
        ("from", dataset.url or query or "no address; put the file into the folder PERTURBDIFF_DATA"),
        ("source", dataset.source),
        ("selection", dataset.selection or "as published"),
        ("cost", cost(dataset)),
        ("sum", published),
        ("cells", cells),
        ("genes", genes),
        ("stored values", values),
        ("scale of X", dataset.scale),
        ("preset", dataset.preset or "none"),
        ("citation", dataset.citation),
        *(("column " + name, text) for name, text in dataset.columns.items()),
        *(("odd labels", text) for text in dataset.label_errors),
        *(("note", text) for text in dataset.traps),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join([dataset.name, *(_line(name, text, width) for name, text in lines)])


def _line(name: str, text: str, width: int) -> str:
    lead = f"  {name.ljust(width)}  "
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )
