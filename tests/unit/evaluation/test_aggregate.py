"""Means by cell-eval's rule and ours, and paired comparisons of two methods."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from perturbdiff.errors import UserError
from perturbdiff.evaluation.aggregate import aggregate, paired, read_runs


def rows(scope, metric, values, status=None, kind="context"):
    return pd.DataFrame(
        {
            "scope_kind": kind,
            "scope": scope,
            "perturbation": [f"p{i}" for i in range(len(values))],
            "metric": metric,
            "value": np.array(values, float),
            "status": status or ["ok" if v == v else "undefined" for v in values],
        }
    )


def test_absent_values_are_left_out_and_undefined_ones_spoil_the_mean():
    nan = float("nan")
    table = pd.concat(
        [
            rows("A", "DirAgr", [1.0, 0.5, nan], ["ok", "ok", "absent"]),
            rows("A", "AUROC", [1.0, 0.5, nan]),
            rows("B", "AUROC", [0.25]),
        ]
    )
    found = aggregate(table, {}).set_index(["scope", "metric"])
    assert found.loc[("A", "DirAgr"), "mean"] == 0.75
    assert np.isnan(found.loc[("A", "AUROC"), "mean"])
    assert found.loc[("A", "AUROC"), "nanmean"] == 0.75
    assert (found.loc[("A", "AUROC"), "n_defined"], found.loc[("A", "AUROC"), "n"]) == (2, 3)
    assert found.loc[("mean of contexts", "AUROC"), "nanmean"] == 0.5
    assert found.loc[("A", "AUROC"), "direction"] == "higher"


def test_distances_are_averaged_over_the_conditions_of_a_scope():
    table = pd.concat(
        [
            rows(s, "energy_distance", [v], kind="condition")
            for s, v in (("A|x", 1.0), ("A|y", 3.0), ("B|x", 8.0))
        ]
    )
    found = aggregate(table, {"A": [("A|x", "p0"), ("A|y", "p0")], "B": [("B|x", "p0")]})
    means = found.set_index(["scope_kind", "scope"])["nanmean"]
    assert means["pooled", "pooled"] == 4.0
    assert means["context", "A"] == 2.0
    assert means["contexts", "mean of contexts"] == 5.0


def run(method, pdcorr, error):
    table = pd.concat([rows("A", "PDCorr", pdcorr), rows("A", "MSE", error)])
    return table.assign(method=method, dataset="d")


def test_paired_comparison_knows_which_way_is_better():
    runs = pd.concat(
        [
            run("ours", [0.9, 0.8, 0.5, np.nan], [1, 1, 1, 1]),
            run("base", [0.5, 0.6, 0.5, 0.1], [2, 2, 0.5, 1]),
        ]
    )
    found = paired(runs, "ours", "base").set_index("metric")
    assert found.loc["PDCorr", "n"] == 3
    assert found.loc["PDCorr", "win_rate"] == pytest.approx(2.5 / 3)
    assert found.loc["PDCorr", "difference"] == pytest.approx(0.2)
    assert found.loc["PDCorr", "low"] <= 0.2 <= found.loc["PDCorr", "high"]
    assert found.loc["MSE", "win_rate"] == pytest.approx(2.5 / 4)
    assert found.loc["MSE", "difference"] == pytest.approx(-0.375)
    pd.testing.assert_frame_equal(found, paired(runs, "ours", "base").set_index("metric"))


def test_a_clear_advantage_has_a_small_p_and_none_has_none():
    rng = np.random.default_rng(0)
    base = rng.random(30)
    better = pd.concat([run("ours", base + 0.1 + 0.01 * rng.random(30), base), run("base", base, base)])
    found = paired(better, "ours", "base").set_index("metric")
    assert found.loc["PDCorr", "p"] < 1e-4
    assert found.loc["PDCorr", "low"] > 0.09
    assert np.isnan(found.loc["MSE", "p"])
    assert found.loc["MSE", "win_rate"] == 0.5


def test_unknown_methods_and_folders_are_named(tmp_path):
    with pytest.raises(UserError, match="'other'"):
        paired(run("ours", [1.0], [1.0]), "ours", "other")
    with pytest.raises(UserError, match="metrics.parquet"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match="no run"):
        read_runs([])


def test_runs_are_read_back(tmp_path):
    (tmp_path / "one").mkdir()
    run("ours", [1.0], [2.0]).to_parquet(tmp_path / "one" / "metrics.parquet")
    assert set(read_runs([tmp_path / "one"])["run"]) == {"one"}
