"""An input that is no samplesheet is one run, planned by ``perturbdiff init``."""

import csv
import shutil

import pytest
from messy_screens import missing_labels, nothing_known, tenx_folder


@pytest.fixture
def screen(tmp_path):
    """A messy file whose name a shell would take apart."""
    missing_labels(tmp_path)
    return shutil.move(
        tmp_path / "my.h5ad", tmp_path / "it's my schöner & touch made & `touch made` screen.h5ad"
    )


def test_one_file_is_one_run_with_the_guesses_of_init(nextflow, screen):
    ran = nextflow.run("-stub", "--input", screen, "--baselines", "control")
    assert ran.code == 0, ran.output
    for said in ("one run of it's my", "control: control", "are dropped", "held out: its 3 perturbations"):
        assert said in ran.output
    names = [name.split(" ")[0] for name in ran.ran()]
    assert sorted(set(names)) == [
        *(
            "BASELINE",
            "CALIBRATE",
            "CEILING",
            "EVALUATE",
            "PREPROCESS",
            "REPORT",
            "SAMPLE",
            "SPLIT",
            "STATS",
            "TRAIN",
        )
    ]
    assert not list(ran.folder.rglob("made"))
    plan = ran.outdir / "plan"
    assert "missing_labels: drop" in (plan / "recipe.yaml").read_text()
    again = nextflow.run("-stub", "--input", plan / "samplesheet.csv", "--baselines", "control", "-resume")
    assert again.ran() == [], f"the sheet is the same run: {again.output}"


def test_labels_may_come_in_a_table_beside_the_file(questions, tmp_path):
    """As a cell of the sheet's column ``obs``, which test_rows.py follows to the command."""
    place, _, table = tenx_folder(tmp_path)
    questions.plan(tmp_path, input=str(place), obs=str(table))
    sheet = tmp_path / "out" / "plan" / "samplesheet.csv"
    with sheet.open() as handle:
        (row,) = csv.DictReader(handle)
    assert row["obs"] == str(table)
    wrong = questions.refusal(tmp_path, input=str(sheet), obs=str(table))
    assert "--obs: is for one file of counts" in wrong


def test_what_is_missing_is_told_before_any_task(questions, tmp_path):
    (path,) = nothing_known(tmp_path)
    told = questions.refusal(tmp_path, input=path)
    assert "the cells have no labels" in told
    assert "--obs TABLE.csv" in told
    assert not (tmp_path / "out").exists()
