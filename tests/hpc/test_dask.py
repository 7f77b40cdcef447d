"""Preprocessing by dask workers of Slurm on two nodes, in the image: within one job, and as jobs of their own."""

import hashlib
import json
import os
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hpc.bed import PACKAGE, wait_until

PATIENCE = 900  # seconds: a quarter of a minute for each start of Python on two busy cores
WORKERS = """\
import json
from dask.distributed import Client
with Client(scheduler_file="scheduler.json") as client:
    done = client.run(lambda dask_worker: [dask_worker.name, dask_worker.state.transition_counter])
    json.dump(list(done.values()), open("workers.json", "w"))
"""


def files_of(folder: Path) -> dict[str, str]:
    """Digest of each file, but for the record of how it was made."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.json"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def plate(path: Path, seed: int) -> None:
    """Counts of 400 cells and 300 genes; a file is at least one task of each pass."""
    rng = np.random.default_rng(seed)
    labels = {"perturbation": ["control", "A", "B", "C"], "cell_type": ["T", "B"], "batch": [f"plate{seed}"]}
    obs = pd.DataFrame({name: rng.choice(values, 400) for name, values in labels.items()})
    obs.index = [f"cell{seed}-{k}" for k in range(400)]
    var = pd.DataFrame(index=[f"GENE{k}" for k in range(300)])
    counts = sp.csr_matrix(rng.poisson(rng.gamma(1, 1, 300), (400, 300)).astype(np.float32))
    ad.AnnData(counts, obs, var).write_h5ad(path)


SLURM = [
    *(f"/usr/bin/{name}" for name in ("sbatch", "scancel")),
    *(
        "/usr/lib/x86_64-linux-gnu/slurm-wlm",
        "/usr/lib/x86_64-linux-gnu/libmunge.so.2",
        "/etc/slurm",
        "/run/munge",
    ),
]
"""What `sbatch` in an image of the same Debian needs of the host."""


@pytest.mark.slow
def test_workers_that_are_jobs_of_their_own_write_what_one_process_writes(bed, workflow):
    """--dask-scheduler slurm:2, where no job fits beside another on one node."""
    source = f"--bind {bed.site / 'perturbdiff'}:{PACKAGE}" if os.environ.get("PD_TEST_SOURCE") else ""
    inside = f"apptainer exec --no-home --bind {workflow.folder} {source}"
    for seed in range(6):
        plate(workflow.folder / f"plate{seed}.h5ad", seed)
    bed.account.give(workflow.folder)
    job = {
        "CORES": "1", "MEMORY": "100GB", "WALLTIME": "00:20:00", "QUEUE": "cpu",
        "PYTHON": f"{inside} {bed.image} python",
        "JOB_SCRIPT_PROLOGUE": "['echo $SLURMD_NODENAME >> nodes', 'squeue -h -j $SLURM_JOB_ID -o %j >> names']",
    }  # fmt: skip
    env = {f"DASK_JOBQUEUE__SLURM__{name}": value for name, value in job.items()}
    client = f"{inside} --bind {','.join(SLURM)} {bed.image} perturbdiff preprocess"
    given = "--config tiny --set data.num_hvgs=100"
    plates = [f"plate{seed}.h5ad" for seed in range(6)]
    for out, how in (("alone", "--jobs 1"), ("spread", "--dask-scheduler slurm:2")):
        words = f"{client} {' '.join(plates)} {given} --out {out} {how}".split()
        done = bed.account.run(*words, cwd=workflow.folder, env=env, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
    assert sorted((workflow.folder / "nodes").read_text().split()) == ["node1", "node2"]
    assert set((workflow.folder / "names").read_text().split()) == {"dask-worker"}
    wait_until(lambda: not workflow.queue(), 60, "the jobs of the workers go on")
    assert not list(workflow.folder.glob(".workers-*"))
    alone, spread = (files_of(workflow.folder / name) for name in ("alone", "spread"))
    assert len(alone) > 5
    assert spread == alone


@pytest.mark.slow
def test_workers_on_two_nodes_write_what_one_process_writes(bed, workflow):
    source = f"--bind {bed.site / 'perturbdiff'}:{PACKAGE}" if os.environ.get("PD_TEST_SOURCE") else ""
    inside = f"apptainer exec --no-home --bind {workflow.folder} {source} {bed.image}"
    for seed in range(6):
        plate(workflow.folder / f"plate{seed}.h5ad", seed)
    bed.account.give(workflow.folder)
    workflow.write("workers.py", WORKERS)
    given = "preprocess plate*.h5ad --config tiny --set data.num_hvgs=100"
    workflow.write("job.sh", f"""\
set -eu
{inside} perturbdiff {given} --out alone --jobs 1
{inside} dask scheduler --port 0 --scheduler-file scheduler.json --no-dashboard &
scheduler=$!
trap 'kill $scheduler' EXIT
until [ -s scheduler.json ]; do kill -0 $scheduler; sleep 1; done
srun --overlap bash -c 'exec {inside} dask worker --scheduler-file scheduler.json --nthreads 1 --no-dashboard \
    --name $SLURMD_NODENAME' &
{inside} python -c 'from dask.distributed import Client
Client(scheduler_file="scheduler.json").wait_for_workers(2, timeout=600)'
{inside} perturbdiff {given} --out spread \
    --dask-scheduler "$({inside} python -c 'import json; print(json.load(open("scheduler.json"))["address"])')"
{inside} python workers.py
""")  # fmt: skip
    options = (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=4000",
        "--time=30",
        "--partition=cpu",
    )
    ended = workflow.folder / "code"
    bed.sbatch("bash job.sh > said 2>&1; echo $? > code; scancel $SLURM_JOB_ID", workflow.folder, *options)
    wait_until(ended.exists, PATIENCE, lambda: (workflow.folder / "said").read_text())
    assert ended.read_text().strip() == "0", (workflow.folder / "said").read_text()[-4000:]
    done = json.loads((workflow.folder / "workers.json").read_text())
    assert {name for name, count in done if count} == {"node1", "node2"}, done
    alone, spread = (files_of(workflow.folder / name) for name in ("alone", "spread"))
    assert len(alone) > 5
    assert spread == alone
