"""Warnings by rule: each fires where it must and is silent on sound tables."""

from __future__ import annotations

import pandas as pd
import pytest

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.scoring.limits import limits


def tables(*, cells=50, ratio=1.1, num=8, de=30, undefined=0, verdict="as different as the truth"):
    conditions = pd.DataFrame(
        {"n_cells": [cells] * num, "n_predicted": [50] * num, "library_ratio": [ratio] * num}
    )
    rows = []
    for i in range(num):
        rows.append(("PDS_L1", f"p{i}", 0.7, "ok"))
        rows.append(("n_DE_real", f"p{i}", float(de), "ok"))
        rows.append(("AUROC", f"p{i}", 0.5, "undefined" if i < undefined else "ok"))
    rows.append(("ES", "*", float("nan"), "undefined"))
    metrics = pd.DataFrame(rows, columns=["metric", "perturbation", "value", "status"]).assign(
        scope_kind="pooled", scope="pooled"
    )
    collapse = pd.DataFrame(
        [("pooled", "pooled", 0.1, 0.9, 1.0, verdict), ("context", "T", 0.1, 0.9, 1.0, verdict)],
        columns=["scope_kind", "scope", "real", "predicted", "ratio", "verdict"],
    )
    return metrics, conditions, collapse, EvaluateConfig()


def test_sound_tables_give_no_finding():
    assert limits(*tables()) == []


@pytest.mark.parametrize(
    ("change", "kind", "count", "words"),
    [
        ({"cells": 9}, "few_cells", 8, "8 of 8 conditions have fewer than 10 real cells"),
        ({"ratio": 0.3}, "scale", 8, "0.3 times the normalised counts"),
        ({"ratio": 2.5}, "scale", 8, "2.5 times"),
        ({"num": 4}, "few_perturbations", 4, "only 4 perturbations"),
        ({"num": 1}, "few_perturbations", 1, "only 1 perturbation to"),
        (
            {"de": 9},
            "no_de",
            8,
            "8 of 8 perturbations have fewer than 10 real DE genes in the pool. DEOver_10",
        ),
        ({"de": 0}, "no_de", 8, "8 of them none, which DEOver and DEPrec count as 0"),
        ({"undefined": 2}, "undefined", 1, "AUROC is undefined for more than a fifth"),
        ({"verdict": "collapsed: nearly one answer for all"}, "collapse", 1, "collapsed: nearly one answer"),
    ],
)
def test_what_limits_the_numbers_is_said(change, kind, count, words):
    found = [f for f in limits(*tables(**change)) if f["kind"] == kind]
    assert found[0]["count"] == count
    assert words in found[0]["text"]
    if kind == "collapse":
        assert found[1]["text"].endswith("too alike: T")


def test_one_undefined_perturbation_in_five_is_no_finding():
    assert limits(*tables(num=10, undefined=2)) == []


def test_tables_of_few_metrics_are_no_obstacle():
    _, conditions, _, config = tables()
    empty = pd.DataFrame(
        columns=pd.Index(["scope_kind", "scope", "metric", "perturbation", "value", "status"])
    )
    none = pd.DataFrame(columns=pd.Index(["scope_kind", "scope", "real", "predicted", "ratio", "verdict"]))
    assert limits(empty, conditions.drop(columns="library_ratio"), none, config) == []
