"""The full-size experiments pass the workflow's own checks and are planned whole, without data."""

import csv
import json
from pathlib import Path

import pytest

from perturbdiff import datasets

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "assets" / "experiments"
FULL_SIZE = sorted(path.stem for path in EXPERIMENTS.glob("*.yml") if "gpu_hours" in path.read_text())


def rows_of(name: str) -> list[dict[str, str]]:
    with (EXPERIMENTS / f"{name}.csv").open() as handle:
        return list(csv.DictReader(handle))


def scored(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if row["mode"] not in ("pretrain", "vocabulary")]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_data_of_a_full_size_sheet_are_known_and_on_the_page(name):
    assert f"| `{name}` |" in (ROOT / "docs" / "reproduce.md").read_text()
    page = (ROOT / "docs" / "reproduce-data.md").read_text()
    for text in {part for row in rows_of(name) for part in row["input"].split("|")}:
        known = datasets.registered()[text.removeprefix("dataset:")]
        assert known.file.split("{")[0] in page, text


def together(folder: Path) -> list[dict[str, str]]:
    """Write all sheets as one, each row's id after its experiment's name; return the rows.

    Gene lists have one name in all sheets, as tasks of several executions share them by -resume.
    """
    rows = {}
    for name in FULL_SIZE:
        own = rows_of(name)
        ids = {row["id"] for row in own}
        for row in own:
            if row["mode"] == "vocabulary":
                assert rows.setdefault(row["id"], row) | row == rows[row["id"]] | row
                continue
            init = row.get("init", "")
            split = str((EXPERIMENTS / row["split"]).resolve()) if row.get("split") else ""
            changed = {
                "id": f"{name}.{row['id']}",
                "split": split,
                "init": f"{name}.{init}" if init in ids else init,
            }
            rows[changed["id"]] = row | changed
    with (folder / "sheet.csv").open("w", newline="") as handle:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        writer = csv.DictWriter(handle, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
    return list(rows.values())


def test_the_full_size_sheets_are_planned(nextflow, tmp_path):
    rows = together(tmp_path)
    ran = nextflow.run(
        "-stub", "-preview", "--input", "sheet.csv", "--baselines", "control", "--fetch_dir", "data"
    )
    assert ran.code == 0, ran.output
    with (ran.outdir / "pipeline_info" / "design.csv").open() as handle:
        lines = list(csv.DictReader(handle))
    design = {line["method"]: line for line in lines}
    for row in scored(rows):
        line = design[row["id"]]
        assert (line["arm"], line["part"]) == (row["arm"], row.get("part") or "test")
        assert line["level"] == row.get("level", "")
        assert line["collection"].split(".")[0] == row["dataset"]
    units = {(line["dataset"], line["part"]) for line in lines}
    assert len(units) == 3 + 2, "one comparison for each data set, and validation of two"


def test_a_study_goes_from_the_public_file_to_the_report(nextflow):
    nextflow.stand_ins = nextflow.folder / "nothing"
    ran = nextflow.run("-stub", "--experiment", "main-replogle", "--fetch_dir", "data", "--baselines", "none")
    assert ran.code == 0, ran.output
    names = [name.split(" ")[0] for name in ran.ran()]
    once = {name: names.count(name) for name in names if name not in ("BASELINE", "EVALUATE")}
    assert once == dict.fromkeys(
        ("FETCH", "CHECK", "VOCABULARY", "PREPROCESS", "SPLIT", "STATS", "TRAIN", "SAMPLE", "EXTERNAL", "CALIBRATE",
         "CEILING", "REPORT"), 1,
    )  # fmt: skip
    assert (names.count("BASELINE"), names.count("EVALUATE")) == (5, 7)


@pytest.mark.parametrize("name", ["main-pbmc", "main-replogle", "main-tahoe"])
def test_main_has_the_rows_of_its_parts(name):
    """So that -resume computes them once."""

    def told(rows):
        return [{column: value for column, value in row.items() if value} for row in rows]

    whole = told(rows_of("main"))
    part = told(rows_of(name))
    assert all(row in whole for row in part)
    assert {row["mode"] for row in part} >= {"vocabulary", "train", "linear", "mean-perturbation", "state"}
    assert len({row["input"] for row in part}) == 1


def test_finetuned_models_with_the_priors_genes_are_scored_on_the_screens():
    for name in FULL_SIZE:
        rows = rows_of(name)
        wide = [row for row in rows if row["mode"] == "finetune" and row["transfer"] != "new-genes"]
        for row in wide:
            assert (row["genes"], row["score_genes"]) == ("prior-genes", f"{row['dataset']}-genes")


def test_arms_of_the_main_comparison_are_the_papers_methods():
    with (ROOT / "assets" / "paper_results.csv").open() as handle:
        published = {(row["dataset"], row["method"]) for row in csv.DictReader(handle)}
    ours = {(row["dataset"], row["arm"]) for row in scored(rows_of("main"))}
    assert ours == published


def test_what_a_sheet_repeats_of_another_is_equal():
    """So that -resume trains once what `fewshot` and `fewshot-steps` have in common."""
    fewshot, steps = ({row["id"]: row for row in rows_of(name)} for name in ("fewshot", "fewshot-steps"))
    common = [name for name, row in steps.items() if row["mode"] not in ("sample", "vocabulary")]
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
        if name != "zeroshot-epochs"  # trained for longer
        for row in rows_of(name)
        if row["mode"] == "pretrain"
    }
    assert len(priors) == 1


@pytest.mark.parametrize("name", FULL_SIZE)
def test_no_two_runs_stand_for_the_same(name):
    """The report refuses them: a mean would count one twice."""
    places = [
        (row["dataset"], row.get("part", ""), row["arm"], row.get("level", ""), row["seed"])
        for row in scored(rows_of(name))
    ]
    assert len(set(places)) == len(places)
