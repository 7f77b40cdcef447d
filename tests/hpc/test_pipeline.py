"""From raw counts to a report on the cluster, in the image, as an ordinary user; and what -resume repeats."""

import json
import math
import re
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from messy_screens import missing_labels
from published import published

HEADER = "id,dataset,input,preset,mode,init,overrides,seed"
SCREEN = "split.num_held_out=1;split.train_fraction=0.3;simulate.genes=120"
SHORT = "model.width=32;train.max_steps=60;train.valid_every=60;train.valid_sets=4;sample.num_steps=5"
EVERYTHING = {
    "PREPROCESS",
    "SPLIT",
    "STATS",
    "TRAIN",
    "SAMPLE",
    "BASELINE",
    "EVALUATE",
    "CALIBRATE",
    "CEILING",
    "REPORT",
}
OUTPUTS = {"stores", "splits", "models", "predictions", "metrics"}
PATIENCE = 1500  # seconds: two minutes on two idle cores, and other tests may want them


def sheet(workflow, *rows: str) -> Path:
    return workflow.write("sheet.csv", "\n".join([HEADER, *rows]) + "\n")


def check_every_task_was_a_job_in_the_image(ran, bed) -> None:
    """By what Nextflow recorded, and by what the tasks themselves say from inside; FETCH runs where Nextflow does."""
    assert ran.outdir.stat().st_uid == bed.account.uid != 0, "an ordinary user"
    tasks = [task for task in ran.tasks() if not task["name"].startswith("FETCH")]
    jobs = [task["native_id"] for task in tasks]
    assert all(re.fullmatch(r"\d+(_\d+)?", job) for job in jobs), jobs
    assert len(set(jobs)) == len(jobs)
    for task in tasks:
        wrapper = ran.said(task, ".command.run")
        assert re.search(rf"apptainer exec .*{re.escape(str(bed.image))}", wrapper), task["name"]
        label = task["process"].split(":")[-1] + (f".{task['tag']}" if task["tag"] != "-" else "")
        # a member of a job array has another number inside
        number = r"\d+" if "_" in task["native_id"] else task["native_id"]
        log = (ran.outdir / "logs" / f"{label}.log").read_text()
        assert re.search(rf"Slurm job {number}: perturbdiff [\s\S]* exit code 0", log), log
    records = [path for folder in OUTPUTS for path in (ran.outdir / folder).rglob("*run.json")]
    assert {path.relative_to(ran.outdir).parts[0] for path in records} == OUTPUTS
    for path in records:
        record = json.loads(path.read_text())
        assert record["image"]["name"] == bed.image.name, path
        assert record["command"].startswith("perturbdiff "), path


def pooled(ran, method: str) -> pd.Series:
    """Metrics of all test cells of the only data set."""
    (path,) = (ran.outdir / "metrics").glob(f"*{method}.metrics")
    table = pd.read_csv(path / "aggregate.csv").query("scope_kind == 'pooled'")
    return table.set_index("metric")["mean"]


@pytest.mark.slow
def test_a_published_screen_becomes_a_report_with_the_slurm_profile_alone(workflow):
    screen = workflow.write("screen.h5ad", published("papalexi21").read_bytes())
    row = f"knockouts,papalexi,{screen},papalexi21,train,,{SHORT},0"
    given = ("--input", sheet(workflow, row), "--baselines", "control,mean-perturbation")
    ran = workflow.run(*given, "--train_cpus", "2", profile="slurm", timeout=PATIENCE)
    assert ran.code == 0, ran.output
    assert set(ran.processes()) == EVERYTHING
    check_every_task_was_a_job_in_the_image(ran, workflow.bed)
    report = (ran.outdir / "report.txt").read_text()
    names = ("knockouts", "control", "mean-perturbation", "ceiling")
    assert all(name in report for name in names)
    scores = {name: pooled(ran, name) for name in names}
    assert all(score["R2"] > 0.9 for score in scores.values())
    # 60 steps are enough, because cells start from controls that other replicates' changes have moved
    # the control's value is the data's: control cells stand for their whole pool (drawn at random they are at 0.0995)
    distance, direction = (
        {name: scores[name][key] for name in scores} for key in ("energy_distance", "PDCorr")
    )
    assert distance["control"] == pytest.approx(0.0733, rel=0.02)
    assert distance["knockouts"] < distance["control"] / 2
    assert distance["ceiling"] < distance["control"] < distance["mean-perturbation"]
    assert direction["control"] < direction["knockouts"] < direction["ceiling"]


