"""The metrics of a condition: all at once equal each alone, and the chance level."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import wasserstein_distance

from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.metrics.populations import CHANCE, DISTRIBUTION, condition_metrics
from perturbdiff.evaluation.metrics.sorted_columns import Columns


def draw(rng, n, genes=50, scale=1.0):
    mean = np.linspace(0.02, 3.0, genes)
    return sp.csr_matrix(np.log1p(scale * rng.poisson(mean, (n, genes))).astype(np.float32))


@pytest.fixture
def cells():
    rng = np.random.default_rng(0)
    return draw(rng, 60), draw(rng, 50, scale=1.5), draw(rng, 40, scale=3.0)


def test_names_are_those_of_the_catalogue():
    assert tuple(n for n, m in METRICS.items() if m.family == "distribution") == DISTRIBUTION


def test_each_alone_equals_all_together(cells):
    predicted, real, other = cells
    known = {"control": np.zeros(50), "depth": 1e3}
    everything = condition_metrics(predicted, real, DISTRIBUTION, max_cells=30, seed=1, other=other, **known)
    assert tuple(everything) == (*DISTRIBUTION, *CHANCE)
    assert np.isfinite(list(everything.values())).all()
    for name in DISTRIBUTION:
        alone = condition_metrics(predicted, real, [name], max_cells=30, seed=1, other=other, **known)
        assert alone == {n: everything[n] for n in (name, f"chance_{name}") if n in everything}
    without = condition_metrics(predicted, real, DISTRIBUTION, max_cells=30, seed=1, **known)
    assert without == {n: everything[n] for n in DISTRIBUTION}
    assert condition_metrics(predicted, real, [], max_cells=30, seed=1, other=other) == {}


def test_chance_is_the_value_against_the_other_cells(cells):
    predicted, real, other = cells
    found = condition_metrics(predicted, real, DISTRIBUTION, max_cells=100, seed=1, other=other)
    swapped = condition_metrics(predicted, other, DISTRIBUTION, max_cells=100, seed=1)
    for name in ("energy_distance", "mmd", "wasserstein"):
        assert found[f"chance_{name}"] == pytest.approx(swapped[name], rel=1e-5)
        assert found[f"chance_{name}"] > found[name]


def test_wasserstein_is_the_median_over_genes_of_real_cells(cells):
    predicted, real, _ = cells
    x, y = predicted.toarray(), real.toarray()
    seen = np.flatnonzero((y != 0).mean(axis=0) > 0.05)
    assert 0 < len(seen) < 50
    expected = np.median([wasserstein_distance(x[:, g], y[:, g]) for g in seen])
    found = condition_metrics(predicted, real, ["wasserstein"], max_cells=2, seed=0)
    assert found["wasserstein"] == pytest.approx(expected)
    ready = (Columns.of([predicted]), Columns.of([real]))
    given = condition_metrics(predicted, real, ["wasserstein"], max_cells=2, seed=0, columns=ready)
    assert given == found


def test_the_cells_themselves(cells):
    _, real, _ = cells
    found = condition_metrics(real, real, DISTRIBUTION, max_cells=100, seed=0)
    assert found["wasserstein"] == found["mean_variance_gap"] == 0
    assert found["energy_distance"] < 0  # a cell is nearer to itself than to any other
    assert found["mmd"] < 0


def test_edges(cells):
    predicted, real, _ = cells
    empty = sp.csr_matrix((0, 50), dtype=np.float32)
    for x, y in ((empty, real), (predicted, empty), (empty, empty)):
        found = condition_metrics(x, y, DISTRIBUTION, max_cells=10, seed=0, other=empty)
        defined = {name for name, value in found.items() if np.isfinite(value)}
        assert defined <= {"max_value"}
    nothing = sp.csr_matrix((20, 50), dtype=np.float32)
    assert np.isnan(
        condition_metrics(predicted, nothing, ["wasserstein"], max_cells=9, seed=0)["wasserstein"]
    )
    one = condition_metrics(predicted[:1], real, DISTRIBUTION, max_cells=10, seed=0)
    assert np.isfinite([one["wasserstein"], one["nonzero_ratio"], one["library_ratio"]]).all()
    with pytest.raises(ValueError, match="no metric of the distribution: PDCorr"):
        condition_metrics(predicted, real, ["PDCorr"], max_cells=10, seed=0)
