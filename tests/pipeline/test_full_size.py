"""The full-size experiments pass the workflow's own checks and are planned whole, with empty files as data."""

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "assets" / "experiments"
FULL_SIZE = sorted(path.stem for path in EXPERIMENTS.glob("*.yml") if "gpu_hours" in path.read_text())


def rows_of(name: str) -> list[dict[str, str]]:
    with (EXPERIMENTS / f"{name}.csv").open() as handle:
        return list(csv.DictReader(handle))


def inputs_of(rows: list[dict[str, str]]) -> set[str]:
    """Files that a sheet names relative to the launch folder."""
    named = {part for row in rows for part in re.split(r"[|;]", row["input"])}
    named |= {row["genes"] for row in rows if row.get("genes")}
    return {name for name in named if name.startswith("data/")}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_files_of_a_full_size_sheet_are_those_of_the_page(name):
    page = (ROOT / "docs" / "reproduce.md").read_text()
    assert f"| `{name}` |" in page
    for path in inputs_of(rows_of(name)):
        kind = re.sub(r"(\d+)\.h5ad", "", path).removeprefix("data/")
        assert kind in page, path


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_full_size_sheet_is_planned(nextflow, tmp_path, name):
    rows = rows_of(name)
    (tmp_path / "data").mkdir()
    for path in inputs_of(rows):
        (tmp_path / path).touch()
    ran = nextflow.run("-stub", "-preview", "--experiment", name)
    assert ran.code == 0, ran.output
    told = yaml.safe_load((EXPERIMENTS / f"{name}.yml").read_text())
    assert f"about {told['gpu_hours']} GPU hours" in ran.output
    with (ran.outdir / "pipeline_info" / "design.csv").open() as handle:
        design = {row["method"]: row for row in csv.DictReader(handle)}
    for row in rows:
        if row["mode"] == "pretrain":
            continue
        assert design[row["id"]]["arm"] == row["arm"]
        assert design[row["id"]]["part"] == (row.get("part") or "test")
        assert design[row["id"]]["level"] == row.get("level", "")


def test_arms_of_the_main_comparison_are_the_papers_methods():
    with (ROOT / "assets" / "paper_results.csv").open() as handle:
        published = {(row["dataset"], row["method"]) for row in csv.DictReader(handle)}
    ours = {(row["dataset"], row["arm"]) for row in rows_of("main") if row["mode"] != "pretrain"}
    assert ours == published


def test_what_a_sheet_repeats_of_another_is_equal():
    """So that -resume trains once what `fewshot` and `fewshot-steps` have in common."""
    fewshot, steps = ({row["id"]: row for row in rows_of(name)} for name in ("fewshot", "fewshot-steps"))
    common = [name for name, row in steps.items() if row["mode"] != "sample"]
    assert len(common) == 5
    for name in common:
        here, there = (
            {k: v for k, v in table[name].items() if k not in ("arm", "level", "step")}
            for table in (fewshot, steps)
        )
        assert here == there


def test_the_prior_is_the_same_wherever_it_is_trained():
    priors = {
        json.dumps({k: v for k, v in row.items() if v})
        for name in FULL_SIZE
        for row in rows_of(name)
        if row["mode"] == "pretrain"
    }
    assert len(priors) == 1
