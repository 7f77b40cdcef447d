"""Designs, figures and tables of an experiment, from synthetic runs laid out as `evaluate` writes them."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from report_runs import make_run
from typer.testing import CliRunner

from perturbdiff.cli.main import app
from perturbdiff.reporting.experiments import arm_tables
from perturbdiff.reporting.experiments.arm_design import default_design, read_design
from perturbdiff.reporting.experiments.experiment import Estimates, experiment
from perturbdiff.reporting.experiments.experiment_chapter import FIGURES, chapter, figure_names
from perturbdiff.reporting.experiments.published_numbers import beside, read_published
from perturbdiff.reporting.experiments.run_groups import Work, groups
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.page.page import headline, write_report
from perturbdiff.reporting.sections.chapter_data import drawn
from perturbdiff.runtime.errors import UserError

SKILLS = {"scratch": 0.5, "tuned": 0.7}
METRICS = (
    "R2",
    "PDCorr",
    "DEOver",
    "energy_distance",
    "nonzero_ratio",
    "library_sd_ratio",
)  # drawing takes long
HEAD = "dataset,method,part,collection,arm,level,seed,init"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two rotations × (scratch, tuned at two levels, two seeds, a baseline, a ceiling)."""
    folder = tmp_path_factory.mktemp("runs")
    arms = [(arm, s, level, seed) for arm, s in SKILLS.items() for level in (0, 100) for seed in (0, 1)]
    found = []
    for dataset in ("toy-B", "toy-T"):
        shape = {"dataset": dataset, "perturbations": 3, "cells": 3, "shown": 1}
        for arm, skill, level, seed in arms:
            name = f"{arm}-{level}-{seed}"
            made_by = {"recipe": "x", "recipe_key": f"{arm}{level}", "seed": seed}
            better = skill + level / 500
            found.append(make_run(folder / f"{dataset}-{name}", name, skill=better, made_by=made_by, **shape))
        found += [make_run(folder / f"{dataset}-{name}", name, **shape) for name in ("linear", "ceiling")]
    for run in found:
        for name in ("embedding", "de_real", "de_pred"):
            (run / f"{name}.parquet").unlink()
        metrics, means = pd.read_parquet(run / "metrics.parquet"), pd.read_csv(run / "aggregate.csv")
        metrics[metrics["metric"].isin(METRICS)].to_parquet(run / "metrics.parquet")
        means[means["metric"].isin(METRICS)].to_csv(run / "aggregate.csv", index=False)
    return found


@pytest.fixture(scope="module")
def runs(folders):
    return read_runs(folders)


def lines_of(runs, collection="toy"):
    rows = []
    for run in runs:
        if run.kind == "model":
            arm, level, seed = run.method.rsplit("-", 2)
            rows.append(f"{run.dataset},{run.method},test,{collection},{arm},{level},{seed},")
    return rows


@pytest.fixture
def design(runs, tmp_path):
    path = tmp_path / "design.csv"
    path.write_text("\n".join([HEAD, *lines_of(runs), "toy-B,lost-0,test,toy,lost,,0,"]) + "\n")
    return path


def test_lines_are_matched_and_what_has_none_joins(design, runs):
    found = read_design(design, runs)
    assert len(found) == len(runs) + 1
    assert [e.arm for e in found if e.run is None] == ["lost"]
    (group,) = groups(found)
    assert group.title == "toy, test part"
    assert [line.label for line in group.lines] == [
        "scratch, 0", "scratch, 100", "tuned, 0", "tuned, 100", "lost", "linear", "ceiling"
    ]  # fmt: skip
    assert [line.missing for line in group.lines] == [0, 0, 0, 0, 1, 0, 0]
    assert all(len(line.entries) == 4 for line in group.lines[:4])


def test_empty_fields_have_defaults(runs, tmp_path):
    path = tmp_path / "design.csv"
    path.write_text("dataset,method,part\ntoy-B,scratch-0-0,valid\ntoy-B,scratch-0-1,valid\n")
    found = read_design(path, [r for r in runs if r.method.startswith("scratch-0")])
    assert {(e.arm, e.collection, e.part) for e in found} == {("scratch-0", "toy-B", "valid")}
    assert [e.seed for e in found] == ["0", "1"]
    assert np.isnan([e.level for e in found]).all()


