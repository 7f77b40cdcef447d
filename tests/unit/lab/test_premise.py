"""The study of the premise runs, at a tiny size, and its true sets are alike."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pandas as pd

from perturbdiff import baselines
from perturbdiff.baselines.external import external_stage, methods

SCRIPT = Path(__file__).parents[3] / "lab" / "premise.py"
TINY = (
    "simulate.cells=4000", "simulate.genes=30", "train.set_size=5", "train.sets_per_step=2", "model.width=16",
    "model.depth=1", "model.covariate_width=8", "sample.num_steps=2",
)  # fmt: skip


def test_premise_runs_and_tells_true_sets_from_pooled_cells(tmp_path, monkeypatch, capsys):
    settings = [word for text in TINY for word in ("--set", text)]
    given = "--levels strong --models paper family --tools state --training-sets mixed --shuffles --seeds 0"
    steps = "--steps-paper 2 --steps-family 2"
    controls = lambda _, *files, seed: baselines.predict("control", *files, seed=seed)  # noqa: E731
    monkeypatch.setattr(external_stage, "predict_external", controls)  # no tool is installed
    monkeypatch.setattr(methods, "tool_method", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), "--out", str(tmp_path), *given.split(), *steps.split(), *settings]
    )
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "recall" in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "sets.csv")
    assert set(table["level"]) == {"strong"}
    names = {"family, sets, 1 step", "paper, mixed, 2 steps, shuffled", "state, mixed"}
    assert names <= set(table["method"])
    means = table.groupby("method").mean(numeric_only=True)
    true, pooled = means.loc["true sets, training wells"], means.loc["pooled training cells"]
    assert 0.7 < true["between"] / true["true_between"] < 1.4
    assert abs(pooled["between"]) < 0.2 * true["true_between"]
    assert true["recall"] > 0.8 > pooled["recall"]
    assert (
        abs(means.loc["state, mixed", "between"]) < 0.2 * true["true_between"]
    )  # sets of all wells' controls
