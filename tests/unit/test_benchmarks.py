"""The benchmarks run, at tiny sizes; the one for GPUs needs little more than torch."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import anndata
import numpy as np
import pytest
from scipy import sparse

ROOT = Path(__file__).parents[2]
LIGHT = """
import runpy, sys
sys.argv = ["gpu.py", "--tiny", "--device", "cpu", "--out", sys.argv[1]]
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
heavy = {"pydantic", "pandas", "anndata", "scipy", "perturbdiff.config.settings"} & set(sys.modules)
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


def test_full_transcriptome_is_what_anndata_writes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # imported by name: the compiled loops are kept on disk with it
    simulate = importlib.import_module("full_transcriptome").simulate
    paths = simulate(tmp_path / "counts.h5ad", 301, 2500, num_files=2, compression="gzip")
    files = [anndata.read_h5ad(path) for path in paths]
    assert [a.shape for a in files] == [(150, 2500), (151, 2500)]
    for adata in files:
        matrix = sparse.csr_matrix(adata.X)
        assert matrix.has_canonical_format
        assert matrix.data.dtype == np.float32
        assert (matrix.data == np.round(matrix.data)).all()
        assert (matrix.data > 0).all()
        assert 0.02 < matrix.nnz / (matrix.shape[0] * 2500) < 0.1
        assert "control" in set(adata.obs["perturbation"])
    assert (files[0].X[:150] != files[1].X[:150]).nnz > 0


