"""The paper's studies on the cluster, scaled down: from an empty folder and a server's files to the report."""

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import scaled_study
from hpc.test_pipeline import PATIENCE, check_every_task_was_a_job_in_the_image

MEANS = ("mean-perturbation", "mean-celltype", "mean-batch", "mean-overall")
STUDIES = {
    "main-replogle": (["replogle"], (), "control,nearest-context,resample", "Linear"),
    "main-pbmc": (["pbmc"], MEANS, "control", "Linear"),
    "main-tahoe": (["tahoe100m"], MEANS, "control", "Linear"),
    "main": (
        ["cellxgene", "pbmc", "tahoe100m", "replogle"],
        (*MEANS, "linear", "train"),
        "control",
        "control",
    ),
}
"""Data sets of each study, rows left out, baselines, and what the report compares with in place of STATE."""


@pytest.fixture
def study(workflow, request):
    """A study in an empty folder: its Nextflow's arguments and environment, while a server has its data."""
    name = request.param
    names, left_out, baselines, against = STUDIES[name]
    web = workflow.folder / "web"
    scaled_study.write_public_files(web, names)
    with scaled_study.serving(web) as address:
        scaled_study.scale_down(workflow.copy_site(), name, address, left_out=left_out)
        given = ("--experiment", name, "--fetch_dir", "data", "--baselines", baselines, "--against", against)
        yield lambda: workflow.run(*given, env={"HF_ENDPOINT": address}, timeout=2 * PATIENCE)


def scores(ran) -> dict[str, pd.Series]:
    """Metrics of all test cells of each table."""
    return {
        path.name.removesuffix(".metrics"): pd.read_csv(path / "aggregate.csv")
        .query("scope_kind == 'pooled'")
        .set_index("metric")["mean"]
        for path in Path(ran.outdir, "metrics").iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize("study", ["main-replogle"], indirect=True)
def test_a_study_is_one_command_from_the_public_file_to_the_report(study, workflow):
    ran = study()
    assert ran.code == 0, ran.output
    check_every_task_was_a_job_in_the_image(ran, workflow.bed)
    assert (workflow.folder / "data" / "replogle.h5ad.sum.json").is_file()
    once = Counter(task.split(" ")[0] for task in ran.ran())
    assert (once.pop("BASELINE"), once.pop("EVALUATE")) == (8, 9)
    assert set(once.values()) == {1}
    assert set(once) == {
        *(
            "FETCH",
            "CHECK",
            "VOCABULARY",
            "PREPROCESS",
            "SPLIT",
            "STATS",
            "TRAIN",
            "SAMPLE",
            "CALIBRATE",
            "CEILING",
        ),
        "REPORT",
    }
    found = scores(ran)
    assert len(found) == 10
    assert all(table[["R2", "MSE", "energy_distance"]].notna().all() for table in found.values())
    page = (ran.outdir / "report.txt").read_text()
    assert all(
        name in page for name in ("PerturbDiff (Scratch)", "Linear", "Mean Variant (per Batch)", "ceiling")
    )
    (counts,) = (ran.outdir / "statistics").glob("*/paper_counts.csv")
    assert pd.read_csv(counts).set_index("number").loc["training cells", "paper"] == 572_545
    (said,) = (ran.outdir / "pipeline_info").glob("replogle-*.check.txt")
    assert "the paper's table counts otherwise" in said.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("study", ["main-pbmc", "main-tahoe"], indirect=True)
def test_studies_of_other_screens_too(study, workflow):
    """Doubled symbols, a file in parts, labels with quotes and blanks."""
    ran = study()
    assert ran.code == 0, ran.output
    check_every_task_was_a_job_in_the_image(ran, workflow.bed)
    assert len(scores(ran)) == 4
    page = (ran.outdir / "report.txt").read_text()
    assert all(name in page for name in ("PerturbDiff (Scratch)", "Linear", "ceiling"))


@pytest.mark.slow
@pytest.mark.parametrize("study", ["main"], indirect=True)
def test_a_prior_of_all_data_is_finetuned_on_each_screen(study, workflow):
    """With the lists of genes that the study makes, and vectors of perturbations."""
    ran = study()
    assert ran.code == 0, ran.output
    check_every_task_was_a_job_in_the_image(ran, workflow.bed)
    ran_of = Counter(task.split(" ")[0] for task in ran.ran())
    assert {name: ran_of[name] for name in ("FETCH", "VOCABULARY", "VOCABULARY_OF_LISTS", "PRETRAIN", "FINETUNE")} == {
        "FETCH": 4, "VOCABULARY": 3, "VOCABULARY_OF_LISTS": 1, "PRETRAIN": 1, "FINETUNE": 3,
    }  # fmt: skip
    for name in ("pbmc", "tahoe100m", "replogle"):
        assert (ran.outdir / "models" / f"{name}-finetuned" / "embeddings" / "perturbation.npz").is_file()
    assert len(scores(ran)) == 3 * 3, "finetuned, control and ceiling of each"
    told = [pd.read_csv(path) for path in (ran.outdir / "statistics").glob("*/paper_counts.csv")]
    assert len(told) == 4 + 1, "four stores with the prior's genes, and Tahoe-100M with its own"
    shared = [table for table in told if "genes of the prior's list" in set(table["number"])]
    assert len(shared) == 4
    assert (ran.outdir / "report.txt").read_text().count("PerturbDiff (Finetuned)") >= 3
