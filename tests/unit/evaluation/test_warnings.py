"""Warnings by rule: each fires where it must and is silent on sound tables."""

from __future__ import annotations

import pandas as pd
import pytest

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.scoring.limits import limits


def tables(*, cells=50, num=8, de=30, called=30, undefined=0, verdict="as different as the truth", **realism):
    shown = {"library_ratio": 1.1, "library_sd_ratio": 1.0, "gene_sd_ratio": 1.0, "nonzero_ratio": 1.0}
    conditions = pd.DataFrame(
        {"n_cells": cells, "n_predicted": 50, "n_distinct": 50, "batch": "b", **shown, **realism},
        index=range(num),
    ).assign(cell_type="T", perturbation=[f"p{i}" for i in range(num)])
    rows = []
    for i in range(num):
        rows.append(("PDS_L1", f"p{i}", 0.7, "ok"))
        rows.append(("n_DE_real", f"p{i}", float(de), "ok"))
        rows.append(("n_DE_pred", f"p{i}", float(called), "ok"))
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
    assert limits(*tables(), num_genes=100) == []


@pytest.mark.parametrize(
    ("change", "kind", "count", "words"),
    [
        ({"cells": 9}, "few_cells", 8, "8 of 8 conditions have fewer than 10 real cells"),
        ({"library_ratio": 0.3}, "scale", 8, "0.3 times the normalised counts"),
        ({"library_ratio": 2.5}, "scale", 8, "2.5 times"),
        (
            {"library_ratio": 0.7, "library_sd_ratio": float("nan")},
            "scale",
            8,
            "although all real cells hold the same",
        ),
        ({"gene_sd_ratio": 0.1}, "no_spread", 8, "vary 0.1 times as much as in real cells"),
        ({"n_distinct": 5}, "repeated", 8, "10% of a condition's cells are different ones"),
        ({"nonzero_ratio": 1.3}, "zeros", 8, "fewer zeros than real ones: 1.3 times"),
        ({"nonzero_ratio": 0.7}, "zeros", 8, "more zeros"),
        ({"batch": list("abababab")}, "unbalanced", 8, "8 of 16 pairs of a perturbation and a cell type"),
        ({"called": 90}, "too_many_de", 8, "90 of 100 genes of predicted cells differ"),
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
    found = [f for f in limits(*tables(**change), num_genes=100) if f["kind"] == kind]
    assert found[0]["count"] == count
    assert words in found[0]["text"]
    if kind == "collapse":
        assert found[1]["text"].endswith("too alike: T")


@pytest.mark.parametrize(
    "change",
    [
        {"library_ratio": 0.7},
        {"gene_sd_ratio": 0.5},
        {"n_distinct": 30},
        {"nonzero_ratio": 1.2},
        {"called": 40},
        {"de": 60, "called": 90},
    ],
)
def test_what_real_halves_and_fair_methods_show_is_no_finding(change):
    assert limits(*tables(**change), num_genes=100) == []


def test_one_undefined_perturbation_in_five_is_no_finding():
    assert limits(*tables(num=10, undefined=2), num_genes=100) == []


def test_tables_of_few_metrics_are_no_obstacle():
    _, conditions, _, config = tables()
    scored = ["library_ratio", "library_sd_ratio", "gene_sd_ratio", "nonzero_ratio"]
    empty = pd.DataFrame(
        columns=pd.Index(["scope_kind", "scope", "metric", "perturbation", "value", "status"])
    )
    none = pd.DataFrame(columns=pd.Index(["scope_kind", "scope", "real", "predicted", "ratio", "verdict"]))
    assert limits(empty, conditions.drop(columns=scored), none, config, num_genes=100) == []
