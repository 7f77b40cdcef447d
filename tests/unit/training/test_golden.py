"""Thirty steps of the recipe `tiny` have the loss curve that is stored beside this file.

The stored numbers come from one thread. Within 2e-3, for sums are rounded in another order on other processors: with
other instruction sets (AVX-512, AVX2, none) and two threads the curve differed by 1e-5 at most, and training
enlarges such differences with each step. ``python tests/golden_curve.py`` stores the curve anew.
"""

from __future__ import annotations

import json
import math

import pytest
from golden_curve import STORED, curve


def test_the_loss_curve_is_the_stored_one(tmp_path):
    stored, found = json.loads(STORED.read_text()), curve(tmp_path)
    assert found.keys() == stored.keys()
    for split, columns in stored.items():
        assert found[split].keys() == columns.keys()
        for name, values in columns.items():
            assert found[split][name] == pytest.approx(values, rel=2e-3), f"{split} {name}"


def test_the_stored_curve_is_one_of_learning():
    stored = json.loads(STORED.read_text())["train"]
    assert stored["step"] == list(range(1, 31))
    assert sum(stored["total"][-5:]) < 0.3 * sum(stored["total"][:5])
    for total, mmd, mse in zip(stored["total"], stored["mmd"], stored["mse"], strict=True):
        assert math.isclose(total, mmd + mse, rel_tol=1e-5)