def test_the_tables_of_ten_million_cells_are_those_of_the_measurement(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = ROOT / "benchmarks" / "ten_million.py"
    measured = ROOT / "benchmarks" / "measured" / "ten_million.json"
    monkeypatch.setattr(sys, "argv", [str(script), "--table", str(measured)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip() in (ROOT / "lab" / "scale.md").read_text()


def test_preprocess_benchmark_prints_a_table_from_which_scale_is_computed(tmp_path):
    command = [
        sys.executable,
        "-W",
        "ignore",
        "benchmarks/preprocess.py",
        "--cells",
        "300",
        "--genes",
        "2500",
    ]
    command += ["--turns", "1", "--only", "ours --jobs 1", "scanpy", "--folder", str(tmp_path)]
    out = tmp_path / "found.json"
    table = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert "cells/CPU-s" in table
    found = json.loads(out.read_text())["cells"]["300"]
    assert set(found) == {"ours --jobs 1", "scanpy"}
    ours = found["ours --jobs 1"]
    assert {"input hash", "reading cells", "sorting cells", "writing cells"} <= set(ours["phases"])
    assert 0 < sum(ours["phases"].values()) <= ours["cpu"]
    assert ours["private"] > 50
    page = tmp_path / "scale.md"
    page.write_text((ROOT / "lab" / "scale.md").read_text())
    scale = [sys.executable, "benchmarks/scale.py", str(out), "--update", str(page)]
    subprocess.run(scale, cwd=ROOT, check=True)
    text = page.read_text()
    assert "Tahoe100M, 101 M" in text
    assert "nan" not in text
    subprocess.run(scale, cwd=ROOT, check=True)
    assert page.read_text() == text


THEIRS = """
from perturbdiff.evaluation import METRICS, compare, tabulate


class MetricsEvaluator:
    def __init__(self, predicted, real, *, control_pert, pert_col, num_threads, outdir):
        labels = [a.obs[pert_col].astype(str).to_numpy() for a in (real, predicted)]
        self.found = compare(
            real.X, predicted.X, *labels, control=control_pert, genes=list(real.var_names), definition="cell-eval-0.8.2"
        )

    def compute(self, skip_metrics):
        table = tabulate(self.found, [n for n, m in METRICS.items() if m.column])
        table.columns = [METRICS[n].column for n in table.columns]
        table["mae"] += 1e-3
        return table.reset_index(), None
"""
PROTOTYPE = """
import numpy as np
import pytest


def evaluate(real, predicted, column, control, compat):
    names = np.unique(real.obs[column].astype(str))
    names = names[names != control]
    means = [
        np.stack([np.asarray(a[a.obs[column] == n].X.mean(axis=0)).ravel() for n in names])
        for a in (real, predicted)
    ]
    return names, {"mse": ((means[0] - means[1]) ** 2).mean(axis=1)}, None, None
"""


def test_evaluation_benchmark_compares_values_and_takes_no_turn_twice(tmp_path, monkeypatch):
    (tmp_path / "cell_eval.py").write_text(THEIRS)
    (tmp_path / "prototype.py").write_text(PROTOTYPE)
    page, out = tmp_path / "speed.md", tmp_path / "evaluate.json"
    page.write_text("before\n<!-- evaluation: start -->\n<!-- evaluation: end -->\nafter\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "benchmarks/evaluate.py", "--size", "tiny", "--turns", "1"]
    command += [
        "--cell-eval",
        sys.executable,
        "--prototype",
        str(tmp_path / "prototype.py"),
        "--layout",
        "dense",
    ]
    command += ["--only", "ours, by condition, 2 threads", "prototype, 1 BLAS thread", "cell-eval"]
    command += ["--folder", str(tmp_path / "work"), "--out", str(out), "--update", str(page)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads(out.read_text())["tiny, dense"]
    assert set(found["rows"]) == {"ours, by condition, 2 threads", "prototype, 1 BLAS thread", "cell-eval"}
    assert all(row["turns"] == 1 and row["wall"] > 0 and row["peak"] > 50 for row in found["rows"].values())
    ours = found["agreement"]["ours-2"]
    assert [column for column, row in ours.items() if row["differ"]] == ["mae"]
    assert found["agreement"]["prototype-1"]["mse"]["largest"] < 1e-6
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| cell-eval | " in text
    assert "nan" not in text
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert json.loads(out.read_text())["tiny, dense"]["rows"] == found["rows"]


def test_evaluated_cells_are_the_same_in_either_layout(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("evaluated_cells")
    sparse_paths, dense_paths = (
        module.simulate(tmp_path, module.Screen(600, 200, 8, genes=120, dense=dense))
        for dense in (False, True)
    )
    real, predicted = (anndata.read_h5ad(path) for path in sparse_paths)
    assert 0.08 < real.X.nnz / (600 * 120) < 0.12
    assert real.X.has_canonical_format
    for path, sides in zip(dense_paths, (real, predicted), strict=True):
        assert np.array_equal(anndata.read_h5ad(path).X, sides.X.toarray())
    controls = [side[side.obs["perturbation"] == "control"].copy() for side in (real, predicted)]
    assert np.array_equal(controls[0][controls[1].obs_names].X.toarray(), controls[1].X.toarray())
    treated = [side[side.obs["perturbation"] == "p0001"].copy() for side in (real, predicted)]
    assert (treated[0][treated[1].obs_names].X != treated[1].X).nnz > 0


# name, attempt, status, inputs, submitted, begun, own time, ended, noticed: a small run on a cluster, in seconds
RECORDED = (
    ("DATA:PREPROCESS (screen)", 1, "COMPLETED", "", 10, 13, 20, 34, 36),
    ("DATA:SPLIT (screen)", 1, "COMPLETED", "a1", 36, 37, 4, 42, 44),
    ("FIT:TRAIN (model)", 1, "FAILED", "a1 b2", 44, 45, 12, 58, 60),
    ("FIT:TRAIN (model)", 2, "COMPLETED", "a1 b2", 60, 61, 30, 92, 95),
    ("FIT:BASELINE (control)", 1, "COMPLETED", "a1 b2", 44, 45, 25, 71, 72),
    ("FIT:BASELINE (linear)", 1, "COMPLETED", "a1 b2", 44, 45, 26, 72, 73),
    ("REPORT", 1, "COMPLETED", "d4 e5 f6", 95, 96, 4, 101, 103),
)


def recorded_run(folder):
    """Write a trace and work folders as Nextflow leaves them, and its log."""
    start = time.mktime((2026, 11, 22, 1, 0, 0, 0, 0, -1))
    names = ("a1", "b2", "c3", "d4", "e5", "f6", "g7")
    rows = ["name\tstatus\tattempt\tcpus\tsubmit\tcomplete\tworkdir"]
    for place, (name, attempt, status, inputs, submitted, begun, own, ended, noticed) in zip(
        names, RECORDED, strict=True
    ):
        work = folder / "work" / "00" / place
        (work / "tables1").mkdir(parents=True)
        for i, origin in enumerate(inputs.split()):
            (work / ("tables1" if i else "") / f"input{i}").symlink_to(
                folder / "work" / "00" / origin / "output"
            )
        (work / "own-output").symlink_to("elsewhere")
        for file, moment in ((".command.begin", begun), (".exitcode", ended)):
            (work / file).touch()
            os.utime(work / file, (start + moment, start + moment))
        (work / ".command.trace").write_text(f"nextflow.trace/v2\nrealtime={own * 1000}\n")
        times = [
            datetime.fromtimestamp(start + moment).isoformat(" ", "milliseconds")
            for moment in (submitted, noticed)
        ]
        rows.append("\t".join([name, status, str(attempt), "1", *times, str(work)]))
    rows.append("\t".join(["SIMULATE", "CACHED", "1", "1", *times, str(folder / "gone")]))
    (folder / "pipeline_info").mkdir()
    (folder / "pipeline_info" / "trace_1.tsv").write_text("\n".join(rows) + "\n")
    log = folder / "nextflow.log"
    log.write_text("Nov-22 01:00:02.000 [main] DEBUG first\n  more\nNov-22 01:01:45.500 [main] DEBUG last\n")
    os.utime(log, (start + 106, start + 106))
    return log


def test_overhead_of_a_workflow_is_told_from_its_tasks_work(tmp_path, monkeypatch, capsys):
    log = recorded_run(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "workflow.py",
            str(tmp_path),
            "--log",
            str(log),
            "--cores",
            "2",
            "--wall",
            "107",
            "--out",
            str(tmp_path / "f.json"),
        ],
    )
    runpy.run_path(str(ROOT / "benchmarks" / "workflow.py"), run_name="__main__")
    assert "PREPROCESS (screen) 20.0 → SPLIT (screen) 4.0 → TRAIN (model) 12.0" in capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())["run"]
    assert found["tasks"] == 7
    assert found["critical path"] == 20 + 4 + 12 + 30 + 4
    assert found["overhead"] == 107 - 70
    assert found["work / cores"] == 121 / 2
    # two cores: the second baseline waits for the first attempt of the training, the second attempt for a baseline
    assert found["ideal on these cores"] == 24 + 25 + 30 + 4
    assert found["waiting for cores"] == 13
    assert found["overhead beside waiting"] == 24
    assert found["start-up"] == 8
    assert found["shut-down"] == 2.5
    assert found["submission to begin"] == {"median": 1, "max": 3}
    assert found["end to notice"]["max"] == 3


def test_overhead_needs_the_work_folders(tmp_path, monkeypatch):
    log = recorded_run(tmp_path)
    (tmp_path / "work" / "00" / "b2" / ".exitcode").unlink()
    monkeypatch.setattr(sys, "argv", ["workflow.py", str(tmp_path), "--log", str(log)])
    with pytest.raises(SystemExit, match="work folders"):
        runpy.run_path(str(ROOT / "benchmarks" / "workflow.py"), run_name="__main__")
