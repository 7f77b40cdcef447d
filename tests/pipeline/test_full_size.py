"""The full-size experiments pass the workflow's own checks and are planned whole, with empty files as data."""

import csv
import json
import re
from pathlib import Path

import pytest

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
    assert f"| `{name}` |" in (ROOT / "docs" / "reproduce.md").read_text()
    page = (ROOT / "docs" / "reproduce-data.md").read_text()
    for path in inputs_of(rows_of(name)):
        kind = re.sub(r"(\d+)\.h5ad", "", path).removeprefix("data/")
        assert kind in page, path


def together(folder: Path) -> list[dict[str, str]]:
    """Write all sheets as one, each row's id after its experiment's name, and empty files as data; return the rows."""
    (folder / "data").mkdir()
    rows = []
    for name in FULL_SIZE:
        own = rows_of(name)
        ids = {row["id"] for row in own}
        for path in inputs_of(own):
            (folder / path).touch()
        for row in own:
            init = row.get("init", "")
            split = str((EXPERIMENTS / row["split"]).resolve()) if row["split"] else ""
            changed = {
                "id": f"{name}.{row['id']}",
                "split": split,
                "init": f"{name}.{init}" if init in ids else init,
            }
            rows.append(row | changed)
    with (folder / "sheet.csv").open("w", newline="") as handle:
        columns = list(dict.fromkeys(column for row in rows for column in row))
        writer = csv.DictWriter(handle, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_the_full_size_sheets_are_planned(nextflow, tmp_path):
    rows = together(tmp_path)
    ran = nextflow.run("-stub", "-preview", "--input", "sheet.csv", "--baselines", "control")
    assert ran.code == 0, ran.output
    with (ran.outdir / "pipeline_info" / "design.csv").open() as handle:
        lines = list(csv.DictReader(handle))
    design = {line["method"]: line for line in lines}
    for row in rows:
        if row["mode"] == "pretrain":
            continue
        line = design[row["id"]]
        assert (line["arm"], line["part"]) == (row["arm"], row.get("part") or "test")
        assert line["level"] == row.get("level", "")
        assert line["collection"].split(".")[0] == row["dataset"]
    units = {(line["dataset"], line["part"]) for line in lines}
    assert len(units) == 3 + 2, "one store and split for each data set, and validation of two"


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


@pytest.mark.parametrize("name", FULL_SIZE)
def test_no_two_runs_stand_for_the_same(name):
    """The report refuses them: a mean would count one twice."""
    places = [
        (row["dataset"], row.get("part", ""), row["arm"], row.get("level", ""), row["seed"])
        for row in rows_of(name)
        if row["mode"] != "pretrain"
    ]
    assert len(set(places)) == len(places)
