"""bin/pd-launch, with stand-ins for what it starts: each says how it was called."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[3] / "bin" / "pd-launch"
SAY = '#!/bin/bash\necho "$(basename "$0")" "$@"\n'
NODES = {"PD_GPUS": "2", "PD_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]"}


@pytest.fixture
def run(tmp_path):
    programs, work = tmp_path / "programs", tmp_path / "work"
    programs.mkdir()
    work.mkdir()
    fakes = {
        "perturbdiff": SAY,
        "python": SAY,
        "scontrol": "#!/bin/bash\nprintf 'a1\\na2\\n'\n",
        # options up to the program, then that program once, as on the first node
        "srun": SAY + 'while [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n',
        "apptainer": SAY + 'env | grep -E "^APPTAINERENV_" | sort\nexit 75\n',
    }
    for name, text in fakes.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def start(*arguments, **env):
        given = {"PATH": f"{programs}:{os.environ['PATH']}", **env}
        return subprocess.run(
            ["bash", LAUNCH, *arguments], cwd=work, env=given, capture_output=True, text=True, check=False
        )

    start.work = work
    return start


@pytest.mark.parametrize("gpus", ["0", "1"])
def test_one_process_is_the_command_itself(run, gpus):
    assert run("train", "a b", PD_GPUS=gpus).stdout == "perturbdiff train a b\n"


def test_several_processes_on_one_node(run):
    said = run("train", "store", PD_GPUS="3").stdout
    assert (
        said == "python -m perturbdiff.training.distributed.launcher --processes 3 perturbdiff train store\n"
    )
    assert run("--version", PD_GPUS="3").stdout == "perturbdiff --version\n"


def test_each_node_has_one_launcher(run):
    said = run("train", "store", SLURM_CPUS_PER_TASK="6", **NODES).stdout.splitlines()
    assert said[0].startswith(
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=6 --kill-on-bad-exit=1 "
    )
    assert said[1] == (
        "python -m perturbdiff.training.distributed.launcher --processes 2 --nodes 2 --node 0 --first a1:10007 "
        "perturbdiff train store"
    )


def test_a_port_in_use_is_left_alone(run):
    for job in range(20000):
        with socket.socket() as busy:
            try:
                busy.bind(("127.0.0.1", 10000 + job))
            except OSError:
                continue
            busy.listen()
            said = run("train", **{**NODES, "SLURM_JOB_ID": str(job)}).stdout
            break
    assert "--first a1:1" in said
    assert f"--first a1:{10000 + job} " not in said


def test_the_container_sees_what_links_lead_to_and_a_clean_environment(run, tmp_path):
    for name in ("real", "between"):
        (tmp_path / name).mkdir()
    (tmp_path / "real" / "store").mkdir()
    (tmp_path / "between" / "store").symlink_to("../real/store")
    (run.work / "store").symlink_to(tmp_path / "between" / "store")
    (run.work / "gone").symlink_to(tmp_path / "nowhere")
    ran = run("train", "store", PD_IMAGE="/x.sif", PD_BIND="/ckpt", NCCL_DEBUG="INFO", SECRET="1", **NODES)
    assert ran.returncode == 75
    line = next(line for line in ran.stdout.splitlines() if line.startswith("apptainer exec"))
    words = line.split()
    binds = words[words.index("--bind") + 1].split(",")
    assert set(binds) == {
        str(run.work), str(tmp_path / "between" / "store"), str(tmp_path / "real" / "store"), "/ckpt",
    }  # fmt: skip
    assert "--cleanenv" in words
    assert words[words.index("--bind") + 2 :][:3] == ["/x.sif", "python", "-m"]
    assert "APPTAINERENV_NCCL_DEBUG=INFO" in ran.stdout
    assert "APPTAINERENV_SLURM_NODEID=0" in ran.stdout
    assert "SECRET" not in ran.stdout


def test_a_name_that_cannot_be_bound_is_refused(run, tmp_path):
    (tmp_path / "a,b").mkdir()
    (run.work / "store").symlink_to(tmp_path / "a,b")
    ran = run("train", "store", PD_IMAGE="/x.sif", **NODES)
    assert ran.returncode == 2
    assert "a,b: Apptainer cannot bind" in ran.stderr
    assert "apptainer" not in ran.stdout


def test_several_nodes_need_a_job(run):
    ran = run("train", PD_NODES="2")
    assert ran.returncode
    assert "several nodes need a Slurm job" in ran.stderr
