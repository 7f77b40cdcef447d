"""Kinds of methods, and runs that differ by their seeds alone: how they are known, called, averaged and drawn."""

import math

import numpy as np
import pandas as pd
import pytest

from perturbdiff.reporting.figures import seed_means
from perturbdiff.reporting.loading.comparison import families, seed_of, stem
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.loading.results import Run, _kind, read_runs
from perturbdiff.reporting.page.page import _looks
from perturbdiff.reporting.page.page_data import write_tables
from perturbdiff.reporting.sections.chapter_data import opponent, subject

PDCORR = Column("PDCorr", "PDCorr", "higher")
MSE = Column("MSE", "MSE", "lower")
OURS = {"recipe": "kang18", "recipe_key": "aa"}
CPA = {"baseline": "cpa", "baseline_kind": "tool", "version": "0.8.8", "settings": "quick"}
LINEAR = {"baseline": "linear", "baseline_kind": "built-in"}


def run(method, made_by=None, dataset="toy", **scores):
    """A run of which only names and means are known."""
    values = {"PDCorr": 0.5, **scores}
    aggregate = pd.DataFrame(
        [("pooled", "pooled", name, value, 4, 4, "higher") for name, value in values.items()],
        columns=["scope_kind", "scope", "metric", "nanmean", "n_defined", "n", "direction"],
    )
    summary = {"method": method, "made_by": made_by or {}}
    kind = _kind(method, summary)
    return Run(None, method, dataset, kind, pd.DataFrame(), aggregate, summary, {}, {}, method)


@pytest.mark.parametrize(
    ("method", "made_by", "kind", "words", "baseline"),
    [
        ("cpa-seed1", CPA, "baseline", "external method", "cpa"),
        ("mine", {"baseline": "script", "baseline_kind": "script"}, "baseline", "own script", "script"),
        ("ridge", LINEAR, "baseline", "baseline", "linear"),
        ("linear", {}, "baseline", "baseline", "linear"),
        ("linear", OURS, "model", "model", None),  # a model that somebody calls so
        ("ours", OURS, "model", "model", None),
        ("somebody's", {}, "model", "model", None),
        ("ceiling", {}, "ceiling", "ceiling", None),
    ],
)
def test_kinds_come_from_the_predictions_and_not_from_the_name(method, made_by, kind, words, baseline):
    found = run(method, made_by)
    assert (found.kind, found.kind_words, found.baseline) == (kind, words, baseline)


def test_ours_first_then_methods_of_others_then_baselines(tmp_path):
    from report_runs import make_run

    given = {"ceiling": {}, "linear": LINEAR, "cpa-1": CPA, "ours": OURS, "control": {}}
    folders = [
        make_run(tmp_path / n, n, made_by=m, perturbations=2, cells=2, shown=1) for n, m in given.items()
    ]
    found = read_runs(folders)
    assert [r.method for r in found] == ["ours", "cpa-1", "linear", "control", "ceiling"]
    about = subject("d1", found, _looks(found), None)
    assert about.focus.method == "ours"
    assert [r.method for r in about.ranked if r.kind == "baseline"] == ["cpa-1", "linear", "control"]


def test_the_opponent_may_be_called_by_its_method():
    ours, near = (
        run("ours", OURS),
        run("nc-seed1", {"baseline": "nearest-context", "baseline_kind": "built-in"}),
    )
    cpa = run("cpa-seed1", CPA, PDCorr=0.9)
    assert opponent([ours, cpa, near], None) is near
    assert opponent([ours, cpa, near], "cpa") is cpa
    assert opponent([ours, cpa, near], "cpa-seed1") is cpa
    other = run("ours-2", {**OURS, "seed": 2}, PDCorr=0.99)
    assert opponent([ours, other, cpa], None) is cpa  # another method rather than another seed


