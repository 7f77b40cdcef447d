"""The workflow on a cluster: job arrays, parts that are the whole, one place for logs, refusals by Slurm itself."""

import json
import os
import re
import subprocess

import pytest

SCREEN = "split.num_held_out=1;split.train_fraction=0.3;simulate.cells=900;simulate.genes=120"
PATIENCE = 1500


def sheet(workflow, more: str = ""):
    row = f"model,screen,simulate:tiny,tiny,train,{SCREEN}{more}"
    return workflow.write("sheet.csv", f"id,dataset,input,preset,mode,overrides\n{row}\n")


@pytest.fixture(scope="module")
def spread(workflow_in):
    """A finished run whose sampling and evaluation are spread over tasks, with its arguments, and where it ran."""
    workflow = workflow_in("spread")
    given = (
        "--input",
        sheet(workflow, ";sample.sets_per_batch=1"),
        "--baselines",
        "none",
        "--ceiling",
        "false",
    )
    given += ("--evaluation_shards", "2")
    return workflow, given, workflow.run(*given, "--sample_shards", "3", timeout=PATIENCE)


@pytest.mark.slow
class TestSpread:
    """A run in parts."""

    def test_parts_are_members_of_one_array(self, spread):
        _, _, ran = spread
        assert ran.code == 0, ran.output
        for process, number in (("SAMPLE", 3), ("EVALUATE", 2)):
            jobs = [task["native_id"] for task in ran.tasks() if task["name"].startswith(process)]
            assert len({job.split("_")[0] for job in jobs}) == 1, jobs
            assert sorted(job.split("_")[1] for job in jobs) == [str(i) for i in range(number)]

    def test_each_task_has_its_log_in_one_place(self, spread):
        workflow, _, ran = spread
        logs = {path.name: path.read_text() for path in (ran.outdir / "logs").iterdir()}
        tags = [task["name"].replace(" (", ".").rstrip(")") for task in ran.tasks()]
        assert set(logs) == {f"{tag}.log" for tag in tags}
        assert re.search(r"step.*\d+", logs["TRAIN.model.log"])
        assert all(text.strip() for text in logs.values()), [name for name, text in logs.items() if not text]
        assert {path.stat().st_uid for path in (ran.outdir / "logs").iterdir()} == {workflow.bed.account.uid}

    def test_the_image_is_on_record(self, spread):
        workflow, _, ran = spread
        (path,) = (ran.outdir / "pipeline_info").glob("run_*.json")
        record = json.loads(path.read_text())
        digest = subprocess.run(["sha256sum", workflow.bed.image], capture_output=True, text=True, check=True)
        assert record["image"]["id"] == f"sha256:{digest.stdout.split()[0]}"
        assert record["parameters"]["sample_shards"] == 3
        inside = json.loads((ran.outdir / "predictions" / "model.h5ad.run.json").read_text())
        assert inside["image"]["id"] == record["image"]["id"]

    def test_one_task_on_a_nodes_own_disk_makes_the_same_and_nothing_is_scored_again(self, spread):
        workflow, given, ran = spread
        path = ran.outdir / "predictions" / "model.h5ad"
        parts = path.read_bytes(), path.with_name("model.h5ad.manifest.json").read_bytes()
        alone = workflow.run(*given, "--scratch", "/tmp", "-resume", timeout=PATIENCE)
        assert alone.code == 0, alone.output
        # the report tells how long the sampling took, which is another record now
        assert alone.ran() == ["REPORT", "SAMPLE (model)"]
        (task,) = alone.attempts("SAMPLE (model)")
        assert "nxf_mktemp /tmp" in alone.said(task, ".command.run")
        assert re.fullmatch(r"\d+", task["native_id"]), "no array"
        assert (path.read_bytes(), path.with_name("model.h5ad.manifest.json").read_bytes()) == parts


def test_what_slurm_refuses_is_told_before_any_job(workflow):
    given = ("--input", sheet(workflow), "-preview", "--cpu_queue", "nowhere", "--gpu_queue", "gpu")
    ran = workflow.run(*given, "--gpu_options=--gres=gpu:99")
    assert ran.code != 0
    assert re.search(r"PREPROCESS.*: invalid partition specified: nowhere.*: change --cpu_queue", ran.output)
    assert re.search(
        r"TRAIN.*: Requested node configuration is not available: change --gpu_options", ran.output
    )
    assert "-p gpu --gres=gpu:99" in ran.output
    assert not (ran.outdir / "logs").exists()
    assert not workflow.queue()


@pytest.fixture
def short(bed):
    """A partition with a limit of ten minutes, which Slurm as it is set up here does not enforce at submission."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a partition with a time limit")
    name = f"short{os.getpid()}"
    subprocess.run(
        ["scontrol", "create", f"PartitionName={name}", "Nodes=ALL", "MaxTime=10", "State=UP"], check=True
    )
    yield name
    subprocess.run(["scontrol", "delete", f"PartitionName={name}"], check=True)


def test_a_time_above_the_partitions_limit_is_told_before_any_job(workflow, short):
    given = ("--input", sheet(workflow), "-preview", "--gpu_queue", short)
    ran = workflow.run(*given, "--train_time", "11m")
    assert ran.code != 0
    assert re.search(
        rf"TRAIN.*: time limit 11m is above that of partition {short}, 10m: change --train_time", ran.output
    )
    limited = "process.resourceLimits = [cpus: 1, memory: 3.GB, time: 10.m]"
    workflow.write("site.config", limited)
    assert workflow.run(*given, "--train_time", "11m").code == 0, "the site's limits hold for what is asked"


SBATCH = """#!/bin/bash
[[ $* == *--test-only* ]] && exec /usr/bin/sbatch "$@"
echo x >> {count}
[ $(wc -l < {count}) -gt 2 ] && exec /usr/bin/sbatch "$@"
echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)' >&2
exit 1
"""


def test_a_controller_that_is_away_for_a_moment_costs_no_run(workflow):
    (workflow.folder / "bin").mkdir()
    program = workflow.write("bin/sbatch", SBATCH.format(count=workflow.folder / "count"))
    program.chmod(0o755)
    plain = workflow.environment("v2")
    workflow.environment = lambda parser: plain | {"PATH": f"{program.parent}:/usr/local/bin:/usr/bin:/bin"}
    config = workflow.folder / "site.config"
    workflow.write("site.config", config.read_text() + "executor.retry.delay = '1 sec'\n")
    ran = workflow.run("--input", sheet(workflow), "-stub", "--baselines", "none", timeout=600)
    assert ran.code == 0, ran.output
    assert ran.output.count("Unable to contact slurm controller") == 2
    assert {task["status"] for task in ran.tasks()} == {"COMPLETED"}
    assert {task["attempt"] for task in ran.tasks()} == {"1"}