def test_a_baseline_belongs_to_the_level_of_its_data_set(runs, tmp_path):
    path = tmp_path / "design.csv"
    rows = ["toy-B,scratch-0-0,test,toy,scratch,1,0,", "toy-T,scratch-0-0,test,toy,scratch,5,0,"]
    path.write_text("\n".join([HEAD, *rows]))
    found = read_design(path, [r for r in runs if r.method in ("scratch-0-0", "linear")])
    assert {(e.arm, e.dataset, e.level) for e in found} == {
        (arm, dataset, level)
        for arm in ("scratch", "linear")
        for dataset, level in (("toy-B", 1), ("toy-T", 5))
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset,method\nt,m\n", "no column part"),
        (f"{HEAD},arms\n", "column 'arms' is not known, did you mean 'arm'"),
        (f"{HEAD}\ntoy-B,,test,,,,,\n", "line 2: method is empty"),
        (f"{HEAD}\ntoy-B,scratch-0-0,train,,,,,\n", "line 2: part 'train' is not one of valid, test"),
        (f"{HEAD}\ntoy-B,scratch-0-0,test,,,few,,\n", "line 2: level 'few' is not a number"),
        (f"{HEAD}\ntoy-B,scratch-0-0,test,,,inf,,\n", "is not a number"),
        (f"{HEAD}\ntoy-B,scratch-0-0,test,,,,,\ntoy-B,scratch-0-1,valid,,,,,\n", "stands for both parts"),
        (f"{HEAD}\ntoy-B,scratch-0-0,test,a,,,,\ntoy-B,scratch-0-1,test,b,,,,\n", "several collections (a, b)"),
        (f"{HEAD}\ntoy-B,scratch-0-0,test,,,,,\ntoy-B,scratch-0-0,test,,,,,\n", "two lines for scratch-0-0"),
        (f"{HEAD}\ntoy-B,scratch-0-0,test,,x,2,7,\ntoy-B,scratch-0-1,test,,x,2,7,\n", "x at level 2 has several runs"),
        (f"{HEAD}\nother,scratch-0-0,test,,,,,\n", "no line is one of the runs given (data sets: toy-B, toy-T)"),
    ],
)  # fmt: skip
def test_mistakes_are_named(runs, tmp_path, text, message):
    path = tmp_path / "design.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_design(path, runs)
    assert message in str(error.value)


def test_figures_are_asked_for_by_name():
    assert figure_names(" main,zeroshot , main,") == ["main", "zeroshot"]
    assert figure_names("") == []
    with pytest.raises(UserError, match="no figure 'zeroshots', did you mean 'zeroshot'"):
        figure_names("zeroshots")


@pytest.fixture
def found(design, runs):
    entries = read_design(design, runs)
    works = {}
    for e in entries:
        if e.run and e.kind == "model":
            size = 1000 if e.arm == "scratch" else 5000
            works[e.run] = Work(size, int(e.level), 1e9 * size * e.level)
    chapters = {"toy-B": [("Scores at a glance", "d1-glance")]}
    return experiment(entries, None, works, chapters)


def test_every_figure_is_drawn_with_its_numbers(found):
    made = {name: FIGURES[name](found) for name in FIGURES if name != "zeroshot"}
    plots = {name: list(drawn([section])) for name, section in made.items()}
    assert [name for name, found in plots.items() if not found] == ["main"]  # every line has a level
    assert made["main"].links == [("toy-B: Scores at a glance", "d1-glance")]
    every = [plot for found in plots.values() for plot in found]
    assert all(plot.name.startswith("x-") and len(plot.data) for plot in every)
    assert len({plot.name for plot in every}) == len(every)
    assert all(section.intro for section in made.values())


