"""The page, from synthetic tables laid out as `evaluate` writes them."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from report_runs import SKILL, make_bundle, make_run

from perturbdiff.reporting.figures import svg
from perturbdiff.reporting.figures.svg import image
from perturbdiff.reporting.page.page import headline, write_report
from perturbdiff.runtime.errors import UserError


@pytest.fixture
def with_pictures(monkeypatch):
    """One page with the PNGs that the others do without."""
    monkeypatch.setattr(svg, "image", image)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return [make_run(folder / m, m) for m in SKILL]


@pytest.fixture
def runs(made, tmp_path):
    return [shutil.copytree(run, tmp_path / "runs" / run.name) for run in made]


class Page(HTMLParser):
    """Collects what a browser would fetch, ids, and unclosed elements."""

    VOID = frozenset(
        {"meta", "input", "link", "br", "hr", "img", "use", "path", "image", "rect", "circle", "line"}
    )

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched, self.ids, self.open, self.tags, self.words = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset") and not re.match(r"#|data:", value or ""):
                self.fetched.append(value)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_page_is_complete_self_contained_and_valid(runs, tmp_path, with_pictures):
    bundle = make_bundle(tmp_path / "bundle")
    split = tmp_path / "split.parquet"
    table = {
        "cell_type": ["a", "b"],
        "batch": "x",
        "perturbation": "p",
        "part": ["train", "test"],
        "n_cells": [7, 5],
    }
    pd.DataFrame(table).to_parquet(split)
    out = write_report(runs, tmp_path / "report.html", title="Toy", bundles=[bundle], splits=[split])
    text = out.read_text()
    page = Page(text)
    assert page.fetched == []
    assert "://" not in re.sub(r"http://www\.w3\.org/\d+/\w+", "", text)  # names of markup languages
    assert page.tags.count("script") == 2  # one of them holds data
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    words = " ".join(page.words)
    for expected in (
        "Toy",
        "PDCorr\u00a0↑",
        "Energy distance\u00a0↓",
        "Better than every baseline",
        "812 MiB",
        "width: 64",
    ):
        assert expected in words
    assert "4 of 5" in words  # AUROC is undefined for one perturbation
    assert len(text) < 10_000_000
    figures = tmp_path / "report_figures"
    assert {p.suffix for p in figures.iterdir()} == {".svg", ".png", ".csv"}
    assert (figures / "d1-pdcorr-duel.csv").exists()


def keep_tables(run: Path) -> Path:
    """Remove what only figures and gene tables need."""
    for name in ("embedding.parquet", "de_real.parquet", "de_pred.parquet"):
        (run / name).unlink()
    return run


def test_best_and_second_are_marked_and_the_ceiling_is_not(runs, tmp_path):
    for run in runs:
        keep_tables(run)
    text = write_report(runs, tmp_path / "r.html").read_text()
    text = text[text.index("All scores</h3>") :]
    rows = dict(
        re.findall(r'<th scope="row"[^>]*>(?:<i[^>]*></i>)?([\w-]+)</th>(.*?)</tr>', text, re.DOTALL)[:5]
    )
    assert "best" in rows["perturbdiff"]
    assert "second" in rows["nearest-context"]
    assert "best" not in rows["ceiling"]
    assert "second" not in rows["ceiling"]


def test_equal_inputs_give_equal_bytes(runs, tmp_path):
    first = write_report(runs[:2], tmp_path / "a" / "r.html")
    second = write_report(runs[:2], tmp_path / "b" / "r.html")
    assert first.read_bytes() == second.read_bytes()
    for folder in ("r_figures", "r_mqc"):
        for file in (tmp_path / "a" / folder).iterdir():
            assert file.read_bytes() == (tmp_path / "b" / folder / file.name).read_bytes()


def test_second_call_does_nothing_until_an_input_changes(runs, tmp_path):
    runs = [keep_tables(runs[0])]
    out = write_report(runs, tmp_path / "r.html")
    before = out.stat().st_mtime_ns
    assert write_report(runs, out).stat().st_mtime_ns == before
    (runs[0] / "run.json").write_text(json.dumps({"wall_seconds": 99.0}))
    assert write_report(runs, out).stat().st_mtime_ns != before
    assert "1.6 min" in out.read_text()


def test_labels_are_escaped(tmp_path):
    names = ("<script>alert(1)</script>", "_hidden $x$ & \"quoted\" 'name'", "IFN-γ@10", "long" * 40)
    run = make_run(tmp_path / "run", "<b>mine</b>", names=names, dataset="a & b <i>")
    other = make_run(tmp_path / "other", "linear", names=names, dataset="a & b <i>")
    text = write_report([run, other], tmp_path / "r.html", title="<u>title</u>").read_text()
    for tag in ("<script>alert", "<b>mine", "<u>", "<i>\n", "b <i>"):
        assert tag not in text
    assert Page(text).open == []


def test_one_run_of_one_perturbation(tmp_path):
    run = make_run(tmp_path / "run", "perturbdiff", perturbations=1)
    text = write_report([run], tmp_path / "r.html").read_text()
    assert "n/a" in text
    assert "needs a second method" in text


def test_run_with_only_its_tables(tmp_path):
    run = make_run(tmp_path / "run", "perturbdiff")
    for name in (
        "embedding.parquet",
        "de_real.parquet",
        "de_pred.parquet",
        "run.json",
        "manifest.json",
        "summary.json",
    ):
        (run / name).unlink()
    assert "PDCorr" in write_report([run], tmp_path / "r.html").read_text()


def test_many_methods_and_data_sets(tmp_path):
    runs = [
        keep_tables(make_run(tmp_path / f"m{i}", f"model {i}", skill=0.3 + i / 40, perturbations=3, cells=5))
        for i in range(20)
    ]
    runs.append(keep_tables(make_run(tmp_path / "second", "model 0", dataset="second", perturbations=3)))
    text = write_report(runs, tmp_path / "r.html").read_text()
    assert 'id="d1"' in text
    assert 'id="d2"' in text
    assert "20 methods" in text
    assert 'id="summary"' in text
    assert text.index('href="#d2"') < text.index('id="d1"')


def test_first_screen_says_what_to_read_with_care(runs, tmp_path):
    ours = keep_tables(runs[0])
    finding = {"kind": "few_cells", "text": "3 of 10 conditions have fewer than 10 real cells", "count": 3}
    summary = json.loads((ours / "summary.json").read_text()) | {"findings": [finding]}
    (ours / "summary.json").write_text(json.dumps(summary))
    text = write_report([ours], tmp_path / "r.html").read_text()
    assert "<b>Few cells.</b> 3 of 10 conditions have fewer than 10 real cells." in text
    assert "<b>Few perturbations.</b> Only 5 were scored" in text
    assert "<b>No baseline.</b>" in text
    assert "<b>No ceiling.</b>" in text
    assert "Not compared: the report holds no baseline" in text


def test_equal_names_are_told_apart_by_folder(tmp_path):
    runs = [make_run(tmp_path / f"seed{i}", "perturbdiff", perturbations=3, cells=5) for i in (1, 2)]
    assert "perturbdiff · seed1" in headline(runs)
    assert "perturbdiff · seed2" in headline(runs)


def test_different_definitions_or_perturbations_are_pointed_out(tmp_path):
    runs = [
        make_run(tmp_path / "a", "perturbdiff", perturbations=3),
        make_run(tmp_path / "b", "linear", perturbations=4, definition="cell-eval-0.8.2"),
    ]
    text = write_report(runs, tmp_path / "r.html").read_text()
    assert "different definitions" in text
    assert "perturbdiff 3, linear 4" in text


def test_headline_is_plain_text_with_the_scores(runs):
    text = headline(runs)
    lines = text.splitlines()
    assert "PDCorr ↑" in lines[0]
    assert lines[2].startswith("perturbdiff")
    blank = lines.index("")
    assert len({len(line) for line in lines[:blank]}) == 1
    assert lines[blank + 1].startswith("toy: perturbdiff: Better than every baseline")
    assert len(lines) == blank + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs: (runs[0] / "aggregate.csv").unlink(), "no aggregate.csv"),
        (lambda runs: (runs[0] / "metrics.parquet").write_text("x"), "is not a table, or damaged"),
    ],
)
def test_broken_runs_are_explained(runs, tmp_path, change, message):
    change(runs)
    with pytest.raises(UserError, match=message):
        write_report(runs, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    assert not (tmp_path / "r_figures").exists()


def test_unknown_opponent_names_the_methods(runs, tmp_path):
    with pytest.raises(UserError, match="no run of 'nearest_context'.*nearest-context"):
        write_report(runs, tmp_path / "r.html", against="nearest_context")
    with pytest.raises(UserError, match="no run to report"):
        write_report([], tmp_path / "r.html")
