"""What fails or is killed outside of training: what was done is kept, and -resume does the rest."""

import os
import shutil
import signal

import pytest
from hpc.bed import PACKAGE, SITE, wait_until
from hpc.faults import FIXED, PATIENCE, SCREEN, continued_at, processes, send, sheet

LEARNING = "train.max_steps=300;train.valid_every=100;train.checkpoint_every=10"
TRAINED = (
    f"model,screen,simulate:tiny,tiny,train,{SCREEN};split.num_held_out=1;split.train_fraction=0.3;{LEARNING}"
)


def train_undisturbed(workflow, ran, task) -> None:
    """Train as a task did, in the same image, without workflow and cluster; into ``calm``."""
    folder = workflow.folder
    shutil.copy(f"{task['workdir']}/recipe.yaml", folder / "recipe.yaml")
    (store,), (split,) = (ran.outdir / "stores").iterdir(), (ran.outdir / "splits").glob("*.parquet")
    binds = [folder] + (
        [f"{workflow.bed.site / 'perturbdiff'}:{PACKAGE}"] if os.environ.get("PD_TEST_SOURCE") else []
    )
    done = workflow.bed.account.run(
        *("apptainer", "exec", "--no-home", "--bind", ",".join(map(str, binds)), workflow.bed.image),
        *("perturbdiff", "train", store, "--split", split, "--out", "calm", "--config", "recipe.yaml"),
        *("--seed", "0", "--device", "cpu"),
        cwd=folder,
        env={f"APPTAINERENV_{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")},
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_killed_head_and_a_failed_evaluation_are_made_good(workflow):
    given = ("--input", sheet(workflow, TRAINED), *FIXED)
    first = workflow.start(*given)
    workflow.job("TRAIN")
    wait_until(
        lambda: list((workflow.folder / "checkpoints").glob("*/last.ckpt")), PATIENCE, first.output, every=0.1
    )
    first.kill()
    assert [job.name for job in workflow.queue() if "TRAIN" in job.name], "its job lives on"
    workflow.bed.cancel(workflow.folder)  # as docs/cluster-faults.md says

    # the head goes on, and every node on which a prediction is scored is broken
    site = workflow.write(
        "site.config",
        SITE + "process { withName: EVALUATE { beforeScript = 'echo no such disk >&2; exit 1' } }\n",
    )
    broken = workflow.run(*given, timeout=PATIENCE)
    assert broken.code != 0
    assert "EVALUATE (model.metrics) (exit 1): no such disk" in broken.output
    assert {task["name"].split(" ")[0] for task in broken.tasks() if task["status"] == "CACHED"} >= {
        "PREPROCESS",
        "SPLIT",
    }
    (train,) = broken.attempts("TRAIN (model)")
    assert continued_at(broken, train) >= 10

    site.write_text(SITE)
    mended = workflow.run(*given, timeout=PATIENCE)
    assert mended.code == 0, mended.output
    assert mended.ran() == ["EVALUATE (model.metrics)", "REPORT"]
    assert (mended.outdir / "report.html").exists()
    train_undisturbed(workflow, mended, train)
    for name in ("model.safetensors", "training.csv"):
        ours, theirs = (
            folder / name for folder in (mended.outdir / "models" / "model", workflow.folder / "calm")
        )
        assert ours.read_bytes() == theirs.read_bytes(), name


@pytest.mark.slow
def test_a_stage_is_killed_and_cancelled_and_gets_more_memory(workflow):
    # as much as a job may ask for: the next attempt asks for more
    workflow.write("site.config", SITE.replace("memory: 3.GB", "memory: 100.GB"))
    row = f"base,screen,simulate:tiny,tiny,pretrain,{SCREEN};train.max_steps=1"
    head = workflow.start("--input", sheet(workflow, row), *FIXED)
    first = workflow.job("PREPROCESS")
    send(first, signal.SIGKILL)  # as the kernel does when memory runs out
    second = wait_until(
        lambda: [j for j in workflow.queue() if "PREPROCESS" in j.name and j.id != first.id and processes(j)],
        PATIENCE,
        head.output,
    )[0]
    workflow.bed.account.run("scancel", second.id)
    ran = head.wait(PATIENCE)
    assert ran.code == 0, ran.output
    (name,) = {task["name"] for task in ran.tasks() if "PREPROCESS" in task["name"]}
    attempts = ran.attempts(name)
    assert [task["exit"] for task in attempts] == ["137", "143", "0"]
    assert [task["memory"] for task in attempts] == ["32 GB", "64 GB", "96 GB"]