def test_families_are_known_by_what_made_them():
    runs = [
        run("ours-seed0", {**OURS, "seed": 0, "train_seed": 0}),
        run("ours-seed1", {**OURS, "seed": 1, "train_seed": 1}),
        run("wide", {**OURS, "recipe_key": "bb", "seed": 0}),
        run("cpa-seed0", {**CPA, "seed": 0}),
        run("cpa-again", {**CPA, "seed": 0}),  # the same once more: counted once
        run("cpa-seed1", {**CPA, "seed": 1}),
        run("cpa-long", {**CPA, "settings": "recommended", "seed": 0}),
        run("theirs"),
        run("linear", {**LINEAR, "seed": 0}),
    ]
    found = {f.name: ([r.method for r in f.runs], f.seeds) for f in families(runs)}
    assert found == {
        "ours": (["ours-seed0", "ours-seed1"], "0, 1"),
        "wide": (["wide"], "0"),
        "cpa": (["cpa-seed0", "cpa-seed1"], "0, 1"),
        "cpa-long": (["cpa-long"], "0"),
        "theirs": (["theirs"], ""),
        "linear": (["linear"], "0"),
    }


def test_trainings_that_differ_are_told_apart_although_sampled_with_one_seed():
    runs = [run(f"ours-{i}", {**OURS, "seed": 0, "train_seed": i}) for i in (1, 2)]
    assert [f.seeds for f in families(runs)] == ["1/0, 2/0"]
    assert seed_of(runs[0]) == "1/0"
    assert seed_of(run("x", {"seed": 3, "train_seed": 3})) == "3"
    assert seed_of(run("x")) == ""


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (("cpa-seed0", "cpa-seed1"), "cpa"),
        (("cpa", "cpa-seed1"), "cpa"),
        (("seed0", "seed1"), "cpa"),  # nothing in common but the word: the method's own name
        (("ours1", "ours2"), "ours"),
        (("a_s1", "a_s2"), "a"),
        (("kang18", "kang18-b"), "kang18"),
        (("x", "y"), "cpa"),
    ],
)
def test_what_families_are_called(names, name):
    runs = [run(n, {**CPA, "seed": i}) for i, n in enumerate(names)]
    assert [f.name for f in families(runs)] == [name]


def test_families_of_one_name_are_told_apart():
    settings = ("quick", "quick", "recommended", "recommended")
    runs = [run(f"cpa-{i}", {**CPA, "settings": s, "seed": i}) for i, s in enumerate(settings)]
    assert [f.name for f in families(runs)] == ["cpa (quick)", "cpa (recommended)"]
    plain = [run(f"m-{i}", {**OURS, "recipe_key": k, "seed": i}) for i, k in enumerate("aabb")]
    assert [f.name for f in families(plain)] == ["m", "m #2"]


def test_stems():
    names = ("cpa-seed2", "cpa_3", "cpa seed 4", "mean-overall", "kang18", "7", "ours-v2")
    assert [stem(n) for n in names] == ["cpa", "cpa", "cpa", "mean-overall", "kang18", "7", "ours-v2"]


def test_seeds_of_a_method_have_one_colour_and_no_two_look_alike():
    made = [(f"m{i}", k) for i in range(5) for k in range(3)]
    runs = [run(f"{m}-{k}", {**CPA, "baseline": m, "seed": k}) for m, k in made]
    runs += [run(f"b{i}", {**LINEAR, "baseline": f"b{i}"}) for i in range(8)]
    look = _looks(runs)
    assert len({(one.color, one.marker) for one in look.values()}) == len(runs)
    for i in range(5):
        assert len({look[f"m{i}-{k}"].color for k in range(3)}) == 1
    assert look["m0-0"].color != look["m1-0"].color


@pytest.fixture
def three():
    """By hand: mean of .1, .2 and .6 is .3, their squared distances .04 + .01 + .09 = .14, over 2 is .07."""
    values = (0.1, 0.2, 0.6)
    return [run(f"cpa-{i}", {**CPA, "seed": i}, PDCorr=v, MSE=2.0) for i, v in enumerate(values)]


