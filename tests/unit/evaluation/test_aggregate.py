"""Means by cell-eval's rule and ours, with intervals and chance."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from perturbdiff.evaluation.scoring.aggregate import aggregate, condition_chance


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


def test_intervals_hold_the_mean_and_draw_within_contexts():
    values = {t: np.random.default_rng(i).normal(10 * i, 1, 40) for i, t in enumerate("AB")}
    table = pd.concat([rows(t, "PDCorr", list(v)) for t, v in values.items()] + [rows("A", "ES", [0.5])])
    table.loc[table["metric"] == "ES", "perturbation"] = "*"
    found = aggregate(table, {}, draws=500, seed=1).set_index(["scope", "metric"])
    for scope in ("A", "B", "mean of contexts"):
        row = found.loc[(scope, "PDCorr")]
        assert row["low"] < row["nanmean"] < row["high"]
    pooled = found.loc[("mean of contexts", "PDCorr")]
    assert pooled["high"] - pooled["low"] < 1.0, "contexts that differ by 10 do not widen it"
    assert np.isnan(found.loc[("A", "ES"), "low"])
    same = aggregate(table.sample(frac=1, random_state=3).sort_values("perturbation"), {}, draws=500, seed=1)
    assert same.set_index(["scope", "metric"]).loc[("A", "PDCorr"), "nanmean"] == pytest.approx(
        found.loc[("A", "PDCorr"), "nanmean"]
    )
    assert aggregate(table, {})["low"].isna().all(), "no draws, no intervals"


def test_chance_of_the_contexts_is_their_mean():
    table = pd.concat([rows(t, "MAE", [1.0, 2.0]) for t in "AB"])
    chance = pd.DataFrame(
        [("context", "A", "MAE", 3.0), ("context", "B", "MAE", 5.0)],
        columns=["scope_kind", "scope", "metric", "chance"],
    )
    found = aggregate(table, {}, chance=chance).set_index("scope")["chance"]
    assert found.to_dict() == {"A": 3.0, "B": 5.0, "mean of contexts": 4.0}


def test_distances_by_chance_are_means_over_the_conditions_of_a_scope():
    conditions = pd.DataFrame({"context": ["A", "A", ""], "chance_mmd": [1.0, 3.0, 8.0]})
    found = condition_chance(conditions).set_index("scope")["chance"]
    assert found.to_dict() == {"pooled": 4.0, "A": 2.0}
