"""Energy distances by hand, their expectation, the intervals, and what is compared with what."""

import numpy as np
import pandas as pd
import pytest

from perturbdiff.conditions.cell_distances import energy_distance, mean_distance, mean_distance_within
from perturbdiff.conditions.condition import condition_table
from perturbdiff.evaluation.metrics import pairwise_distances as evaluated
from perturbdiff.statistics.group_distances import COLUMNS, interval, summarise
from perturbdiff.statistics.pair_plan import LEVELS, MIN_CELLS, PairPlan


def test_by_hand():
    x, y = np.array([[0.0], [2.0]]), np.array([[1.0], [5.0]])
    assert mean_distance(x, y) == pytest.approx((1 + 5 + 1 + 3) / 4)
    assert mean_distance_within(x) == pytest.approx(2)
    assert energy_distance(x, y) == pytest.approx(2 * 2.5 - 2 - 4)
    square = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 0.0]])
    assert mean_distance_within(square) == pytest.approx((5 + 3 + 4) / 3)


def test_agrees_with_evaluation():
    from scipy import sparse

    rng = np.random.default_rng(0)
    x, y = rng.poisson(1.0, (30, 50)).astype(np.float32), rng.poisson(1.3, (21, 50)).astype(np.float32)
    expected = evaluated.energy_distance(sparse.csr_matrix(x), sparse.csr_matrix(y))
    assert energy_distance(x, y) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("size", [3, 12])
def test_unbiased_at_any_size(size):
    rng = np.random.default_rng(1)

    def mean_and_error(shift):
        found = np.array(
            [
                energy_distance(rng.normal(size=(size, 4)), rng.normal(size=(size, 4)) + shift)
                for _ in range(600)
            ]
        )
        return found.mean(), found.std() / np.sqrt(len(found))

    same, error = mean_and_error(0.0)
    assert abs(same) < 4 * error
    apart, error = mean_and_error(1.0)
    large = energy_distance(rng.normal(size=(2000, 4)), rng.normal(size=(2000, 4)) + 1.0)
    assert apart == pytest.approx(large, abs=4 * error + 0.02)
    assert apart > 0.3


def test_interval_of_independent_groups():
    values = np.random.default_rng(0).normal(3.0, 1.0, 200)
    labels = np.array([f"p{i}" for i in range(200)])
    low, high = interval(values, labels, labels, seed=0)
    half = 1.96 * values.std() / np.sqrt(200)
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)
    assert interval(values, labels, labels, seed=0) == (low, high)
    assert interval(values, labels, labels, seed=1) != (low, high)


def test_interval_of_pairs_is_wider_than_of_independent_values():
    """Each perturbation's own effect enters all its pairs: 190 pairs of 20 know less than 190 values."""
    effect = np.random.default_rng(2).normal(size=20)
    a, b = np.triu_indices(20, 1)
    values = effect[a] + effect[b]
    low, high = interval(values, a.astype(str), b.astype(str), seed=0)
    assert low < values.mean() < high
    true_error = 2 * effect.std(ddof=1) / np.sqrt(20)
    assert high - low == pytest.approx(2 * 1.96 * true_error, rel=0.25)
    assert high - low > 2 * (2 * 1.96 * values.std() / np.sqrt(190))


def test_no_interval_of_two_perturbations():
    assert np.isnan(interval(np.ones(1), np.array(["a"]), np.array(["b"]), seed=0)).all()


def conditions(*rows: tuple[str, str, str, int]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["cell_type", "batch", "perturbation", "n_cells"])
    return condition_table(table, "control")


@pytest.fixture
def many():
    rng = np.random.default_rng(3)
    names = ["control", *(f"p{i}" for i in range(9))]
    return conditions(
        *(
            (cell_type, batch, name, 300 if name == "control" else int(rng.integers(5, 80)))
            for cell_type in ("B", "T")
            for batch in ("d1", "d2", "d3")
            for name in names
        )
    )


