"""The chapter on an experiment in Chromium: it asks for nothing, fits a phone, is legible and sorts."""

import itertools
from pathlib import Path

import pandas as pd
import pytest
from browser_checks import CLICK_THROUGH, CONTRAST, assert_sorted
from report_runs import make_run

from perturbdiff.reporting.page.page import write_report

FIGURES = "main,fewshot"
METRICS = ("R2", "PDCorr", "DEOver", "AUPRC", "energy_distance", "nonzero_ratio", "library_sd_ratio")
PAPER = "dataset,method,metric,value\nToy,STATE,PDCorr,0.8\nToy,Mean,PDCorr,0.4\n"


@pytest.fixture(scope="session")
def experiment_file(tmp_path_factory) -> Path:
    """A page of two rotations, two arms at two levels, two seeds, a run that failed and published numbers."""
    folder = tmp_path_factory.mktemp("experiment")
    runs, lines = [], ["dataset,method,part,collection,arm,level,seed,init", "toy-B,lost,test,toy,lost,,0,"]
    for dataset in ("toy-B", "toy-T"):
        shape = {"dataset": dataset, "perturbations": 3, "cells": 3, "shown": 1}
        for arm, level, seed in (
            ("from scratch", 1, 0),
            ("from scratch", 5, 0),
            ("finetuned", 1, 0),
            ("finetuned", 1, 1),
        ):
            name = f"{arm[:4]}-{level}-{seed}"
            made_by = {"recipe": "x", "recipe_key": f"{arm}{level}", "seed": seed}
            skill = (0.5 if arm == "from scratch" else 0.7) + level / 40
            runs.append(make_run(folder / f"{dataset}-{name}", name, skill=skill, made_by=made_by, **shape))
            lines.append(f"{dataset},{name},test,toy,{arm},{level},{seed},")
        for name, part in (("whole", "x"), ("linear", ""), ("ceiling", "")):
            runs.append(make_run(folder / f"{dataset}-{name}", name, **shape))
            lines += [f"{dataset},{name},test,toy,all cells,,0,"] if part else []
    for run in runs:  # drawing takes long
        for name in ("embedding", "de_real", "de_pred"):
            (run / f"{name}.parquet").unlink()
        metrics, means = pd.read_parquet(run / "metrics.parquet"), pd.read_csv(run / "aggregate.csv")
        metrics[metrics["metric"].isin(METRICS)].to_parquet(run / "metrics.parquet")
        means[means["metric"].isin(METRICS)].to_csv(run / "aggregate.csv", index=False)
    (folder / "design.csv").write_text("\n".join(lines))
    (folder / "paper.csv").write_text(PAPER)
    return write_report(
        runs,
        folder / "report.html",
        design=folder / "design.csv",
        shown=FIGURES,
        published=folder / "paper.csv",
    )


def test_the_chapter_is_whole_and_quiet(open_page, experiment_file):
    opened = open_page(path=experiment_file)
    page = opened.page
    page.wait_for_load_state("networkidle")
    assert opened.requests == [experiment_file.as_uri()]
    assert opened.console == []
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    bad = page.evaluate(
        """[...document.querySelectorAll('#experiment figure')].filter(f => {
          const svg = f.querySelector('svg'), box = svg.getBoundingClientRect();
          return !(box.width > 100 && box.height > 50 && svg.querySelectorAll('path, use').length > 10
            && svg.getAttribute('aria-label') && f.querySelector('figcaption'));
        }).map(f => f.id)"""
    )
    assert bad == []
    assert page.locator("#experiment figure").count() >= 8
    exported = {p.stem for p in (experiment_file.parent / "report_figures").glob("x-*.svg")}
    assert {f"fig-{name}" for name in exported} == set(
        page.evaluate("[...document.querySelectorAll('#experiment figure')].map(f => f.id)")
    )


def test_ids_links_names_and_headings(open_page, experiment_file):
    page = open_page(path=experiment_file).page
    hashes = page.evaluate("[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.hash.slice(1))")
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert set(hashes) <= set(ids)
    assert len(ids) == len(set(ids))
    names = page.evaluate("[...document.querySelectorAll('.table')].map(t => t.dataset.name)")
    assert len(names) == len(set(names))
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_legible(open_page, experiment_file, scheme):
    page = open_page(390, path=experiment_file, color_scheme=scheme).page
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CONTRAST) == []


def test_its_tables_sort(open_page, experiment_file):
    page = open_page(path=experiment_file).page
    for column in page.evaluate(CLICK_THROUGH):
        (_, rising), (_, falling), _ = column["turns"]
        assert_sorted(rising, falling=False)
        assert_sorted(falling, falling=True)
        assert column["restored"]
