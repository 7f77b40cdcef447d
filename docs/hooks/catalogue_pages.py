"""Pages on what the package's own lists hold: metrics and published data sets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from perturbdiff.datasets import Dataset, registered
from perturbdiff.datasets.registry import cost
from perturbdiff.evaluation.metrics.catalogue import FAMILIES, METRICS
from perturbdiff.evaluation.metrics.differential import DEFINITIONS
from perturbdiff.evaluation.metrics.profile_metrics import Metric

_FAMILIES = {
    "expression": ("Mean profiles", "They compare the mean profile of a perturbation's cells."),
    "de": ("Differential expression", "They compare the genes that differ from controls by a rank test."),
    "count": ("Numbers of genes", "They are shown to judge the other metrics and are no scores."),
    "further": (
        "Further columns of cell-eval",
        "They are in cell-eval's tables and add little to the others.",
    ),
    "effect": (
        "What is specific to a perturbation",
        "They ask whether a prediction knows more than what all perturbations have in common, and are not raised by "
        "the noise of small samples.",
    ),
    "distribution": ("Cells as a distribution", "They compare the cells of one condition as a population."),
    "sets": (
        "Sets as a family",
        "They ask whether the sampled sets of a condition differ from one another as true sets (wells, guides, donors) "
        "do. They are computed where it is known which cells were a set: in the truth by the store's `data.set_key` or "
        "by `--set-col`, in predictions by the column `set`. At most 39 sets of at most 50 cells of a side are drawn, "
        "all of the same size.",
    ),
}
_DIRECTIONS = {
    "higher": "higher is better",
    "lower": "lower is better",
    "one": "best at 1",
    "none": "not ranked",
}
_SHORT = {"higher": "↑", "lower": "↓", "one": "→ 1", "none": ""}


def metrics_page() -> str:
    """Return the page on every metric of the catalogue."""
    lines = [
        "# Metrics",
        "",
        "This page is made from the catalogue of metrics, which `perturbdiff evaluate` and the report read too. "
        "[The explanation](../metrics.md) says what the metrics mean and how they relate to cell-eval.",
        "",
        "m is the mean log1p value of a perturbation's cells and c that of the controls, both per gene. δ = m − c is "
        "the change. *Chance* is what a prediction reaches that belongs to another perturbation. *Coupled* says "
        "whether another perturbation in the data can change the value.",
    ]
    for family in FAMILIES:
        lines += ["", *_family(family)]
    return "\n".join([*lines, ""])


def _family(family: str) -> Iterator[str]:
    title, about = _FAMILIES[family]
    metrics = [metric for metric in METRICS.values() if metric.family == family]
    yield from [f"## {title}", "", f"{about} `--metrics {family}` computes them alone.", ""]
    yield from ["| name | in the report | in cell-eval | better | range |", "|---|---|---|---|---|"]
    for metric in metrics:
        column = f"`{metric.column}`" if metric.column else "–"
        yield (
            f"| [`{metric.name}`](#{metric.name}) | {metric.label} | {column} | {_SHORT[metric.direction]} | "
            f"{_number(metric.low)} … {_number(metric.high)} |"
        )
    for metric in metrics:
        yield from _metric(metric)


def _metric(metric: Metric) -> Iterator[str]:
    yield from [
        "",
        f"### `{metric.name}` {{ #{metric.name} }}",
        "",
        f"{_capital(_text(metric.formula))}.",
        "",
    ]
    yield f"- **Range:** {_number(metric.low)} … {_number(metric.high)}, {_DIRECTIONS[metric.direction]}"
    yield f"- **Chance:** {_text(metric.chance) if metric.chance else _measured(metric)}"
    yield f"- **Coupled:** {_coupling(metric)}"
    yield f"- **Undefined:** {_text(metric.undefined)}"
    if metric.source not in ("own", "cell-eval"):
        yield f"- **Source:** {_text(metric.source)}"


def _measured(metric: Metric) -> str:
    return "measured" if metric.direction in ("higher", "lower") and metric.compute is not None else "–"


def _coupling(metric: Metric) -> str:
    coupled = [release for release, d in DEFINITIONS.items() if metric.is_coupled(d)]
    if len(coupled) == len(DEFINITIONS):
        return "always"
    return f"only in the definitions {' and '.join(coupled)}" if coupled else "no"


def _number(value: float) -> str:
    return f"{value:g}".replace("-", "−").replace("inf", "∞")


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _text(text: str) -> str:
    """Escape what Markdown would read."""
    return re.sub(r"([\\|*_<>])", r"\\\1", text)


def datasets_page() -> str:
    """Return the page on the registered data sets."""
    lines = [
        "# Data sets",
        "",
        "These published data sets have a name. [`perturbdiff data get NAME`](../data.md) fetches and checks one, and "
        "`perturbdiff data list NAME` says what stands here. `dataset:NAME` stands for the file in a samplesheet, and "
        "`perturbdiff.datasets.find(NAME)` returns its path. The files are no part of the package. They are looked up "
        "in the folder that the environment variable `PERTURBDIFF_DATA` names, and then in your cache. None was "
        "downloaded to write this page: it repeats what publishers and users say.",
        "",
        "| name | what it is | preset |",
        "|---|---|---|",
        *(f"| [`{d.name}`](#{d.name}) | {d.title} | {_preset(d)} |" for d in registered().values()),
    ]
    for dataset in registered().values():
        lines += ["", *_dataset(dataset)]
    return "\n".join([*lines, ""])


def _preset(dataset: Dataset) -> str:
    return f"[`{dataset.preset}`](presets.md#{dataset.preset})" if dataset.preset else "none"


def _dataset(dataset: Dataset) -> Iterator[str]:
    query = dataset.census and f"the Census of {dataset.census.version}, cells with `{dataset.census.filter}`"
    digest = (
        f"SHA-256 `{dataset.sha256}`" if dataset.sha256 else f"MD5 `{dataset.md5}`" if dataset.md5 else ""
    )
    yield from [f"## `{dataset.name}` {{ #{dataset.name} }}", "", f"{dataset.title}.", ""]
    yield f"- **File:** `{dataset.file}`, {digest or 'no sum is published'}"
    yield f"- **Cost:** {cost(dataset)}"
    yield f"- **Address:** {dataset.url or query or 'none is known; put the file into the folder yourself'}"
    yield f"- **Original:** {dataset.source}"
    yield f"- **Selection:** {dataset.selection or 'as published'}"
    yield f"- **Cite:** {dataset.citation}"
    yield f"- **Values:** {dataset.scale}"
    yield f"- **Preset:** {_preset(dataset)}"
    yield from ["", "| column of obs | what it holds |", "|---|---|"]
    yield from (f"| `{column}` | {meaning} |" for column, meaning in dataset.columns.items())
    if known := [*dataset.label_errors, *dataset.traps]:
        yield from ["", "Know this before you use it:", "", *(f"- {text}" for text in known)]
