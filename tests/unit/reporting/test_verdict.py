"""The rules of the first screen at their edges."""

import math

import numpy as np
import pandas as pd
import pytest

from perturbdiff.evaluation.metrics.bounds import oriented
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.sections.standing import Gain, Score, Standing, best_of, gain, place
from perturbdiff.reporting.sections.verdict import FEWEST, judge, tally

ENERGY = Column("energy_distance", "Energy distance", "lower")
PDCORR = Column("PDCorr", "PDCorr", "higher")
BETTER, LEVEL, WORSE, UNKNOWN = (0.01, 0.2), (-0.1, 0.1), (-0.2, -0.01), (math.nan, math.nan)


NONE = Score(math.nan)


def stands(
    metric=PDCORR,
    *against,
    value=0.6,
    chance=0.1,
    ceiling=Score(0.8, 0.75, 0.9),
    interval=(0.5, 0.7),
    worth="keep",
):
    gains = tuple(Gain(f"b{i}", sum(ends) / 2, *ends, 10) for i, ends in enumerate(against))
    baseline = Score(0.5) if gains else None
    best = "b0" if gains else None
    return Standing(
        metric, Score(value, *interval, 10, 10), best, baseline, gains, chance, ceiling, worth, "so it is"
    )


def energy(*against, **changes):
    return stands(ENERGY, *against, **{"chance": 2.0, "ceiling": Score(0.0, -0.1, 0.1), **changes})


@pytest.mark.parametrize(
    ("e", "p", "level", "title"),
    [
        ([BETTER], [BETTER], "good", "Better than every baseline in energy distance and PDCorr"),
        (
            [BETTER, BETTER],
            [BETTER, LEVEL],
            "mixed",
            "Better than every baseline in energy distance, no clear difference from b1",
        ),
        (
            [BETTER],
            [WORSE],
            "mixed",
            "Better than every baseline in energy distance, worse than b0 in PDCorr",
        ),
        ([LEVEL], [LEVEL], "level", "No clear difference from b0 in energy distance and PDCorr"),
        ([LEVEL], [WORSE], "poor", "Worse than b0 in PDCorr, no clear difference from b0 in energy distance"),
        ([WORSE, BETTER], [WORSE], "poor", "Worse than b0 in energy distance and PDCorr"),
        ([UNKNOWN], [UNKNOWN], "unknown", "No interval for energy distance and PDCorr"),
        ([], [], "unknown", "Not compared"),
    ],
)
def test_against_baselines(e, p, level, title):
    found = judge([energy(*e), stands(PDCORR, *p)], perturbations=FEWEST)
    assert found.level == level
    assert found.title.startswith(title)
    assert all(answer for _, answer in found.answers)


def test_fewer_perturbations_than_a_verdict_needs():
    both = [energy(BETTER), stands(PDCORR, BETTER)]
    assert judge(both, FEWEST).level == "good"
    found = judge(both, FEWEST - 1)
    assert found.level == "unknown"
    assert found.title == "Cannot be judged: 4 perturbations, and at least 5 are needed"
    assert "1 perturbation," in judge(both, 1).title


@pytest.mark.parametrize(
    ("collapse", "title"),
    [
        ("no change predicted", "Predicts no change at all"),
        ("hardly any change predicted", "Predicts hardly any change"),
        ("collapsed: nearly one answer for all", "Collapsed"),
    ],
)
def test_collapse_comes_before_scores(collapse, title):
    both = [energy(BETTER), stands(PDCORR, BETTER)]
    found = judge(both, 10, collapse)
    assert found.level == "poor"
    assert found.title.startswith(title)
    assert judge(both, 10, "more alike than the truth").level == "good"


