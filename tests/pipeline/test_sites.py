"""The three sites of docs/cluster-sites.md: what reaches sbatch, seen by one that runs the stub in the job's place."""

import shutil
from pathlib import Path

import pytest
import yaml

SITES = Path(__file__).parents[2] / "assets" / "sites"
SHEET = "id,dataset,input,preset,mode\nmodel,kang,kang.h5ad,tiny,train\n"
# in a job's folder: the task's script without its wrapper and container, and what Nextflow waits for
SBATCH = """#!/bin/bash
[ "$1" != --test-only ] || { cat > /dev/null; exit 0; }
touch .command.begin
bash -e .command.sh > .command.out 2> .command.err; echo -n $? > .exitcode
echo "Submitted batch job $$"
"""
FAST = "includeConfig '{site}'\nexecutor {{ pollInterval = '1 sec'; submitRateLimit = '9/1sec' }}\n"
COMMON = ("-J", "-o", "--no-requeue", "--signal")


def at_site(nextflow, folder: Path, name: str, profile: str, monkeypatch) -> dict[str, list[str]]:
    """Run the stub with a site's file, and return the directives of each process that reach sbatch."""
    tools = folder / "tools"
    tools.mkdir()
    for program, script in (("sbatch", SBATCH), ("squeue", "#!/bin/sh\n"), ("sinfo", "#!/bin/sh\n")):
        (tools / program).write_text(script)
        (tools / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    (folder / "sheet.csv").write_text(SHEET)
    (folder / "kang.h5ad").touch()
    (folder / "perturbdiff.sif").write_text("#!/usr/bin/env run-singularity\nSIF_MAGIC")
    shutil.copy(SITES / f"{name}.yml", folder)
    settings = yaml.safe_load((SITES / f"{name}.yml").read_text())
    own = SITES / settings["site_config"] if "site_config" in settings else Path("/dev/null")
    (folder / "fast.config").write_text(FAST.format(site=own))
    fixed = (
        "run",
        str(SITES.parents[1] / "main.nf"),
        "-stub",
        "-profile",
        f"{profile},site",
        "--outdir",
        "out",
    )
    rest = ("-params-file", f"{name}.yml", "--site_config", "fast.config", "--input", "sheet.csv")
    ran = nextflow(*fixed, *rest, "--baselines", "none", "--ceiling", "false")
    assert ran.code == 0, ran.output
    found = {}
    for task in ran.tasks():
        assert task["status"] == "COMPLETED"
        lines = (Path(task["workdir"]) / ".command.run").read_text().splitlines()
        given = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
        found[task["name"].split(":")[-1].split(" ")[0]] = [g for g in given if not g.startswith(COMMON)]
    return found


def test_a_university_cluster(nextflow, tmp_path, monkeypatch):
    found = at_site(nextflow, tmp_path, "university", "slurm", monkeypatch)
    small = ["-t 02:00:00", "--mem 8192M", "-p compute", "--account=my_group"]
    assert found["SPLIT"] == small
    assert found["EVALUATE"] == ["-c 4", "-t 12:00:00", "--mem 32768M", "-p compute", "--account=my_group"]
    on_gpus = ["-c 8", "-t 24:00:00", "--mem 65536M", "-p gpu", "--account=my_group --gres=gpu:a100:1"]
    assert found["TRAIN"] == on_gpus
    assert found["SAMPLE"] == [on_gpus[0], "-t 12:00:00", *on_gpus[2:]]
    wrapper = next((tmp_path / "work").glob("*/*/.command.run")).read_text()
    assert "apptainer exec" in wrapper


def test_a_centre_without_partitions(nextflow, tmp_path, monkeypatch):
    found = at_site(nextflow, tmp_path, "centre", "slurm", monkeypatch)
    account = "--account=project-0123"
    assert found["PREPROCESS"] == ["-c 4", "-t 24:00:00", "--mem-per-cpu 32768M", f"{account} --qos=standard"]
    options = f"{account} --gpus-per-node=1 --constraint=a100 --qos=gpu"
    assert found["TRAIN"] == ["-c 8", "-t 12:00:00", "--mem-per-cpu 8192M", options]


def test_left_over_gpus_of_several_nodes(nextflow, tmp_path, monkeypatch):
    found = at_site(nextflow, tmp_path, "preemptible", "slurm,multinode", monkeypatch)
    assert found["EVALUATE"][-1:] == ["-p short"]
    given = ["-c 32", "-t 04:00:00", "--mem 204800M", "-p preempt"]
    assert found["TRAIN"] == [*given, "--gres=gpu:4 --nodes=2 --ntasks-per-node=1"]


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yml")), ids=lambda path: path.stem)
def test_each_site_is_in_the_documentation(path):
    page = (SITES.parents[1] / "docs" / "cluster-sites.md").read_text()
    assert path.read_text() in page, f"docs/cluster-sites.md shows assets/sites/{path.name} as it is"
