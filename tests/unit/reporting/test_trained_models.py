"""What was trained and what it cost, from the records of predictions and bundles."""

import json
import math

import pandas as pd
import pytest
from report_runs import make_run

from perturbdiff.reporting.figures.svg import looks
from perturbdiff.reporting.figures.trained_models import costs, pretrained, record_files, trained
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.page.page import write_report
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError

CPA = {
    "baseline": "cpa", "baseline_kind": "tool", "version": "0.8.8", "settings": "quick", "seed": 1,
    "licence": "MIT", "note": "A note that the reader must know.",
}  # fmt: skip
TOOL = {
    "seconds": {"train": 100.0, "predict": 8.0},
    "cpu_seconds": {"train": 130.0, "predict": 9.0},
    "peak_memory_mib": 900,
}


def record(folder, name, run, manifest=None):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.run.json").write_text(json.dumps(run))
    (folder / f"{name}.manifest.json").write_text(json.dumps(manifest or {}))


def bundle(folder, **run):
    folder.mkdir()
    given = {"cpu_seconds": 120.0, "wall_seconds": 125.0, "peak_memory_mib": 1100.0, "attempts": 1}
    (folder / "run.json").write_text(json.dumps(given | run))
    (folder / "manifest.json").write_text(json.dumps({"stage": "train", "seed": 0, "name": folder.name}))
    return folder


@pytest.fixture
def world(tmp_path):
    """Our model, an external method and a built-in baseline without a record; two bundles, one of a pretraining."""
    small = {"perturbations": 2, "cells": 2, "shown": 1}
    ours = {"recipe": "kang18", "recipe_key": "k", "seed": 0, "train_seed": 0}
    runs = [
        make_run(tmp_path / "ours", "ours", made_by=ours, **small),
        make_run(tmp_path / "cpa", "cpa-seed1", made_by=CPA, **small),
        make_run(tmp_path / "linear", "linear", **small),
    ]
    for run in runs:
        for name in ("embedding", "de_real", "de_pred"):
            (run / f"{name}.parquet").unlink()
    bundles = [bundle(tmp_path / "prior", cpu_seconds=50.0), bundle(tmp_path / "model")]
    used = {"inputs": {"bundle": {"name": "model", "sha256": files.sha256(bundles[1])}}}
    record(tmp_path / "predictions", "ours.h5ad", {"wall_seconds": 30.0, "cpu_seconds": 29.0}, used)
    record(tmp_path / "predictions", "cpa.h5ad", {"wall_seconds": 300.0, "method_run": TOOL})
    return tmp_path, runs, bundles


def test_costs_are_those_of_training_and_predicting(world):
    folder, paths, bundles = world
    runs = read_runs(paths)
    records = record_files([folder / "predictions"])
    found = {run.method: cost for run, cost in costs(runs, records, bundles).items()}
    assert set(found) == {"ours", "cpa-seed1"}
    ours, cpa = found["ours"], found["cpa-seed1"]
    assert (ours.train_cpu, ours.train_wall, ours.predict_wall, ours.memory) == (120, 125, 30, 1100)
    assert (cpa.train_cpu, cpa.train_wall, cpa.predict_wall, cpa.memory) == (130, 100, 8, 900)
    assert list(pretrained(bundles, records)) == ["prior"]
    assert pretrained(bundles, []) == {}


def test_what_a_record_cannot_tell_is_left_open(world, tmp_path):
    folder, paths, bundles = world
    runs = read_runs(paths[:1])
    (bundles[1] / "run.json").write_text(
        json.dumps(
            {"attempts": 3, "cpu_seconds": 9.0, "wall_seconds": 10.0, "train_seconds_of_all_attempts": 77.0}
        )
    )
    made = json.loads((folder / "predictions" / "ours.h5ad.manifest.json").read_text())
    record(folder / "predictions", "ours.h5ad", {"wall_seconds": 2.0, "parts": 4}, made)
    cost = costs(runs, record_files([folder / "predictions"]), bundles)[runs[0]]
    assert math.isnan(cost.train_cpu)  # of the last attempt only
    assert cost.train_wall == 77.0
    assert math.isnan(cost.predict_wall)  # joining the parts drew nothing
    assert math.isnan(costs(runs, record_files([folder / "predictions"]), [])[runs[0]].train_wall)


def test_folders_without_records_are_refused(tmp_path):
    with pytest.raises(UserError, match="no record of predictions"):
        record_files([tmp_path])
    with pytest.raises(UserError, match="folder of records not found"):
        record_files([tmp_path / "nowhere"])


def test_a_line_for_each_method(world):
    folder, paths, bundles = world
    runs, records = read_runs(paths), record_files([folder / "predictions"])
    lost = [FailedRun("toy", "state", "tool", "no room")]
    look = looks([r.method for r in runs])
    table = trained(runs, lost, costs(runs, records, bundles), pretrained(bundles, records), look)
    lines = {
        row.head: dict(zip(table.columns[1:], (c.text for c in row.cells), strict=True)) for row in table.rows
    }
    assert list(lines) == ["ours", "cpa-seed1", "linear", "state", "prior"]
    cpa = lines["cpa-seed1"]
    assert cpa["kind"] == "external method"
    assert (cpa["version"], cpa["settings"], cpa["seed"], cpa["licence"]) == ("0.8.8", "quick", "1", "MIT")
    assert (cpa["training, CPU time"], cpa["prediction, wall time"], cpa["peak memory"]) == (
        "130 s",
        "8.0 s",
        "900 MiB",
    )
    assert lines["ours"]["settings"] == "kang18"
    assert lines["linear"]["training, CPU time"] == "n/a"
    assert lines["state"]["kind"] == "failed"
    assert lines["prior"]["kind"] == "pretrained"
    assert table.rows[1].note == CPA["note"]
    assert table.rows[3].note == "no room"
    assert trained(read_runs(paths[2:]), [], {}, {}, look) is None


def test_it_stands_on_the_page_and_beside_it(world):
    folder, paths, bundles = world
    given = {"records": [folder / "predictions"], "bundles": bundles}
    out = write_report(paths, folder / "r.html", **given)
    text = out.read_text()
    assert 'id="trained"' in text
    assert CPA["note"] in text
    table = pd.read_csv(folder / "r_tables" / "trained.csv").set_index("Method")
    assert table.loc["cpa-seed1", "training, CPU time"] == 130.0
    assert table.loc["ours", "training, CPU time"] == 120.0
    assert (
        "| cpa-seed1 | toy | external method | 0.8.8 | quick | 1 | 130 s |"
        in (folder / "r_tables" / "trained.md").read_text()
    )
    before = out.stat().st_mtime_ns
    record(folder / "predictions", "cpa.h5ad", {"method_run": {**TOOL, "cpu_seconds": {"train": 99.0}}})
    assert write_report(paths, out, **given).stat().st_mtime_ns != before
    assert 'id="trained"' not in write_report(paths[2:], folder / "s.html").read_text()