@pytest.mark.slow
def test_one_file_in_place_of_a_sheet_is_a_run_in_the_image(workflow):
    """Linked from another folder; the guesses are made in the image, too."""
    recipe = workflow.copy_site() / "perturbdiff" / "config" / "presets" / "recommended.yaml"
    recipe.write_text(re.sub(r"(max|min)_steps: !ours \d+", r"\1_steps: !ours 20", recipe.read_text()))
    elsewhere = workflow.bed.account.give(Path(tempfile.mkdtemp(dir=workflow.bed.folder)))
    missing_labels(elsewhere)
    workflow.bed.account.give(elsewhere)
    (workflow.folder / "my screen.h5ad").symlink_to(elsewhere / "my.h5ad")
    ran = workflow.run("--input", "my screen.h5ad", "--baselines", "control", timeout=PATIENCE)
    assert ran.code == 0, ran.output
    assert "one run of my screen.h5ad" in ran.output
    assert "are dropped" in ran.output
    assert set(ran.processes()) == EVERYTHING
    check_every_task_was_a_job_in_the_image(ran, workflow.bed)
    assert "control" in (ran.outdir / "report.txt").read_text()
    assert (ran.outdir / "plan" / "samplesheet.csv").is_file()


@pytest.fixture(scope="module")
def simulated(workflow_in):
    """A finished run on a simulated screen with its arguments, and where it ran."""
    workflow = workflow_in("simulated")
    rows = sheet(workflow, f"model,screen,simulate:tiny,tiny,train,,{SCREEN};simulate.cells=900,0")
    given = ("--input", rows, "--baselines", "control", "--evaluation_shards", "2")
    asked = ("--train_time", "31m", "--gpu_options", "--gres=gpu:1 --comment=mine")
    return workflow, given, workflow.run(*given, *asked, timeout=PATIENCE)


@pytest.mark.slow
class TestSimulated:
    """A run on a simulated screen, and what -resume repeats of it."""

    def test_a_simulated_screen_becomes_a_report(self, simulated):
        workflow, _, ran = simulated
        assert ran.code == 0, ran.output
        assert set(ran.processes()) == EVERYTHING | {"SIMULATE", "MERGE_METRICS"}
        check_every_task_was_a_job_in_the_image(ran, workflow.bed)
        report = (ran.outdir / "report.txt").read_text()
        assert all(name in report for name in ("model", "control", "ceiling"))
        assert all(math.isfinite(value) for value in pooled(ran, "model")[["R2", "MSE", "MAE"]])

    def test_jobs_are_submitted_with_their_settings(self, simulated):
        _, _, ran = simulated
        (train,) = ran.attempts("TRAIN (model)")
        job = ran.said(train, ".command.run")
        assert re.search(r"^#SBATCH --gres=gpu:1 --comment=mine$", job, re.MULTILINE)
        assert re.search(r"^#SBATCH -t 00:31:00$", job, re.MULTILINE)
        assert re.search(r"^#SBATCH --mem 3072M$", job, re.MULTILINE)
        assert "export PD_END_TIME=$(( $(date +%s) + 1860 ))" in job

    def test_resume_repeats_nothing_for_other_limits_and_partitions(self, simulated):
        workflow, given, first = simulated
        elsewhere = (
            "--cpu_queue=cpu --gpu_queue=gpu --num_gpus=2 --gpu_options=--gres=gpu:2 --cpu_options=--nice=5"
        )
        more = "--train_time=55m --train_cpus=3 --train_retries=3"
        for changed in ((), (*elsewhere.split(), *more.split(), "--train_memory", "2 GB")):
            again = workflow.run(*given, *changed, "-resume", timeout=PATIENCE)
            assert again.code == 0, again.output
            assert again.ran() == []
            assert {task["status"] for task in again.tasks()} == {"CACHED"}
            assert {task["name"] for task in again.tasks()} == {task["name"] for task in first.tasks()}

    def test_resume_with_another_guidance_repeats_sampling_and_what_follows(self, simulated):
        workflow, given, first = simulated
        row = f"model,screen,simulate:tiny,tiny,train,,{SCREEN};simulate.cells=900;sample.guidance=1.5,0"
        sheet(workflow, row)
        again = workflow.run(*given, "-resume", timeout=PATIENCE)
        assert again.code == 0, again.output
        assert again.processes() == {"EVALUATE": 2, "MERGE_METRICS": 1, "REPORT": 1, "SAMPLE": 1}
        assert all("model" in name for name in again.ran() if name != "REPORT")
        config = json.loads((first.outdir / "predictions" / "model.h5ad.manifest.json").read_text())["config"]
        assert "1.5" in json.dumps(config)