def test_the_random_network_is_a_line_from_side_to_side(found, runs, tmp_path):
    assert not list(drawn([FIGURES["zeroshot"](found)]))  # one trained level is no curve
    path = tmp_path / "design.csv"
    rows = [row.replace("tuned,0", "tuned,50") for row in lines_of(runs)]
    path.write_text("\n".join([HEAD, *rows]))
    plot = next(iter(drawn([FIGURES["zeroshot"](experiment(read_design(path, runs)))])))
    data = plot.data.set_index("curve")
    assert plot.name == "x-zeroshot-r2"
    assert data.loc["tuned", "x"].tolist() == [50.0, 100.0]
    assert data.loc["scratch", "x"] == 100.0
    assert {"random initialisation", "best baseline", "ceiling"} <= set(data.index)


def test_scaling_without_bundles_says_what_to_give(design, runs):
    section = FIGURES["scaling"](experiment(read_design(design, runs)))
    assert "--bundle" in section.note
    assert not section.filled


def test_scaling_is_against_counted_work_and_size(found):
    plots = {p.name: p.data for p in drawn([FIGURES["scaling"](found)])}
    compute = plots["x-scaling-compute-pdcorr"].dropna(subset=["x"])
    assert compute.set_index("arm")["flops"].max() == 1e9 * 5000 * 100
    assert compute["x"].max() == pytest.approx(500.0)  # TFLOP
    size = plots["x-scaling-size-pdcorr"].dropna(subset=["x"])
    assert set(size["curve"]) == {"0 steps", "100 steps"}
    assert set(size["x"]) == {0.001, 0.005}


def test_tables_mark_the_best_and_count_what_failed(found):
    table = arm_tables.arms(found.groups[0], arm_tables.SCORES, "scores")
    rows = {row.head: row for row in table.rows}
    assert rows["lost"].cells[0].text == "failed"
    assert rows["lost"].note == "1 run failed"
    assert rows["tuned, 100"].note == "2 data sets, 2 seeds"
    assert "best" in rows["tuned, 100"].cells[0].kind
    assert "best" not in rows["ceiling"].cells[0].kind
    assert re.match(r"± [\d.]+ \[.*\]$", rows["tuned, 100"].cells[0].note)
    gaps = {row.head: row for row in arm_tables.differences(found.groups[0], arm_tables.SCORES).rows}
    assert gaps["tuned, 100"].note == "against scratch, 100"
    assert "better" in gaps["tuned, 100"].cells[0].kind
    assert gaps["tuned, 100"].cells[0].text.startswith("−")


def test_a_data_set_whose_runs_all_failed_is_told_on_the_terminal(runs, design):
    lost = [replace(entry, run=None) for entry in read_design(design, runs)]
    told = arm_tables.text([Estimates(group) for group in groups(lost)])
    assert re.search(r"^tuned, 100 +failed$", told, re.MULTILINE), told


def test_an_undefined_spread_of_library_sizes_is_explained(runs, design):
    estimates = Estimates(groups(read_design(design, runs))[0])
    assert arm_tables.arms(estimates, arm_tables.REALISM, "r").note == ""
    flat = [r for r in runs if r.method == "linear"]
    for run in flat:
        run.metrics.loc[run.metrics["metric"] == "library_sd_ratio", "value"] = np.nan
    try:
        again = Estimates(groups(read_design(design, runs))[0])
        assert "sum to the same" in arm_tables.arms(again, arm_tables.REALISM, "r").note
    finally:
        for run in flat:
            run.metrics.loc[run.metrics["metric"] == "library_sd_ratio", "value"] = 1.0


PAPER = (
    "dataset,method,metric,value\nTOY,STATE,PDCorr,0.8\nTOY,STATE,R2,\nTOY,Mean,PDCorr,NaN\n"
    "TOY,linear,PDCorr,0.5\nX,Mean,R2,0.5\n"
)