def test_chance_inside_the_interval_is_no_better_than_chance():
    good = energy(BETTER)
    at = stands(PDCORR, BETTER, interval=(0.1, 0.7), chance=0.1)
    assert at.over_chance == "level"
    assert judge([good, at], 10).title == "No better than chance in PDCorr"
    above = stands(PDCORR, BETTER, interval=(0.11, 0.7), chance=0.1)
    assert above.over_chance == "better"
    assert judge([good, above], 10).level == "good"
    below = energy(BETTER, value=3.0, interval=(2.5, 3.5))
    assert below.over_chance == "worse"
    assert judge([below, above], 10).title == "No better than chance in energy distance"
    assert stands(chance=math.nan).over_chance == "unknown"


def test_one_core_metric_alone_does_not_make_a_model_good():
    found = judge([stands(PDCORR, BETTER)], 10)
    assert found.level == "mixed"
    assert "only one of two" in found.title
    undefined = energy(BETTER, value=math.nan)
    assert judge([undefined, stands(PDCORR, BETTER)], 10).level == "mixed"
    assert judge([undefined], 10).level == "unknown"
    assert judge([], 10).level == "unknown"


def test_an_interval_that_touches_zero_tells_nothing_apart():
    assert Gain("b", 0.1, 0.0, 0.2, 9).relation == "level"
    assert Gain("b", -0.1, -0.2, 0.0, 9).relation == "level"
    assert Gain("b", 0.1, 1e-9, 0.2, 9).relation == "better"
    assert Gain("b", 0.1, math.nan, math.nan, 1).relation == "unknown"


def test_place_between_chance_and_ceiling():
    standing = energy(value=0.5)
    assert standing.position == pytest.approx(0.75)
    assert place(2.5, standing) == pytest.approx(-0.25)
    assert math.isnan(energy(chance=0.0).position)
    assert math.isnan(energy(chance=-1.0).position)  # the ceiling is the worse one
    assert math.isnan(stands(ceiling=NONE).position)
    assert math.isnan(stands(Column("nonzero_ratio", "Zeros", "one")).position)


def test_gain_is_paired_and_points_to_better():
    index = pd.MultiIndex.from_product([["c"], list("abcdefgh")])
    rng = np.random.default_rng(0)
    hard = pd.Series(10 * rng.random(8), index)
    found = gain(hard - 0.1, hard, "b", "lower")
    assert found.relation == "better"
    assert found.value == pytest.approx(0.1)
    assert gain(hard - 0.1, hard, "b", "higher").relation == "worse"
    assert gain(hard, hard, "b", "higher").relation == "level"
    assert (found.wins, found.ties, found.losses) == (8, 0, 0)
    mixed = gain(hard + np.array([0, 0, 0, 1, 1, -1, -1, -1]), hard, "b", "higher")
    assert (mixed.wins, mixed.ties, mixed.losses) == (2, 3, 3)
    missing = hard.copy()
    missing.iloc[:3] = math.nan
    assert gain(missing, hard, "b", "higher").n == 5
    assert gain(hard.iloc[:1], hard, "b", "higher").relation == "unknown"
    assert gain(hard.iloc[:0], hard, "b", "higher").n == 0
    ratio = gain(pd.Series(1.0, index), pd.Series([0.5] * 4 + [1.5] * 4, index), "b", "one")
    assert ratio.value == pytest.approx(0.5)


def test_best_of_and_orientation():
    assert best_of({"a": 1.0, "b": 2.0, "c": math.nan}, "lower") == "a"
    assert best_of({"a": 0.8, "b": 1.1}, "one") == "b"
    assert best_of({"a": math.nan}, "higher") is None
    assert best_of({"a": 1.0}, "none") is None
    assert oriented(1.5, "one") == -0.5


def test_key_metrics_are_counted():
    assert tally([energy(BETTER), stands(PDCORR, LEVEL)]) == (
        "Of 2 key metrics: better than every baseline on 1, no clear difference from the strongest on 1."
    )
    assert tally([stands()]) == ""


def test_only_the_calibration_makes_a_metric_silent():
    assert not stands().silent
    assert not stands(worth="").silent  # nothing is known
    assert stands(worth="weak").silent
    assert stands(worth="useless").silent
    zeros = Column("nonzero_ratio", "Zeros", "one")
    assert not stands(zeros, worth="useless").silent  # a check of the cells, which is not ranked


