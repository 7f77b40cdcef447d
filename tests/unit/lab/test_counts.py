"""The study of whole counts: what real cells become by each way."""

from __future__ import annotations

import importlib

import pytest

from perturbdiff.store.store import Store


def test_only_counting_again_changes_real_cells(trained, capsys):
    counts = importlib.import_module("counts")
    table = counts.real_cells(Store(trained / "store"))
    assert "median depth of perturbed cells beside controls" in capsys.readouterr().out
    own = table[table["cells"] == "own depth"].groupby("way")["above zero"].mean()
    for way in ("as `sample` does", "each value rounded at random", "nearest whole number"):
        assert own[way] == pytest.approx(1, abs=1e-3)
    assert own["Poisson"] < 0.95
    assert own["multinomial"] < 0.95
