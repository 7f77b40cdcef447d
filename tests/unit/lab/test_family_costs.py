"""The costs of the loss of whole sets can be measured."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "lab" / "family_costs.py"


@pytest.mark.parametrize("statistic", ["cross", "set"])
def test_a_step_takes_time_and_moves_the_weights(statistic):
    trainee = runpy.run_path(str(SCRIPT))["Trainee"](statistic, 12, 4, 4)
    before = [weight.detach().clone() for weight in trainee.module.parameters()]
    assert trainee.step(0) > 0
    moved = [bool((old != new).any()) for old, new in zip(before, trainee.module.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2
