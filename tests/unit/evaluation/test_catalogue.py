"""The catalogue and its page say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.metrics.differential import DEFINITIONS

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
ARROWS = {"higher": "↑", "lower": "↓", "one": "→ 1", "none": ""}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_documented_as_it_is(name):
    metric = METRICS[name]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    assert metric.formula.replace("|", "\\|") in row
    assert metric.undefined in row
    assert f"| {ARROWS[metric.direction]} |" in row
    assert (f"| `{metric.column}` |" if metric.column else "| – |") in row
    assert f"| {_number(metric.low)} … {_number(metric.high)} |" in row
    assert (metric.chance in row) if metric.chance else ("| measured |" in row or "| – |" in row)


def test_no_metric_is_documented_that_does_not_exist():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count(" | ") == 8]
    assert [row.split("`")[1] for row in rows] == list(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_coupling_is_documented_as_it_is(name):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    coupled = [release for release, d in DEFINITIONS.items() if METRICS[name].is_coupled(d)]
    said = {0: "no", 1: "0.6.6", 2: "always"}[len(coupled)]
    assert row.split(" | ")[-2] == said
    assert len(coupled) != 1 or coupled == ["cell-eval-0.6.6"]


def _number(value: float) -> str:
    """Return a bound of a range as the page has it."""
    return f"{value:g}".replace("-", "−").replace("inf", "∞")
