"""The Spearman–Brown correction of cell-eval 0.8.2, with numbers of that package, and where it comes from."""

from __future__ import annotations

import numpy as np
import pytest

from perturbdiff.evaluation.metrics.bounds import CORRECTED, full_depth, spearman_brown
from perturbdiff.evaluation.metrics.catalogue import columns

# What cell-eval 0.8.2 makes of split-half means (its function for aggregated ceilings, called directly).
ORACLE = {
    "pearson_delta": (0.5, 2 / 3),
    "roc_auc": (0.5, 2 / 3),
    "pr_auc": (0.9, 0.9473684210526316),
    "mse": (0.1, np.nan),
    "de_spearman_sig": (-0.2, np.nan),
    "overlap_at_N": (0.0, np.nan),
    "de_sig_genes_recall": (0.25, 0.4),
    "discrimination_score_l1": (1.0, 1.0),
    "mse_delta": (0.2, np.nan),
    "de_nsig_counts_real": (5.0, np.nan),
}


def test_numbers_of_cell_eval():
    names = columns()
    found = full_depth({names[column]: half for column, (half, _) in ORACLE.items()})
    for column, (_, expected) in ORACLE.items():
        assert found[names[column]] == pytest.approx(expected, rel=1e-12, nan_ok=True), column


def test_the_corrected_metrics_are_those_of_cell_eval():
    ranked = [f"{kind}_at_{k}" for kind in ("overlap", "precision") for k in ("N", 50, 100, 200, 500)]
    expected = {
        "pearson_delta",
        *(f"discrimination_score_{d}" for d in ("l1", "l2", "cosine")),
        *ranked,
        "de_spearman_sig",
        "de_spearman_lfc_sig",
        "de_direction_match",
        "de_sig_genes_recall",
        "pr_auc",
        "roc_auc",
    }
    assert {column for column, name in columns().items() if name in CORRECTED} == expected
    assert np.isnan(full_depth({"R2": 0.5, "mmd": 0.5})["R2"])


def test_shapes_and_edges():
    np.testing.assert_allclose(
        spearman_brown(np.array([[0.2, 1.0], [0.0, -1.0]])), [[1 / 3, 1], [np.nan] * 2]
    )
    assert spearman_brown(0.5) == pytest.approx(2 / 3)
    assert np.isnan(spearman_brown(np.nan))


def test_it_is_the_correlation_of_samples_of_twice_the_size():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=20_000)
    quarters = truth + 1.5 * rng.normal(size=(4, 20_000))
    half = np.corrcoef(quarters[0], quarters[1])[0, 1]
    full = np.corrcoef(quarters[:2].mean(axis=0), quarters[2:].mean(axis=0))[0, 1]
    assert spearman_brown(half) == pytest.approx(full, abs=0.02)
