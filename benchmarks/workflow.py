"""Where the time of a finished workflow went: the tasks' own work on the longest chain, and what Nextflow adds.

    python benchmarks/workflow.py RESULTS --log .nextflow.log --cores 2 [--wall SECONDS] [--out FILE.json]

RESULTS is the run's --outdir; its work folders must still be there. Own time is what a task's script took. The
longest chain of tasks that need each other's files is the *critical path*: no machine makes the workflow faster.
Overhead is the wall time less the critical path. On few cores tasks also wait for each other; that part is told
apart by a schedule of the same tasks on as many cores in which nothing else takes time.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

STAMP = "%b-%d %H:%M:%S.%f"


@dataclass
class Task:
    """One attempt of one task; times are seconds since 1970."""

    name: str
    attempt: int
    folder: Path
    cpus: int
    own: float
    submitted: float
    begun: float
    ended: float
    noticed: float
    needs: set[Path] = field(default_factory=set)

    @property
    def waited(self) -> float:
        """From submission to the first line of the job: queue and launch."""
        return self.begun - self.submitted

    @property
    def wrapped(self) -> float:
        """What the job did beside the script: inputs linked, container started, outputs listed."""
        return self.ended - self.begun - self.own

    @property
    def unnoticed(self) -> float:
        """From the end of the job until Nextflow knew of it."""
        return self.noticed - self.ended


def newest_trace(results: Path) -> Path:
    found = sorted((results / "pipeline_info").glob("trace_*.tsv"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"{results}: no pipeline_info/trace_*.tsv: is this the --outdir of a run?")
    return found[-1]


def read_tasks(trace: Path) -> list[Task]:
    """Return the tasks that ran; those taken from the cache cost nothing."""
    with trace.open() as handle:
        rows = [
            row for row in csv.DictReader(handle, delimiter="\t") if row["status"] in ("COMPLETED", "FAILED")
        ]
    tasks = [task_of(row) for row in rows]
    folders = {task.folder for task in tasks}
    attempts = {(task.name, task.attempt): task.folder for task in tasks}
    for task in tasks:
        task.needs = set(inputs_of(task.folder)) & folders
        earlier = attempts.get((task.name, task.attempt - 1))
        task.needs |= {earlier} if earlier else set()
    return tasks


def task_of(row: dict[str, str]) -> Task:
    folder = Path(row["workdir"])
    try:
        begun, ended = ((folder / name).stat().st_mtime for name in (".command.begin", ".exitcode"))
        noted = re.search(r"^realtime=(\d+)$", (folder / ".command.trace").read_text(), re.MULTILINE)
    except FileNotFoundError as error:
        raise SystemExit(f"{error.filename} is missing: the work folders of the run are needed") from None
    # a task killed with its container leaves no time of its own
    own = int(noted[1]) / 1000 if noted else ended - begun
    times = (datetime.fromisoformat(row[name]).timestamp() for name in ("submit", "complete"))
    submitted, noticed = times
    name, attempt = row["name"].split(":")[-1], int(row["attempt"])
    return Task(name, attempt, folder, int(row["cpus"]), own, submitted, begun, ended, noticed)


def inputs_of(folder: Path) -> Iterator[Path]:
    """Yield the work folders that the links in a work folder point into."""
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            if path.is_symlink():
                yield from path.readlink().parents


def critical_path(tasks: Sequence[Task]) -> list[Task]:
    """Return the chain of tasks, each needing the one before, with the largest sum of own times."""
    by_folder = {task.folder: task for task in tasks}
    best: dict[Path, tuple[float, Task | None]] = {}
    for task in sorted(tasks, key=lambda task: task.submitted):  # what a task needs was submitted before it
        before = max(
            (by_folder[f] for f in task.needs), key=lambda other: best[other.folder][0], default=None
        )
        best[task.folder] = (task.own + (best[before.folder][0] if before else 0.0), before)
    last: Task | None = max(tasks, key=lambda task: best[task.folder][0])
    chain = []
    while last:
        chain.append(last)
        last = best[last.folder][1]
    return chain[::-1]


def schedule(tasks: Sequence[Task], cores: int) -> float:
    """Return how long the tasks take on so many cores if each starts as soon as it may, in order of submission."""
    waiting = sorted(tasks, key=lambda task: task.submitted)
    running: list[tuple[float, int, Task]] = []
    done: set[Path] = set()
    now, free = 0.0, cores
    while waiting or running:
        for task in [task for task in waiting if task.needs <= done]:
            if min(task.cpus, cores) <= free:
                free -= min(task.cpus, cores)
                waiting.remove(task)
                heapq.heappush(running, (now + task.own, id(task), task))
        now, _, ended = heapq.heappop(running)
        free += min(ended.cpus, cores)
        done.add(ended.folder)
    return now


def log_times(log: Path) -> tuple[float, float]:
    """Return when Nextflow wrote the first and the last line of its log; the log does not name the year."""
    year = datetime.fromtimestamp(log.stat().st_mtime).year
    found = re.findall(r"^(\w{3}-\d\d \d\d:\d\d:\d\d\.\d{3}) ", log.read_text(), re.MULTILINE)
    first, last = (datetime.strptime(found[i], STAMP).replace(year=year).timestamp() for i in (0, -1))
    return first, last


def analyse(tasks: Sequence[Task], cores: int, begin: float, end: float, wall: float | None = None) -> dict:
    """Return all figures, in seconds.

    Parameters
    ----------
    tasks
        What ran.
    cores
        CPUs that tasks can have at a time.
    begin, end
        First and last sign of Nextflow.
    wall
        What the command took as its caller saw it, if known.
    """
    chain = critical_path(tasks)
    path = sum(task.own for task in chain)
    work = sum(task.own * min(task.cpus, cores) for task in tasks)
    ideal = schedule(tasks, cores)
    total = wall if wall is not None else end - begin

    def spread(name: str) -> dict[str, float]:
        values = [getattr(task, name) for task in tasks]
        return {"median": statistics.median(values), "max": max(values)}

    return {
        "tasks": len(tasks),
        "cores": cores,
        "wall": total,
        "critical path": path,
        "chain": [(task.name, task.own) for task in chain],
        "overhead": total - path,
        "work / cores": work / cores,
        "ideal on these cores": ideal,
        "waiting for cores": ideal - path,
        "overhead beside waiting": total - ideal,
        "start-up": min(task.submitted for task in tasks) - begin,
        "shut-down": end - max(task.noticed for task in tasks),
        "submission to begin": spread("waited"),
        "container, links": spread("wrapped"),
        "end to notice": spread("unnoticed"),
    }


def show(found: dict) -> str:
    names = ("wall", "critical path", "overhead", "work / cores", "ideal on these cores", "waiting for cores")
    names += ("overhead beside waiting", "start-up", "shut-down")
    lines = [f"{found['tasks']} tasks, {found['cores']} cores"]
    lines += [f"{name:26}{found[name]:8.1f} s" for name in names]
    for name in ("submission to begin", "container, links", "end to notice"):
        lines.append(f"{name:26}{found[name]['median']:8.1f} s  (median; most {found[name]['max']:.1f} s)")
    lines.append("critical path: " + " → ".join(f"{name} {own:.1f}" for name, own in found["chain"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--log", type=Path, default=Path(".nextflow.log"), help="Nextflow's log of that run")
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="CPUs that tasks could have at a time"
    )
    parser.add_argument("--wall", type=float, help="seconds that the command took, start of Java included")
    parser.add_argument("--what", default="run", help="name in the JSON file")
    parser.add_argument("--out", type=Path, help="JSON file to add the figures to")
    given = parser.parse_args()
    tasks = read_tasks(newest_trace(given.results))
    if not tasks:
        raise SystemExit(f"{given.results}: no task ran in the newest run, all came from the cache")
    found = analyse(tasks, given.cores, *log_times(given.log), given.wall)
    print(show(found))
    if given.out:
        kept = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(json.dumps(kept | {given.what: found}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
