"""Measures of how sets of cells vary, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from perturbdiff.evaluation.metrics import spread as sv
from perturbdiff.evaluation.metrics.pairwise_distances import energy_distance


def one_gene(*sets: list[float]) -> np.ndarray:
    return np.array(sets, float)[:, :, None]


def many(rng: np.random.Generator, between: float, *, sets: int = 400, size: int = 8) -> np.ndarray:
    effect = rng.normal(0, np.sqrt(between), (sets, 1, 1)) * np.array([0.6, 0.8, 0.0])
    return effect + rng.normal(size=(sets, size, 3))


def test_variance_components_by_hand() -> None:
    sets = one_gene([1, 3], [5, 7])
    assert sv.within_variance(sets) == pytest.approx([2.0])
    assert sv.between_variance(sets) == pytest.approx([8.0 - 2.0 / 2])


def test_equal_cells_leave_the_variance_of_the_means() -> None:
    assert sv.between_variance(one_gene([0, 0, 0], [3, 3, 3], [6, 6, 6])) == pytest.approx([9.0])


def test_sets_that_balance_their_cells_have_a_negative_component() -> None:
    assert sv.between_variance(one_gene([-1, 1], [1, -1])) == pytest.approx([-1.0])


def test_components_are_those_the_sets_were_made_with() -> None:
    sets = many(np.random.default_rng(0), between=0.5)
    assert sv.between_variance(sets) == pytest.approx([0.18, 0.32, 0.0], abs=0.05)
    assert sv.within_variance(sets) == pytest.approx([1.0, 1.0, 1.0], abs=0.05)


def test_covariance_holds_the_variances() -> None:
    sets = many(np.random.default_rng(1), between=0.5, sets=9)
    assert np.diagonal(sv.between_covariance(sets)) == pytest.approx(sv.between_variance(sets))


def test_leading_axis_is_the_one_that_sets_differ_along() -> None:
    axis = sv.leading_axis(many(np.random.default_rng(2), between=2.0))
    assert abs(axis @ [0.6, 0.8, 0.0]) > 0.99
    assert np.linalg.norm(axis) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(1, 4, 2), (4, 1, 2), (4, 2)])
def test_single_sets_and_single_cells_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least two sets"):
        sv.between_variance(np.zeros(shape))


def test_share_within_the_range() -> None:
    assert sv.within_range(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), np.array([0.5, 3.5])) == pytest.approx(0.6)


def test_range_of_alike_values_over_all_ways_to_choose_one() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.5, 9.0])
    each = [sv.within_range(values[[i]], np.delete(values, i)) for i in range(5)]
    assert np.mean(each) == pytest.approx(sv.alike_range(4)) == pytest.approx(3 / 5)


def test_energy_distances_by_hand() -> None:
    a, b, c = one_gene([0, 2]), one_gene([1, 1]), one_gene([10, 12])
    found = sv.distances(a, np.concatenate([b, c]))
    assert found == pytest.approx(np.array([[2 * 1 - 2 - 0, 2 * 10 - 2 - 2]]))


def test_energy_distance_is_that_of_the_evaluation() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.random((1, 7, 5)), rng.random((1, 9, 5)) + 0.3
    expected = energy_distance(sp.csr_matrix(x[0]), sp.csr_matrix(y[0]))
    assert sv.distances(x, y)[0, 0] == pytest.approx(expected, rel=1e-4)


def test_cloud_by_hand() -> None:
    # three sets one apart from each other; one joins in their midst and one far away
    others = 1.0 - np.eye(3)
    across = np.array([[0.5, 0.5, 0.5], [5.0, 5.0, 5.0]])
    assert sv.within_cloud(across, others, level=0.75) == pytest.approx(0.5)
    assert sv.within_cloud(across, others, level=1.0) == pytest.approx(1.0)


def test_cloud_of_alike_sets_over_all_ways_to_choose_one() -> None:
    points = np.random.default_rng(4).normal(size=(9, 3))
    all_pairs = np.linalg.norm(points[:, None] - points, axis=2)
    inside = []
    for i in range(9):
        rest = np.delete(np.arange(9), i)
        inside.append(sv.within_cloud(all_pairs[[i]][:, rest], all_pairs[np.ix_(rest, rest)], level=0.8))
    assert np.mean(inside) == pytest.approx(sv.alike_cloud(8, level=0.8)) == pytest.approx(7 / 9)
