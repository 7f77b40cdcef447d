"""The benchmarks of the model run, at tiny sizes; the one for GPUs needs little more than torch."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIGHT = """
import runpy, sys
sys.argv = ["gpu.py", "--tiny", "--device", "cpu", "--out", sys.argv[1]]
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
heavy = {"pydantic", "lightning", "pandas", "anndata", "scipy", "perturbdiff.config"} & set(sys.modules)
assert not heavy, heavy
"""


def test_gpu_benchmark_runs_with_torch_and_numpy_alone(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", LIGHT, str(tmp_path / "gpu.json")]
    table = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    rows = {row["what"]: row for row in found["rows"]}
    assert {"train eager", "train straightforward", "train fed", "data alone", "sample eager"} <= set(rows)
    assert all(row["cells/s"] > 0 for row in rows.values())
    assert rows["train straightforward"]["TFLOP/s"] > 0
    assert max(found["agreement"].values()) < 1e-4
    assert all(name in table for name in rows)


def test_model_benchmark_finds_both_sides_alike(tmp_path, monkeypatch, capsys):
    script = ROOT / "benchmarks" / "model.py"
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "--tiny", "--out", str(tmp_path / "model.json")])
    runpy.run_path(str(script), run_name="__main__")
    assert "largest relative difference" in capsys.readouterr().out
    found = json.loads((tmp_path / "model.json").read_text())
    assert max(found["agreement"].values()) < 1e-4
    assert {"told", "told, again", "dropped", "dropped, again", "mix", "sampling"} == set(found["rows"])
    for row in found["rows"].values():
        assert row["perturbdiff: GFLOP"] < row["straightforward: GFLOP"]
