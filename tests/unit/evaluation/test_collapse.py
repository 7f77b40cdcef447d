"""The collapse check: verdicts, correlations by a plain formula, invariances and limits."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from perturbdiff.evaluation.metrics import bounds as module
from perturbdiff.evaluation.metrics.bounds import changes, collapse, shared


def genes_table(delta: np.ndarray, *, prefix: str = "p") -> pd.DataFrame:
    """Return a de table of changes [perturbations × genes] on a control that differs between genes."""
    control = np.arange(1, delta.shape[1] + 1) / 10
    rows = [
        {
            "perturbation": f"{prefix}{i}",
            "gene": f"g{j}",
            "mean": control[j] + delta[i, j],
            "control_mean": control[j],
        }
        for i, j in np.ndindex(*delta.shape)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def real() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((6, 200))


def test_a_truthful_prediction_is_as_different_as_the_truth(real):
    found = collapse(real, 0.5 * real)
    assert found.ratio == pytest.approx(0.5)
    assert found.predicted == pytest.approx(found.real)
    assert found.verdict == "as different as the truth"


def test_one_answer_for_all_is_collapsed(real):
    found = collapse(real, np.tile(real.mean(axis=0), (6, 1)) * 3)
    assert found.predicted == pytest.approx(1.0)
    assert found.verdict.startswith("collapsed")


def test_no_change_has_no_correlation(real):
    found = collapse(real, 0 * real)
    assert np.isnan(found.predicted)
    assert found.ratio == 0
    assert found.verdict == "no change predicted"


def test_further_verdicts(real):
    assert collapse(real, 0.1 * real).verdict == "hardly any change predicted"
    common = np.random.default_rng(1).standard_normal(200)
    assert collapse(real, real + 0.8 * common).verdict == "more alike than the truth"
    assert collapse(real + 0.8 * common, real).verdict == "less alike than the truth"


def test_pairs_are_plain_correlations(real):
    predicted = np.random.default_rng(2).standard_normal(real.shape)
    found = collapse(real, predicted)
    expected = list(itertools.combinations(range(6), 2))
    assert list(zip(found.pairs.first, found.pairs.second, strict=True)) == expected
    np.testing.assert_allclose(found.pairs.real, [np.corrcoef(real[i], real[j])[0, 1] for i, j in expected])
    assert found.predicted == pytest.approx(
        np.median([np.corrcoef(predicted[i], predicted[j])[0, 1] for i, j in expected])
    )
    norms = np.linalg.norm(predicted, axis=1) / np.linalg.norm(real, axis=1)
    assert found.ratio == pytest.approx(np.median(norms))


def test_the_order_of_perturbations_and_genes_does_not_matter(real):
    rng = np.random.default_rng(3)
    predicted = rng.standard_normal(real.shape)
    rows, genes = rng.permutation(6), rng.permutation(200)
    one, other = collapse(real, predicted), collapse(real[rows][:, genes], predicted[rows][:, genes])
    for name in ("real", "predicted", "ratio"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12)


def test_too_little_to_compare(real):
    assert collapse(real[:1], real[:1]) is None
    assert collapse(real[:0], real[:0]) is None
    assert collapse(real[:, :1], real[:, :1]) is None
    with pytest.raises(ValueError, match="differ in shape"):
        collapse(real, real[:3])


def test_a_perturbation_without_real_change_is_left_out(real):
    still = real.copy()
    still[0] = 0
    found = collapse(still, real)
    assert np.isnan(found.pairs.real[:5]).all()
    assert found.ratio == pytest.approx(1.0)
    assert collapse(0 * real, 0 * real).verdict == "no change predicted"


def test_many_perturbations_keep_an_even_selection(monkeypatch):
    rng = np.random.default_rng(4)
    many = rng.standard_normal((250, 10))
    found = collapse(many, many)
    assert 0 < len(found.pairs.first) <= module.MOST_PAIRS
    correlations = np.corrcoef(many)
    np.testing.assert_allclose(found.pairs.real, correlations[found.pairs.first, found.pairs.second])
    assert found.real == pytest.approx(np.median(correlations[np.triu_indices(250, k=1)]))
    monkeypatch.setattr(module, "_MOST_ROWS", 50)
    fewer = collapse(many, many)
    assert fewer.ratio == pytest.approx(1.0)
    np.testing.assert_allclose(fewer.pairs.real, correlations[fewer.pairs.first, fewer.pairs.second])


def test_changes_of_tables_are_aligned_by_name(real):
    table = genes_table(real)
    np.testing.assert_allclose(changes(table).loc["p3", "g7"], real[3, 7])
    shuffled = changes(table.sample(frac=1.0, random_state=0)).iloc[::-1, ::-1].iloc[1:, :-3]
    x, y = shared(changes(table), shuffled)
    assert x.shape == y.shape == (5, 197)
    pd.testing.assert_frame_equal(x, y, check_names=False)
    missing = changes(table.iloc[1:])
    assert shared(missing, changes(table))[0].loc["p0", "g0"] == 0.0
