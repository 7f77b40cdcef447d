"""Whether dask workers write the store that one process writes, byte by byte, at a million cells and 20,000 genes.

    python benchmarks/same_bytes.py [--cells 1000000] [--genes 20000] [--workers 2] --folder DIR --out same_bytes.json

A cell has about 300 stored values (`full_transcriptome.py`), in four files; 2,000 genes are chosen. First the command
runs alone, then with the scheduler of a dask cluster on this machine, or with one that runs already, for instance on
the nodes of a Slurm job::

    sbatch --nodes=2 --ntasks-per-node=2 --mem-per-cpu=2G --wrap '
        dask scheduler --port 0 --scheduler-file DIR/scheduler.json --no-dashboard &
        srun --overlap dask worker --scheduler-file DIR/scheduler.json --nthreads 1 --memory-limit 2GiB --no-dashboard &
        python benchmarks/same_bytes.py --workers 4 --scheduler-file DIR/scheduler.json --folder DIR --out FILE'

Memory is the highest sum over the processes of the command, which has workers only if the cluster is its own. The files
of the two stores are compared, but for the record of how they were made.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from full_transcriptome import Design, simulate
from processes import Stopwatch, watch

FILES = 4
DENSITY = 0.015
COMMAND = [sys.executable, "-W", "ignore", "-m", "perturbdiff", "preprocess", "--config", "recommended"]


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file, but for the record of how it was made."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.json"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def spread(workers: int, scheduler_file: str | None, command: list[str]) -> None:
    """Run the command with a dask cluster, and say what each worker did."""
    from dask.distributed import Client, LocalCluster

    with contextlib.ExitStack() as stack:
        where: Any = {"scheduler_file": scheduler_file}
        if scheduler_file is None:
            own: Any = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="")
            where = {"address": stack.enter_context(own)}
        client: Any = stack.enter_context(Client(**where))
        client.wait_for_workers(workers, timeout=600)
        subprocess.run([*command, "--dask-scheduler", client.scheduler.address], check=True)
        print(json.dumps(list(client.run(of_worker).values())))


def of_worker(dask_worker: Any) -> dict[str, Any]:
    """Return a worker's node, its steps of tasks, CPU time (s) and largest memory (MiB)."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "steps": dask_worker.state.transition_counter,
        "cpu": spent.ru_utime + spent.ru_stime,
        "memory": spent.ru_maxrss / 1024,
    }


def measure(command: list[str], folder: Path) -> dict:
    """Run a command; return what it took and its last line."""
    watched = Stopwatch()
    said, peak = watch(command, folder)
    took = watched.read()
    line = said.splitlines()[-1] if said else ""
    facts = {kind: peak[kind] for kind in ("private", "anonymous", "disk")}
    return {"cpu": took["cpu"], "wall": took["wall"], **facts, "said": line}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--link", action="store_true", help="the files are one file: a quarter of the drawing"
    )
    parser.add_argument("--scheduler-file", help="of a dask scheduler that runs; by default one is started")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("same_bytes.json"))
    parser.add_argument("--spread", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.spread:
        spread(given.workers, given.scheduler_file, given.spread)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    inputs = [given.folder / f"counts-{k}.h5ad" for k in range(FILES)]
    for seed, path in enumerate(inputs):
        if given.link and seed and not path.exists():
            os.link(inputs[0], path)
        elif not path.exists():
            simulate(
                path,
                given.cells // FILES,
                given.genes,
                design=Design(density=DENSITY),
                values="u2",
                seed=seed,
            )
    found: dict = {"cells": given.cells, "genes": given.genes, "workers": given.workers}
    found["input bytes"] = sum(path.stat().st_size for path in inputs)
    command = [*COMMAND, *map(str, inputs)]
    alone, spread_out = given.folder / "alone", given.folder / "spread"
    found["alone"] = measure([*command, "--jobs", "1", "--out", str(alone)], given.folder)
    again = [sys.executable, __file__, "--workers", str(given.workers)]
    again += [] if given.scheduler_file is None else ["--scheduler-file", given.scheduler_file]
    found["spread"] = measure([*again, "--spread", *command, "--out", str(spread_out)], given.folder)
    found["spread"]["workers"] = json.loads(found["spread"].pop("said"))
    one, other = digests(alone), digests(spread_out)
    found |= {"files": len(one), "same": one == other, "when": time.strftime("%Y-%m-%d")}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if one != other:
        sys.exit(f"different: {sorted(k for k in {*one, *other} if one.get(k) != other.get(k))}")


if __name__ == "__main__":
    main()