def test_published_numbers_stand_beside_ours(runs, design, tmp_path, caplog):
    path = tmp_path / "paper.csv"
    path.write_text(PAPER)
    papers = read_published(path)
    (table,) = beside(papers, experiment(read_design(design, runs)).groups)
    assert table.columns[:2] == ("Method", "from")
    rows = {row.head: [cell.text for cell in row.cells] for row in table.rows}
    assert rows["STATE"] == ["paper", "n/a", "0.800"]
    assert rows["tuned, 100"][0] == "here"
    assert "ceiling" not in rows
    here, paper, apart = ([cell.text for cell in row.cells] for row in table.rows if row.head == "linear")
    assert (here[0], paper, apart[:2]) == ("here", ["paper", "n/a", "0.500"], ["difference", "n/a"])
    assert apart[2] == f"{100 * (float(here[2]) / 0.5 - 1):+.1f} %".replace("-", "−")
    with caplog.at_level("INFO"):
        assert (
            beside(papers, experiment(default_design([r for r in runs if r.dataset == "toy-B"])).groups) == []
        )
    assert "no published result" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset,method,value\n", "no column metric"),
        ("dataset,method,metric,value\nt,m,PDCor,1\n", "metric 'PDCor' is not known, did you mean 'PDCorr'"),
        ("dataset,method,metric,value\nt,m,R2,1\nt,m,R2,1\n", "two values of R2 for m on t"),
        ("dataset,method,metric,value\nt,m,R2,one\n", "'one' is not a number"),
    ],
)
def test_mistakes_in_published_numbers_are_named(tmp_path, text, message):
    path = tmp_path / "paper.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_published(path)
    assert message in str(error.value)


def test_the_page_has_a_chapter_and_the_tables_are_exported(folders, design, tmp_path):
    paper = tmp_path / "paper.csv"
    paper.write_text(PAPER)
    settings = {"design": design, "shown": "main,ablation", "published": paper, "against": "scratch"}
    folders = [f for f in folders if f.name.startswith("toy-B") and "100-1" not in f.name]
    out = write_report(folders, tmp_path / "r.html", **settings)
    text = out.read_text()
    assert text.index('id="experiment"') < text.index('id="d1"')
    for anchor in re.findall(r'href="#([^"]+)"', text):
        assert f'id="{anchor}"' in text
    for words in (
        "toy, test part: scores",
        "Beside the published numbers",
        "1 failed",
        "Differences between arms",
    ):
        assert words in text
    arms = pd.read_csv(tmp_path / "r_tables" / "arms.csv")
    assert set(arms["arm"]) == {"scratch", "tuned", "lost", "linear", "ceiling"}
    assert (tmp_path / "r_tables" / "arms.md").read_text().startswith("### toy, test part\n\n| arm |")
    assert (tmp_path / "r_figures" / "x-ablation-1.svg").exists()
    assert headline(folders, design=design).startswith("toy, test part")


def test_without_a_design_nothing_changes_and_figures_are_refused(folders, tmp_path):
    out = write_report(folders[:1], tmp_path / "r.html")
    assert 'id="experiment"' not in out.read_text()
    assert not (tmp_path / "r_tables" / "arms.csv").exists()
    with pytest.raises(UserError, match="--figures needs --design"):
        write_report(folders[:1], tmp_path / "s.html", shown="main")


def test_an_arm_may_be_whom_ours_is_compared_with(folders, design, tmp_path):
    with pytest.raises(UserError, match="no run of 'nobody' to compare with; methods: .*; arms: "):
        write_report(folders, tmp_path / "r.html", design=design, against="nobody")
    asked = experiment(read_design(design, read_runs(folders)), "tuned")
    assert asked.groups[0].reference(asked.groups[0].group.lines[0]).label == "tuned, 0"


def test_the_command_line_takes_it_all(folders, design, tmp_path):
    out = tmp_path / "r.html"
    words = [
        "report",
        *map(str, folders),
        "--out",
        str(out),
        "--design",
        str(design),
        "--figures",
        "ablation",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "toy, test part" in result.output
    config = json.loads((tmp_path / "r.html.manifest.json").read_text())["config"]
    assert config["figures"] == ["ablation"]


def test_a_chapter_needs_something_to_show(runs):
    assert chapter(experiment(default_design(runs)), (), None, arms=False) is None
