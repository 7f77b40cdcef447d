"""The command ``sample``: whose recipe holds, which devices there are."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from perturbdiff.checkpoint.bundle_record import recipe_of
from perturbdiff.config import recipes
from perturbdiff.predictions import read_predictions
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.resources import resolve_devices


def test_overrides_change_the_bundles_own_recipe(trained, tmp_path, run_cli):
    own = recipe_of(trained / "bundle")
    assert own.sample != recipes.load("recommended").sample
    wanted = pd.DataFrame({"cell_type": ["B"], "batch": ["d1"], "perturbation": ["p1"], "n_cells": [3]})
    wanted.to_csv(tmp_path / "wanted.csv", index=False)
    out = tmp_path / "p.h5ad"
    done = run_cli(
        "sample", trained / "bundle", trained / "store", "--conditions", tmp_path / "wanted.csv", "--out", out,
        "--set", "sample.eta=0.5", "--device", "cpu", "--random-init", "--seed", "4",
    )  # fmt: skip
    assert (done.code, done.out.strip()) == (0, str(out))
    manifest = json.loads((tmp_path / "p.h5ad.manifest.json").read_text())
    assert manifest["config"]["sample"] == {**own.sample.model_dump(mode="json"), "eta": 0.5}
    facts = read_predictions(out).uns["perturbdiff"]
    assert (facts["seed"], facts["random_init"], facts["num_steps"]) == (4, True, own.sample.num_steps)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu", "write auto, cpu, cuda, or GPUs by number"),
        ("cpu:1", "write auto, cpu, cuda, or GPUs by number"),
        ("cuda:x", "write auto, cpu, cuda, or GPUs by number"),
        ("cpu,cpu", "a device is named twice"),
        ("cuda:99", "PyTorch sees [0-9]+ GPUs here"),
    ],
)
def test_devices_that_there_are_not(text, message):
    with pytest.raises(UserError, match=message):
        resolve_devices(text)


def test_devices(monkeypatch):
    assert resolve_devices("cpu") == ["cpu"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_devices("auto") == ["cuda"]
    assert resolve_devices("cuda:0, cuda:1") == ["cuda:0", "cuda:1"]
