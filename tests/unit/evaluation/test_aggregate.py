"""Means by cell-eval's rule and ours, and paired comparisons of two methods."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.evaluation.aggregate import aggregate


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
