"""An input that is no samplesheet is one run, planned by ``perturbdiff init``."""

import shutil

import anndata as ad
import pytest
from messy_screens import missing_labels, nothing_known


@pytest.fixture
def screen(tmp_path):
    """A messy file whose name has a space, a quote and a letter beyond ASCII."""
    missing_labels(tmp_path)
    return shutil.move(tmp_path / "my.h5ad", tmp_path / "it's my schöner screen.h5ad")


def test_one_file_is_one_run_with_the_guesses_of_init(nextflow, screen):
    ran = nextflow.run("-stub", "--input", screen, "--baselines", "control")
    assert ran.code == 0, ran.output
    for said in ("one run of it's my", "control: control", "are dropped", "held out: its 3 perturbations"):
        assert said in ran.output
    names = [name.split(" ")[0] for name in ran.ran()]
    assert sorted(set(names)) == [
        *("BASELINE", "CEILING", "EVALUATE", "PREPROCESS", "REPORT", "SAMPLE", "SPLIT", "STATS", "TRAIN")
    ]
    plan = ran.outdir / "plan"
    assert "missing_labels: drop" in (plan / "recipe.yaml").read_text()
    again = nextflow.run("-stub", "--input", plan / "samplesheet.csv", "--baselines", "control", "-resume")
    assert again.ran() == [], f"the sheet is the same run: {again.output}"


def test_what_is_missing_is_told_before_any_task(nextflow, tmp_path):
    (path,) = nothing_known(tmp_path)
    ran = nextflow.run("-stub", "--input", path)
    assert ran.code != 0
    assert "the cells have no labels" in ran.output
    assert "--obs TABLE.csv" in ran.output


def test_names_are_never_taken_as_commands(nextflow, tmp_path):
    missing_labels(tmp_path)
    evil = tmp_path / "a;touch made&b`touch made`.h5ad"
    shutil.move(tmp_path / "my.h5ad", evil)
    ran = nextflow.run("-stub", "--input", evil, "--baselines", "none")
    assert not list(tmp_path.rglob("made"))
    assert ran.code == 0, ran.output
    assert ad.read_h5ad(evil).n_obs > 0
