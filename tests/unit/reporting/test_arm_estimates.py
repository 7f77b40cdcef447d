"""Means of arms over data sets and seeds, their intervals and differences, on numbers that can be checked by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from perturbdiff.evaluation.scoring.intervals import bootstrap_means, bootstrap_nested
from perturbdiff.reporting.experiments.arm_design import Entry
from perturbdiff.reporting.experiments.experiment import COLUMNS, Estimates, frame
from perturbdiff.reporting.experiments.run_groups import groups, units
from perturbdiff.reporting.loading.results import Run

LEVEL = math.nan


def run(dataset, method, kind="model", pooled=(), conditions=(), single=None):
    """A run whose PDCorr per perturbation, energy distance per condition and ES are given."""
    rows = [("pooled", "pooled", f"p{i}", "PDCorr", v) for i, v in enumerate(pooled)]
    rows += [("condition", "B|d1", f"p{i}", "energy_distance", v) for i, v in enumerate(conditions)]
    rows += [] if single is None else [("pooled", "pooled", "*", "ES", single)]
    rows += [("context", "B", "p0", "PDCorr", 99.0)]  # what means are not over
    metrics = pd.DataFrame(rows, columns=["scope_kind", "scope", "perturbation", "metric", "value"])
    names = [("PDCorr", "higher"), ("energy_distance", "lower"), ("ES", "higher")]
    aggregate = pd.DataFrame(names, columns=["metric", "direction"])
    return Run(None, method, dataset, kind, metrics, aggregate, {}, {}, {}, method)


def entry(
    dataset, arm, seed="0", level=LEVEL, part="test", collection="all", kind="model", failed=False, **values
):
    found = None if failed else run(dataset, f"{arm}-{seed}", kind, **values)
    return Entry(dataset, f"{arm}-{seed}", part, collection, arm, level, seed, found)


def only(entries, against=None):
    (group,) = groups(entries)
    return Estimates(group, against)


def of(estimates, arm, metric, level=None):
    line = next(x for x in estimates.group.lines if x.arm == arm and (level is None or x.level == level))
    return estimates.of(line, metric)


def test_values_are_taken_where_means_are_over():
    found = units(run("a", "m", pooled=(0.1, 0.3), conditions=(1.0, 2.0, 6.0), single=0.7)).mean()
    assert found.to_dict() == pytest.approx({"PDCorr": 0.2, "energy_distance": 3.0, "ES": 0.7})


def test_data_sets_count_alike_whatever_their_size():
    entries = [
        entry("a", "ours", pooled=(0.0, 0.0, 0.0, 0.0)),
        entry("b", "ours", pooled=(1.0,)),
    ]
    e = of(only(entries), "ours", "PDCorr")
    assert e.mean == 0.5
    assert (e.datasets, e.conditions, e.seeds) == (2, 5, 1)
    assert math.isnan(e.sd)
    assert (e.lowest, e.highest) == (0.5, 0.5)


def test_sd_is_over_seeds_of_the_means_over_rotations():
    values = {("a", "0"): 0.1, ("b", "0"): 0.3, ("a", "1"): 0.5, ("b", "1"): 0.3}
    entries = [entry(d, "ours", s, pooled=(v,)) for (d, s), v in values.items()]
    e = of(only(entries), "ours", "PDCorr")
    assert e.mean == pytest.approx(0.3)
    assert e.sd == pytest.approx(np.std([0.2, 0.4], ddof=1))
    assert (e.lowest, e.highest) == pytest.approx((0.2, 0.4))


def test_a_seed_that_lacks_a_rotation_is_not_in_the_sd():
    values = {("a", "0"): 0.0, ("b", "0"): 1.0, ("a", "1"): 0.0, ("b", "1"): 1.0, ("a", "2"): 0.0}
    entries = [entry(d, "ours", s, pooled=(v,)) for (d, s), v in values.items()]
    entries.append(entry("b", "ours", "2", failed=True))
    estimates = only(entries)
    assert of(estimates, "ours", "PDCorr").sd == 0.0
    assert of(estimates, "ours", "PDCorr").seeds == 3
    assert estimates.group.lines[0].missing == 1


def test_a_metric_that_a_data_set_does_not_have_is_averaged_over_the_others():
    values = {("a", "0"): 0.2, ("b", "0"): math.nan, ("a", "1"): 0.4, ("b", "1"): math.nan}
    entries = [entry(d, "ours", s, pooled=(v, v)) for (d, s), v in values.items()]
    e = of(only(entries), "ours", "PDCorr")
    assert (e.mean, e.datasets, e.conditions) == (pytest.approx(0.3), 1, 2)
    assert e.sd == pytest.approx(np.std([0.2, 0.4], ddof=1))


def test_seeds_are_averaged_within_a_condition_before_the_interval():
    seeds = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0, 0.0])]
    entries = [entry("a", "ours", str(i), conditions=v) for i, v in enumerate(seeds)]
    e = of(only(entries), "ours", "energy_distance")
    assert (e.mean, e.low, e.high) == (1.5, 1.5, 1.5)  # equal in every condition once seeds are averaged


def test_differences_are_on_what_both_have():
    entries = [
        entry("a", "ours", pooled=(1.0, 2.0, math.nan)),
        entry("b", "ours", pooled=(5.0,)),
        entry("a", "theirs", pooled=(0.5, 1.5, 100.0)),
        entry("c", "theirs", pooled=(9.0,)),
    ]
    gap = of(only(entries), "theirs", "PDCorr").difference
    assert (gap.value, gap.low, gap.high) == (-0.5, -0.5, -0.5)
    assert gap.clear
    assert math.isnan(of(only(entries), "ours", "PDCorr").difference.value)
    assert of(only(entries, "theirs"), "ours", "PDCorr").difference.value == 0.5


def test_lines_are_compared_at_their_level():
    arms = {"scratch": (0.1, 0.2), "tuned": (0.4, 0.3)}
    places = [(arm, level, v) for arm, vs in arms.items() for level, v in zip((1.0, 5.0), vs, strict=True)]
    entries = [entry("a", arm, level=level, pooled=(v,)) for arm, level, v in places]
    entries.append(entry("a", "linear", kind="baseline", pooled=(0.0,)))
    estimates = only(entries)
    assert of(estimates, "tuned", "PDCorr", 1.0).difference.value == pytest.approx(0.3)
    assert of(estimates, "tuned", "PDCorr", 5.0).difference.value == pytest.approx(0.1)
    assert of(estimates, "scratch", "PDCorr", 5.0).difference.value == pytest.approx(
        0.1
    )  # to its first level
    assert math.isnan(of(estimates, "scratch", "PDCorr", 1.0).difference.value)
    assert math.isnan(of(estimates, "linear", "PDCorr").difference.value)  # which level would it be?
    beside = only(entries, "linear")
    assert of(beside, "tuned", "PDCorr", 5.0).difference.value == pytest.approx(0.3)


def test_parts_and_collections_are_groups_of_their_own():
    entries = [
        entry("a", "ours", pooled=(0.1,)),
        entry("a-valid", "ours", part="valid", pooled=(0.9,)),
        entry("b", "ours", collection="other", pooled=(0.5,)),
    ]
    found = groups(entries)
    assert [g.title for g in found] == ["all, test part", "all, validation part", "other, test part"]
    assert [of(Estimates(g), "ours", "PDCorr").mean for g in found] == [0.1, 0.9, 0.5]


def test_the_frame_holds_every_line_and_metric():
    entries = [
        entry("a", "ours", level=2.0, pooled=(0.1, 0.3), conditions=(1.0, 2.0), single=0.7),
        entry("a", "gone", failed=True),
        entry("a", "ceiling", kind="ceiling", pooled=(0.9, 0.9)),
    ]
    table = frame([only(entries)])
    assert tuple(table.columns) == COLUMNS
    assert table["arm"].tolist() == ["ours"] * 3 + ["gone"] + ["ceiling"] * 3
    ours = table[(table["arm"] == "ours") & (table["metric"] == "PDCorr")].iloc[0]
    assert (ours["level"], ours["mean"], ours["conditions"]) == (2.0, pytest.approx(0.2), 2)
    gone = table[table["arm"] == "gone"].iloc[0]
    assert (gone["metric"], gone["seeds"]) == ("", 0)


def test_nested_intervals_of_one_group_are_those_of_its_rows():
    rows = np.random.default_rng(0).normal(size=(30, 2))
    one = bootstrap_nested([rows], draws=500, seed=1)
    assert np.array_equal(one, bootstrap_means(rows, draws=500, seed=1))


def test_nested_intervals_hold_the_variation_between_groups():
    # rows equal within groups: means of three draws from {0, 1, 2}; a tail of 2.5 % holds 0 0 0 (1/27 = 3.7 %)
    low, high = bootstrap_nested([np.full((50, 1), v) for v in (0.0, 1.0, 2.0)], draws=4000, seed=0)
    assert (low[0], high[0]) == (0.0, 2.0)
    # groups alike: only rows vary, of which there are four times as many
    rows = np.random.default_rng(0).normal(size=(100, 1))
    wide = np.ptp(bootstrap_nested([rows], draws=4000, seed=0))
    narrow = np.ptp(bootstrap_nested([rows] * 4, draws=4000, seed=0))
    assert narrow == pytest.approx(wide / 2, rel=0.1)


def test_nested_intervals_leave_out_what_is_not_defined():
    nothing = np.full((3, 1), np.nan)
    rows = np.array([[1.0], [2.0], [3.0]])
    low, high = bootstrap_nested([rows, nothing], draws=500, seed=0)
    assert 1.0 <= low[0] < high[0] <= 3.0
    for groups_, draws in (([nothing], 500), ([rows[:1]], 500), ([rows], 0)):
        assert np.isnan(bootstrap_nested(groups_, draws=draws, seed=0)).all()
    assert np.array_equal(*(bootstrap_nested([rows, rows[:2]], draws=50, seed=0) for _ in range(2)))
