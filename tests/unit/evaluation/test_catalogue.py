"""The catalogue and its page say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from perturbdiff.evaluation.catalogue import METRICS

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
ARROWS = {"higher": "↑", "lower": "↓", "one": "→ 1", "none": ""}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_documented_as_it_is(name):
    metric = METRICS[name]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    assert metric.formula.replace("|", "\\|") in row
    assert metric.undefined in row
    assert f"| {ARROWS[metric.direction]} |" in row
    assert metric.column in row
