"""From predictions to the page: what sampling and baselines tell of themselves arrives in the report."""

import json

import pandas as pd
import pytest

from perturbdiff import sampling
from perturbdiff.baselines import predict
from perturbdiff.config.settings import EvaluateConfig, SampleConfig
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.page.page import headline, write_report

CONFIG = EvaluateConfig(embed_conditions=0, bootstrap=20, metrics=("expression",))


def test_seeds_kinds_and_times_arrive(trained, tmp_path):
    store, split, made = trained / "store", trained / "split.parquet", tmp_path / "predictions"
    made.mkdir()
    for seed in (0, 1):
        few = SampleConfig(num_steps=2)
        out = made / f"ours-seed{seed}.h5ad"
        sampling.sample(trained / "bundle", store, out, split=split, config=few, seed=seed, device="cpu")
        predict("resample", store, split, made / f"copies-{seed}.h5ad", seed=seed)
    runs = [
        evaluate(path, store, tmp_path / path.stem, CONFIG, method=path.stem, dataset="tiny", threads=1)
        for path in sorted(made.glob("*.h5ad"))
    ]
    found = read_runs(runs)
    assert [(r.method, r.kind, r.baseline) for r in found] == [
        ("ours-seed0", "model", None),
        ("ours-seed1", "model", None),
        ("copies-0", "baseline", "resample"),
        ("copies-1", "baseline", "resample"),
    ]
    given = {"records": [made], "bundles": [trained / "bundle"]}
    write_report(runs, tmp_path / "r.html", **given)
    spread = pd.read_csv(tmp_path / "r_tables" / "over_seeds.csv").set_index(["method", "metric"])
    for name, members in (("ours", found[:2]), ("copies", found[2:])):
        row = spread.loc[(name, "PDCorr")]
        assert row["n"] == 2
        assert row["mean"] == pytest.approx(sum(r.score("PDCorr")[0] for r in members) / 2)
        assert row["sd"] > 0
    took = pd.read_csv(tmp_path / "r_tables" / "trained.csv").set_index("Method")
    record = json.loads((trained / "bundle" / "run.json").read_text())
    assert took.loc["ours-seed1", "training, CPU time"] == record["cpu_seconds"]
    assert took.loc["ours-seed1", "settings"] == "tiny"
    assert (took.loc["copies-0", ["training, wall time", "prediction, wall time"]] >= 0).all()
    assert "Mean ± standard deviation over seeds" in headline(runs)