def test_what_the_data_set_cannot_tell_counts_for_no_verdict():
    mute = stands(PDCORR, WORSE, interval=(0.0, 0.2), worth="weak")
    found = judge([energy(BETTER), mute], 20)
    assert found.level == "mixed"
    assert (
        found.title == "Better than every baseline in energy distance, the only one of two metrics that tells"
    )
    assert "mean changes" not in found.better
    assert found.tells == (
        "Partly: a replicate is clearly above the mean response at whole populations. It cannot tell at mean changes."
    )
    assert found.sentence == "Of 1 key metrics: better than every baseline on all."
    both = judge([energy(BETTER, worth="useless"), mute], 20)
    assert both.level == "unknown"
    assert both.title == "This test set cannot tell: energy distance and PDCorr are not reliable here"
    assert both.tells.startswith("No: ")


def test_is_it_better_than_a_baseline():
    def answer(*standings, collapse=""):
        return judge(standings, 20, collapse).better

    assert answer(energy(BETTER), stands(PDCORR, BETTER)) == (
        "Yes: better than every baseline at whole populations and mean changes."
    )
    assert answer(energy(BETTER), stands(PDCORR, WORSE, LEVEL)) == (
        "Partly: better than every baseline at whole populations. Worse than b0 at mean changes."
    )
    assert answer(energy(LEVEL), stands(PDCORR, LEVEL)) == (
        "No. No clear difference from b0 at whole populations and mean changes."
    )
    assert answer(energy(ceiling=NONE), stands(ceiling=NONE)) == (
        "Unknown: no baseline stands beside it. It is better than chance at whole populations and mean changes."
    )
    poor = (energy(WORSE), stands(PDCORR, LEVEL, interval=(0.0, 0.2)))
    assert answer(*poor, collapse="hardly any change predicted") == (
        "No. Predicts hardly any change. No better than chance at mean changes. Worse than b0 at whole populations."
    )


def test_is_it_near_a_replicate():
    def answer(*standings):
        return judge(standings, 20).near

    near = energy(BETTER, value=0.1, interval=(0.0, 0.2))  # the ceiling's interval reaches to 0.1
    assert near.beside_replicate == "level"
    assert stands().beside_replicate == "worse"
    assert answer(near) == "Yes: no clear gap to a replicate at whole populations."
    assert answer(near, stands()) == (
        "Partly: at whole populations, not at mean changes. "
        "Of the way from chance to a replicate it goes 71 % at mean changes."
    )
    assert answer(stands()).startswith("No: clearly below a replicate at mean changes.")
    assert answer(stands(ceiling=NONE)) == "Unknown, because there is no ceiling."
    beyond = stands(value=0.95, interval=(0.92, 0.98))
    assert beyond.beside_replicate == "level"


def test_can_this_data_set_tell():
    yes = judge([energy(BETTER), stands(PDCORR, BETTER)], 20)
    assert yes.tells == (
        "Yes: a replicate is clearly above the mean response at whole populations and mean changes."
    )
    few = judge([energy(LEVEL), stands(PDCORR, LEVEL)], 7)
    assert few.tells.endswith("Intervals over 7 perturbations are too narrow.")
    unknown = judge([energy(BETTER, worth=""), stands(PDCORR, BETTER, worth="")], 20)
    assert unknown.tells == "Unknown, because the data were not calibrated (perturbdiff calibrate)."
    assert unknown.level == "good"


def test_many_metrics_are_counted_in_a_sentence():
    names = ("PDS_cos", "DEOver", "AUPRC")
    more = [stands(Column(name, name, "higher"), BETTER) for name in names]
    found = judge([energy(BETTER), stands(PDCORR, BETTER), *more], 20)
    assert found.better == (
        "Yes: better than every baseline at whole populations, mean changes and 3 other key metrics."
    )