def owner(conditions: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    return conditions.iloc[np.searchsorted(conditions["stop"], rows, "right")]


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_compared(many, level):
    plan = PairPlan(many, level, pairs=40, cells=16, seed=0)
    groups = plan.comparisons()
    flat = [c for group in groups for c in group]
    kinds = pd.Series([c.kind for c in flat]).value_counts()
    assert 9 <= kinds["within"] <= 40
    assert 10 <= kinds["between"] <= 40
    assert kinds["control"] == kinds["within"]
    keys = LEVELS[level]
    seen = set()
    for c in flat:
        a, b = owner(many, c.a.rows), owner(many, c.b.rows)
        for side, sample in ((a, c.a), (b, c.b)):
            assert set(side["perturbation"]) == {sample.perturbation}
            assert (np.diff(sample.rows) > 0).all()
            assert MIN_CELLS <= len(sample.rows) <= 16
        for key in keys[:-1]:
            assert set(a[key]) == set(b[key]) == {getattr(c, key)}
        if c.kind == "within":
            assert not set(c.a.rows) & set(c.b.rows)
            assert c.a.perturbation == c.b.perturbation != "control"
            assert len(c.a.rows) == len(c.b.rows)
        elif c.kind == "control":
            assert c.b.perturbation == "control"
        else:
            names = frozenset((c.a.perturbation, c.b.perturbation))
            assert len(names) == 2
            assert (names, c.cell_type, c.batch) not in seen
            seen.add((names, c.cell_type, c.batch))


def test_every_pair_of_few_perturbations(many):
    plan = PairPlan(many, "perturbation", pairs=1000, cells=16, seed=0)
    flat = [c for group in plan.comparisons() for c in group]
    assert sum(c.kind == "between" for c in flat) == 9 * 8 // 2
    assert sum(c.kind == "within" for c in flat) == plan.num_eligible == plan.num_groups == 9


def test_drawn_by_seed(many):
    def rows(seed):
        found = PairPlan(many, "condition", pairs=30, cells=16, seed=seed).comparisons()
        return [c.a.rows.tolist() + c.b.rows.tolist() for group in found for c in group]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)


def test_pooled_samples_follow_the_sizes_of_conditions():
    table = conditions(("B", "d", "control", 50), ("B", "d", "p", 900), ("T", "d", "p", 100))
    found = np.concatenate(
        [
            PairPlan(table, "perturbation", pairs=1, cells=20, seed=s).comparisons()[0][0].a.rows
            for s in range(100)
        ]
    )
    share = (owner(table, found)["cell_type"] == "T").mean()
    assert share == pytest.approx(0.1, abs=4 * np.sqrt(0.1 * 0.9 / len(found)))


def test_too_few_cells_are_not_compared():
    small = conditions(
        ("B", "d1", "control", 1), *(("B", "d1", f"p{i}", 1) for i in range(5)), ("B", "d1", "q", 40)
    )
    plan = PairPlan(small, "condition", pairs=30, cells=16, seed=0)
    assert (plan.num_groups, plan.num_eligible) == (6, 1)
    assert [[c.kind for c in group] for group in plan.comparisons()] == [["within"]]
    none = PairPlan(small[small["perturbation"] != "q"], "condition", pairs=30, cells=16, seed=0)
    assert none.comparisons() == []


def test_one_perturbation_is_drawn_by_groups():
    """With one perturbation, the interval is over its cell types and batches."""
    ed = np.linspace(0.0, 1.0, 9)
    places = [(t, b) for t in "ABC" for b in "xyz"]
    rows = [
        ("condition", "control", t, b, "p", "control", 20, 20, e)
        for (t, b), e in zip(places, ed, strict=True)
    ]
    table = pd.DataFrame(rows, columns=COLUMNS[:-1]).assign(root=np.sqrt(ed))
    summary = summarise(table, seed=0).iloc[0]
    assert (summary["cell_type"], summary["n_pairs"], summary["n_perturbations"]) == ("all", 9, 1)
    assert summary["interval_over"] == "groups"
    assert summary["low"] < 0.5 < summary["high"]
    assert np.isnan(summary["above_within"])
    few = summarise(table.iloc[:2], seed=0).iloc[0]
    assert few["interval_over"] == ""
    assert np.isnan(few["low"])


def test_share_beyond_the_halves():
    rows = [("perturbation", "within", "", "", f"p{i}", f"p{i}", 20, 20, i / 100) for i in range(101)]
    rows += [
        ("perturbation", "between", "", "", "p0", f"p{i}", 20, 20, e)
        for i, e in ((1, 0.9), (2, 0.96), (3, 2))
    ]
    table = pd.DataFrame(rows, columns=COLUMNS[:-1]).assign(root=0.0)
    summary = summarise(table, seed=0).set_index("kind")
    assert summary.loc["between", "above_within"] == pytest.approx(2 / 3)
    assert summary.loc["between", "n_perturbations"] == 4
    assert summary.loc["within", "median"] == pytest.approx(0.5)