def small(name: str, cells: int, mode: str, more: str = "", init: str = "", seed: int = 0) -> str:
    data = name.split("-")[1]
    return f"{name},{data},simulate:tiny,tiny,{mode},{init},{SCREEN};simulate.cells={cells}{more},{seed}"


@pytest.fixture(scope="module")
def rows() -> list[str]:
    """Two data sets, two recipes of which one starts from a common pretraining, two seeds; one row is wrong."""
    prior = "simulate.genes=120;a:simulate.cells=900;b:simulate.cells=800"
    return [
        f"prior,a|b,simulate:tiny|simulate:tiny,tiny,pretrain,,{prior},0",
        small("tuned-a", 900, "finetune", init="prior"),
        small("tuned-b", 800, "finetune", init="prior"),
        small("plain-a", 900, "train"),
        small("plain-b", 800, "train"),
        small("again-a", 900, "train", seed=1),
        small("wrong-b", 800, "train", ";train.precision=64-odd"),
    ]


@pytest.fixture(scope="module")
def experiment(workflow_in, rows):
    """A finished run of the sheet with its arguments, and where it ran."""
    workflow = workflow_in("experiment")
    given = ("--input", sheet(workflow, *rows), "--baselines", "none", "--ceiling", "false")
    return workflow, given, workflow.run(*given, timeout=PATIENCE)


@pytest.mark.slow
class TestExperiment:
    """A sheet of several runs, and what -resume repeats when it was edited."""

    def test_runs_of_a_sheet_share_what_they_can_and_one_that_fails_stops_no_other(self, experiment):
        _, _, ran = experiment
        once = {"SIMULATE": 2, "PREPROCESS": 2, "SPLIT": 2, "STATS": 2, "PRETRAIN": 1, "REPORT": 1}
        assert ran.processes() == once | {"FINETUNE": 2, "TRAIN": 3, "SAMPLE": 5, "EVALUATE": 5}, ran.output
        assert ran.code != 0, "a missing run shows in the exit code"
        assert re.search(r"TRAIN \(wrong-b\) \(exit 2\): .*train.precision", ran.output)
        report = (ran.outdir / "report.txt").read_text()
        compared = {"tuned-a", "tuned-b", "plain-a", "plain-b", "again-a"}
        assert set(re.findall(r"\b[a-z]+-[ab]\b", report)) == compared | {"wrong-b"}
        assert re.search(r"^wrong-b failed: .*train\.precision", report, re.MULTILINE), report

    def test_resume_after_the_sheet_was_edited_runs_what_is_new(self, experiment, rows):
        workflow, given, _ = experiment
        sheet(workflow, *rows[:-1], small("again-b", 800, "finetune", init="prior", seed=1))
        ran = workflow.run(*given, "-resume", timeout=PATIENCE)
        assert ran.code == 0, ran.output
        new = ["EVALUATE (again-b.metrics)", "FINETUNE (again-b)", "REPORT", "SAMPLE (again-b)"]
        assert ran.ran() == new
        assert "again-b" in (ran.outdir / "report.txt").read_text()
