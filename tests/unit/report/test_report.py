"""The page, from synthetic tables laid out as `evaluate` writes them."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perturbdiff.errors import UserError
from perturbdiff.evaluation.aggregate import aggregate
from perturbdiff.evaluation.catalogue import METRICS
from perturbdiff.report.page import headline, write_report

SKILL = {"perturbdiff": 0.9, "linear": 0.6, "nearest-context": 0.7, "control": 0.1, "ceiling": 0.97}
CONTEXTS = ("B cell", "Monocyte")


def make_run(
    folder: Path,
    method: str,
    *,
    dataset: str = "toy",
    perturbations: int = 5,
    skill: float | None = None,
    cells: int = 20,
    shown: int = 2,
    names: tuple[str, ...] = (),
    definition: str = "cell-eval-0.6.6",
) -> Path:
    """Write what `evaluate` leaves for a method of a given skill (0 to 1)."""
    folder.mkdir(parents=True)
    skill = SKILL.get(method, 0.5) if skill is None else skill
    rng = np.random.default_rng(sum(map(ord, dataset)))
    names = names or tuple(f"drug {i}" for i in range(perturbations))
    noise = np.random.default_rng(sum(map(ord, method)))
    conditions = [(f"{c}|donor 1", name) for c in CONTEXTS for name in names]
    rows = []
    for kind, scope in (("pooled", "pooled"), *(("context", c) for c in CONTEXTS)):
        for metric in METRICS.values():
            if metric.family != "distribution":
                for name in names if metric.per_perturbation else ("*",):
                    value = metric_value(metric.direction, skill, rng.uniform(0, 0.3), noise)
                    if (metric.name == "AUROC" and name == names[-1]) or (
                        len(names) == 1 and single(metric.name)
                    ):
                        value = np.nan
                    rows.append((kind, scope, name, metric.name, value))
    for scope, name in conditions:
        for metric in METRICS.values():
            if metric.family == "distribution":
                value = metric_value(metric.direction, skill, rng.uniform(0, 0.3), noise)
                rows.append(("condition", scope, name, metric.name, value))
    metrics = pd.DataFrame(rows, columns=["scope_kind", "scope", "perturbation", "metric", "value"])
    metrics = metrics.assign(method=method, dataset=dataset, status="ok", n_cells=50, definition=definition)
    metrics.to_parquet(folder / "metrics.parquet")
    members = {c: [k for k in conditions if k[0].startswith(c)] for c in CONTEXTS}
    aggregate(metrics, members).assign(definition=definition).to_csv(folder / "aggregate.csv", index=False)
    write_genes(folder, names, skill, rng, noise)
    write_cells(folder, names, skill, cells, shown)
    summary = {"method": method, "dataset": dataset, "num_conditions": len(conditions)}
    (folder / "summary.json").write_text(json.dumps(summary))
    manifest = {
        "stage": "evaluate",
        "seed": 0,
        "config": {"alpha": 0.05},
        "versions": {"perturbdiff": "0.1.0"},
        "inputs": {"truth": {"name": "store", "sha256": "a" * 64}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    record = {
        "wall_seconds": 12.5,
        "cpu_seconds": 11.0,
        "peak_memory_mib": 812.0,
        "started": "2025-01-02T03:04:05",
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def single(name: str) -> bool:
    return name == "ES" or name.startswith("PDS")


def metric_value(direction: str, skill: float, hard: float, noise: np.random.Generator) -> float:
    good = np.clip(skill - hard + 0.08 * noise.standard_normal(), 0.01, 1)
    return float({"higher": good, "lower": 0.2 * (1.05 - good), "one": good, "none": 100 * good}[direction])


def write_genes(
    folder: Path, names: tuple[str, ...], skill: float, rng: np.random.Generator, noise: np.random.Generator
) -> None:
    genes = [f"GENE{i}" for i in range(40)]
    control = rng.uniform(0.1, 1.5, len(genes))
    tables = {"real": [], "pred": []}
    shared = 0.2 * rng.standard_normal(len(genes))
    for name in names:
        change = shared + 0.4 * rng.standard_normal(len(genes)) * (rng.random(len(genes)) < 0.4)
        guess = skill * change + (1 - skill) * shared + 0.02 * noise.standard_normal(len(genes))
        for side, delta in (("real", change), ("pred", guess)):
            mean = np.clip(control + delta, 0, None)
            fold = np.log2(np.clip(np.expm1(mean) / np.expm1(control), 0.05, 20))
            p = np.exp(-20 * np.abs(delta))
            tables[side].append(
                pd.DataFrame(
                    {
                        "scope_kind": "pooled",
                        "scope": "pooled",
                        "perturbation": name,
                        "gene": genes,
                        "p": p,
                        "q": np.minimum(1, 3 * p).astype(np.float32),
                        "log2fc": fold,
                        "mean": mean,
                        "control_mean": control,
                    }
                )
            )
    for side, parts in tables.items():
        pd.concat(parts, ignore_index=True).to_parquet(folder / f"de_{side}.parquet")


def write_cells(folder: Path, names: tuple[str, ...], skill: float, cells: int, conditions: int) -> None:
    rng = np.random.default_rng(1)
    parts = []
    for i, name in enumerate(names[:conditions]):
        shift = np.array([3 * np.cos(i), 3 * np.sin(i)])
        for source, move in (("control", 0.0), ("real", 1.0), ("predicted", skill)):
            xy = rng.standard_normal((cells, 2)) + move * shift
            label = f"CD4 T cell|donor 1|{name}"
            parts.append(pd.DataFrame({"condition": label, "source": source, "x": xy[:, 0], "y": xy[:, 1]}))
    pd.concat(parts, ignore_index=True).to_parquet(folder / "embedding.parquet")


def make_bundle(folder: Path) -> Path:
    folder.mkdir()
    steps = np.arange(0, 2000, 20)
    rng = np.random.default_rng(0)
    train = pd.DataFrame({"step": steps, "split": "train", "total": 1 / (1 + steps / 200)})
    train["total"] += 0.02 * rng.random(len(steps))
    valid = train.iloc[::20].assign(split="valid", total=lambda t: t["total"] * 1.1)
    both = pd.concat([train, valid])
    both.assign(mmd=both["total"] * 0.8, mse=both["total"] * 0.2).to_csv(folder / "training.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"name": "tiny", "model": {"width": 64}}))
    (folder / "manifest.json").write_text(json.dumps({"stage": "train", "seed": 1}))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return [make_run(folder / m, m) for m in SKILL]


@pytest.fixture
def runs(made, tmp_path):
    return [shutil.copytree(run, tmp_path / "runs" / run.name) for run in made]


class Page(HTMLParser):
    """Collects what a browser would fetch, ids, and unclosed elements."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "use", "path", "image", "rect", "circle", "line"})

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


def test_page_is_complete_self_contained_and_valid(runs, tmp_path):
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
    assert "://" not in text
    assert page.tags.count("script") == 1
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
    for file in (tmp_path / "a" / "r_figures").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / "r_figures" / file.name).read_bytes()


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
        make_run(tmp_path / f"m{i}", f"model {i}", skill=0.3 + i / 40, perturbations=3, cells=5)
        for i in range(20)
    ]
    runs.append(make_run(tmp_path / "second", "model 0", dataset="second", perturbations=3, cells=5))
    text = write_report(runs, tmp_path / "r.html").read_text()
    assert 'id="d1"' in text
    assert 'id="d2"' in text
    assert "20 methods" in text


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
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs: (runs[0] / "aggregate.csv").unlink(), "no aggregate.csv"),
        (lambda runs: (runs[0] / "metrics.parquet").write_text("x"), "cannot be read"),
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