def test_mean_and_sample_standard_deviation_over_seeds(three):
    lines = seed_means.lines([*three, run("linear", LINEAR, PDCorr=0.4), run("ceiling", PDCorr=0.9)], [])
    assert [(x.name, x.kind, x.count) for x in lines] == [
        ("cpa", "external method", "3"),
        ("linear", "baseline", "1"),
        ("ceiling", "ceiling", "1"),
    ]
    spread = lines[0].spread("PDCorr")
    assert (spread.mean, spread.sd, spread.n) == (pytest.approx(0.3), pytest.approx(math.sqrt(0.07)), 3)
    assert lines[0].spread("MSE").sd == 0.0
    assert math.isnan(lines[1].spread("PDCorr").sd)
    assert seed_means.repeated(lines)
    assert not seed_means.repeated(lines[1:])


def test_undefined_scores_are_left_out_and_counted(three):
    three[2] = run("cpa-2", {**CPA, "seed": 2}, PDCorr=np.nan, MSE=2.0)
    line = seed_means.lines(three, [])[0]
    spread = line.spread("PDCorr")
    assert (spread.mean, spread.sd, spread.n) == (pytest.approx(0.15), pytest.approx(math.sqrt(0.005)), 2)
    cell = seed_means.table([line], [PDCORR], "t").rows[0].cells[1]
    assert (cell.count, cell.note) == ("2 of 3", "± 0.071")
    assert line.spread("AUPRC").n == 0


def test_failed_seeds_are_counted_and_failed_methods_have_a_line(three):
    lost = [FailedRun("toy", name, "tool", "why") for name in ("cpa-3", "state-0", "state-1", "squidiff")]
    lines = seed_means.lines(three, lost)
    assert [(x.name, x.count) for x in lines] == [
        ("cpa", "3 (1 failed)"),
        ("state", "0 (2 failed)"),
        ("squidiff", "0 (1 failed)"),
    ]
    rows = seed_means.table(lines, [PDCORR, MSE], "t").rows
    assert [c.text for c in rows[1].cells] == ["0 (2 failed)", "failed", "–"]


def test_tables_as_text_csv_and_markdown(three, tmp_path):
    runs = [*three, run("a|b", PDCorr=0.4, MSE=1.0)]
    lost = [FailedRun("toy", "state", "tool", "why", ("s.log",))]
    lines = seed_means.lines(runs, lost)
    assert seed_means.text(lines, [PDCORR]).splitlines() == [
        "toy               n       PDCorr ↑",
        "──────────────────────────────────",
        "cpa               3  0.300 ± 0.265",
        "a|b               1          0.400",
        "state  0 (1 failed)         failed",
    ]
    assert seed_means.markdown(lines, [PDCORR, MSE]).splitlines()[1:4] == [
        "| --- | --- | --- | --- |",
        "| cpa | 3 | 0.300 ± 0.265 | 2.00 ± 0.00 |",
        "| a\\|b | 1 | 0.400 | 1.00 |",
    ]
    write_tables(tmp_path, runs, lost, None)
    table = pd.read_csv(tmp_path / "over_seeds.csv").set_index(["method", "metric"])
    row = table.loc[("cpa", "PDCorr")]
    assert (row["n"], row["seeds"], row["kind"]) == (3, "0, 1, 2", "external method")
    assert (row["mean"], row["sd"]) == (pytest.approx(0.3), pytest.approx(math.sqrt(0.07)))
    assert np.isnan(table.loc[("a|b", "PDCorr"), "sd"])
    assert table.xs("state")["failed"].tolist() == [1]
    assert {p.name for p in tmp_path.iterdir()} == {
        "over_seeds.csv", "over_seeds.md", "trained.csv", "trained.md", "failed.csv",
    }  # fmt: skip
