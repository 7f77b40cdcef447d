"""What stands on the first screen: from runs to standings, warnings and tables."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from report_runs import make_run

from perturbdiff.reporting.figures.svg import looks
from perturbdiff.reporting.loading.metric_columns import key_metrics
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.sections.chapter_data import subject
from perturbdiff.reporting.sections.overview import overview
from perturbdiff.reporting.sections.standing import values


def about(runs):
    found = read_runs(runs)
    return subject("d1", found, looks([r.method for r in found], ["ceiling"]), None)


@pytest.fixture
def runs(tmp_path):
    made = [
        make_run(tmp_path / m, m, shown=1, cells=4) for m in ("perturbdiff", "linear", "control", "ceiling")
    ]
    for run in made:
        (run / "embedding.parquet").unlink()
    return made


def edit(run, **columns):
    """Change columns of the pooled rows of aggregate.csv: column → {metric: value}."""
    table = pd.read_csv(run / "aggregate.csv")
    for column, by_metric in columns.items():
        for metric, value in by_metric.items():
            table.loc[(table["scope_kind"] == "pooled") & (table["metric"] == metric), column] = value
    table.to_csv(run / "aggregate.csv", index=False)


def say(run, *found):
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"findings": list(found)}))


def every(over):
    return [*over.notes, *over.more]


def row(over, metric):
    return next(r for r in over.key.rows if r.head.startswith(metric))


def test_one_of_each_pair_of_key_metrics(runs):
    every = about(runs).every
    names = [c.name for c in key_metrics(every)]
    assert names == ["energy_distance", "PDCorr", "PDS_cos", "DEOver_10", "AUPRC", "DirAgr", "nonzero_ratio"]
    fewer = [c for c in every if c.name not in ("DEOver_10", "PDS_cos")]
    assert [c.name for c in key_metrics(fewer)][2:4] == ["PDS_L1", "DEOver"]


def test_key_table_holds_ours_the_best_baseline_chance_and_ceiling(runs):
    edit(runs[0], chance={"PDCorr": 0.05, "energy_distance": 0.4}, low={"PDCorr": 0.6}, high={"PDCorr": 0.95})
    over = overview(about(runs))
    ours, best, apart, chance, place, ceiling = row(over, "PDCorr").cells
    assert (ours.low, ours.high) == (0.6, 0.95)
    assert best.note == "linear"
    assert apart.text == "better"
    assert apart.value == pytest.approx(ours.value - best.value)
    assert chance.value == 0.05
    assert place.value == pytest.approx((ours.value - 0.05) / (ceiling.value - 0.05))
    assert place.scale is not None
    assert row(over, "Non-zero").cells[4].scale is None
    assert over.verdict.level == "good"


def test_wins_ties_and_losses_against_each_rival_the_strongest_first(runs, tmp_path):
    strong = make_run(tmp_path / "strong", "resample", skill=0.99, shown=1, cells=4)
    table = overview(about([*runs, strong])).against
    assert table is not None
    assert table.columns == ("Wins · ties · losses against", "Key metrics", "Energy distance", "PDCorr")
    assert table.rows[0].head == "resample"
    rows = {r.head: [cell.text for cell in r.cells] for r in table.rows}
    assert rows["control"] == ["6 · 0 · 0", "10 · 0 · 0", "5 · 0 · 0"]
    assert "wins: Energy distance, PDCorr" in table.rows[-1].cells[0].hint
    for record in rows["resample"]:
        assert sum(map(int, record.split(" · "))) in (5, 6, 10)
    assert overview(about([runs[0], runs[3]])).against is None


def calibrate(folder, **verdicts):
    """Say in a folder of scores what a calibration says of metrics."""
    path = folder / "summary.json"
    metrics = {name: {"verdict": worth, "reason": "so it is"} for name, worth in verdicts.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"calibration": {"metrics": metrics}}))


def test_a_metric_that_the_data_set_cannot_tell_is_grey_and_counts_nowhere(runs):
    calibrate(runs[0], PDCorr="weak", energy_distance="keep", AUPRC="keep")
    over = overview(about(runs))
    grey = row(over, "PDCorr")
    assert grey.kind == "silent"
    assert grey.cells[4].text == "weak: so it is"
    assert grey.cells[4].scale is None
    assert [r.kind for r in over.key.rows].count("silent") == 1
    assert over.against is not None
    assert all(sum(map(int, r.cells[0].text.split(" · "))) == 5 for r in over.against.rows)
    assert [r.cells[2].text for r in over.against.rows] == ["–", "–"]
    assert "It cannot tell at mean changes" in over.verdict.tells


def test_the_first_metric_that_passes_answers_a_question(runs):
    calibrate(runs[0], PDS_cos="useless", PDS_L1="keep", DEOver="weak", DEOver_10="weak")
    shown = {r.head.split("\u00a0")[0] for r in overview(about(runs)).key.rows}
    assert "PDS L1" in shown
    assert "PDS cos" not in shown
    assert "DEOver, enough DE genes" in shown  # neither passes: the first one stands there, grey


def test_the_copied_text_holds_the_verdict_the_key_numbers_and_the_warnings(runs):
    over = overview(about(runs))
    lines = over.copied.splitlines()
    assert lines[0] == f"perturbdiff on toy: {over.verdict.title}"
    assert f"Better than a baseline? {over.verdict.better}" in lines
    pdcorr = next(line for line in lines if line.startswith("PDCorr ↑ "))
    assert row(over, "PDCorr").cells[0].text in pdcorr
    assert "best baseline linear" in pdcorr
    assert "ceiling" in pdcorr
    assert all(f"- {n.kind}. {n.text}" in lines for n in every(over))


def test_cells_have_a_picture_for_each_condition_with_a_name_of_its_own(tmp_path):
    run = make_run(tmp_path / "run", "perturbdiff", cells=4, shown=3)
    pictures = overview(about([run])).cells
    assert [p.label for p in pictures] == ["drug 0", "drug 1", "drug 2"]
    table = pd.read_parquet(run / "embedding.parquet")
    table["condition"] = table["condition"].replace(
        {"CD4 T cell|donor 1|drug 1": "CD4 T cell|donor 2|drug 0"}
    )
    table.to_parquet(run / "embedding.parquet")
    labels = [p.label for p in overview(about([run])).cells]
    assert labels == ["drug 0 · donor 1", "drug 0 · donor 2", "drug 2 · donor 1"]


def test_intervals_are_made_where_a_run_holds_none(runs):
    edit(runs[0], low={"PDCorr": math.nan}, high={"PDCorr": math.nan})
    ours = row(overview(about(runs)), "PDCorr").cells[0]
    assert ours.low < ours.value < ours.high


def test_values_are_per_perturbation_or_per_condition(runs):
    run = read_runs(runs[:1])[0]
    assert len(values(run, "PDCorr")) == 5
    assert len(values(run, "energy_distance")) == 10
    assert len(values(run, "ES")) == 0
    assert np.nanmean(values(run, "PDCorr")) == pytest.approx(run.score("PDCorr")[0])
    assert values(run, "energy_distance").mean() == pytest.approx(run.score("energy_distance")[0])


def test_the_collapse_check_of_the_run_comes_before_our_own(runs):
    verdict = "collapsed: nearly one answer for all"
    collapsed = pd.DataFrame(
        {
            "scope_kind": ["pooled"],
            "scope": "pooled",
            "real": 0.1,
            "predicted": 1.0,
            "ratio": 1.0,
            "verdict": verdict,
        }
    )
    assert overview(about(runs)).verdict.level == "good"
    collapsed.to_csv(runs[0] / "collapse.csv", index=False)
    over = overview(about(runs))
    assert over.verdict.title.startswith("Collapsed")
    assert ("Alike predictions", f"Collapse check: {verdict}. See “Are the predictions distinct?”.") in [
        (n.kind, n.text) for n in every(over)
    ]


def test_findings_come_first_and_are_not_said_twice(runs):
    say(
        runs[0],
        {"kind": "few_perturbations", "text": "only 5 to tell apart", "count": 5},
        {"kind": "odd_thing", "text": "odd!"},
    )
    say(
        runs[1],
        {"kind": "missing", "text": "2 perturbations are missing"},
        {"kind": "few_cells", "text": "left out"},
    )
    notes = every(overview(about(runs), ["toy: the runs were scored against different truths."]))
    assert [n.kind for n in notes[:3]] == ["Comparability", "Few perturbations", "Odd thing"]
    assert notes[0].text == "the runs were scored against different truths."
    assert notes[1].text == "Only 5 to tell apart."
    assert notes[2].text == "Odd!"
    assert sum(n.kind == "Few perturbations" for n in notes) == 1
    assert [n.text for n in notes if n.kind == "Missing perturbations"] == [
        "linear: 2 perturbations are missing."
    ]
    assert "Left out." not in [n.text for n in notes]


@pytest.mark.parametrize(
    ("ratio", "word"), [(0.79, "more zeros"), (0.8, ""), (1.25, ""), (1.26, "fewer zeros")]
)
def test_zeros_are_warned_of_beyond_their_bounds(runs, ratio, word):
    edit(runs[0], nanmean={"nonzero_ratio": ratio})
    said = [n.text for n in every(overview(about(runs))) if n.kind == "Zeros"]
    assert len(said) == bool(word)
    assert all(word in text for text in said)


def test_many_warnings_are_folded(runs):
    say(runs[0], *({"kind": "missing", "text": f"number {i}"} for i in range(12)))
    over = overview(about(runs))
    assert len(over.notes) == 4
    assert len(over.more) >= 8
    assert over.cautions.startswith("Missing perturbations")
    assert over.cautions.count("erturbations") == 2  # each kind once; the other one is of few perturbations


def test_what_must_be_known_of_a_method_stands_below_the_scores_once(runs, tmp_path):
    made_by = {"baseline": "squidiff", "title": "Squidiff", "note": "it diverges"}
    names = ("squidiff-seed0", "squidiff-seed1")
    more = [make_run(tmp_path / n, n, shown=1, cells=4, made_by=made_by) for n in names]
    found = overview(about([*runs, *more]))
    assert [t.note for t in found.scores.shown] == ["", "Squidiff: it diverges.", ""]
    assert not any(t.note for t in overview(about(runs)).scores.shown)


def test_realism_is_in_sight_and_an_undefined_spread_is_explained(runs):
    real = overview(about(runs)).scores.shown[-1]
    assert real.title == "Are the cells real?"
    for metric in ("Non-zero values", "SD between cells", "SD of library sizes", "Gene–gene correlations"):
        assert any(head.startswith(metric) for head in real.columns)
    assert real.note == ""
    edit(runs[0], n_defined={"library_sd_ratio": 0}, nanmean={"library_sd_ratio": math.nan})
    assert "all real cells sum to the same" in overview(about(runs)).scores.shown[-1].note


def test_counts_stand_in_the_heading_and_where_they_differ(runs):
    edit(runs[1], n_defined={"AUROC": 3})
    genes = overview(about(runs)).scores.shown[1]
    i = next(i for i, head in enumerate(genes.columns) if head.startswith("AUROC"))
    assert genes.below[i] == "4 of 5"
    assert [r.cells[i - 1].count for r in genes.rows] == ["", "3 of 5", "", ""]
