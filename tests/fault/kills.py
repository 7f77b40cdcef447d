"""SIGINT and SIGKILL at random moments of every command: running it again gives what an undisturbed run gives.

``PYTHONPATH=tests python -m fault.kills`` sends 20 of each to each command and prints a table.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
from security.fuzz import contents, in_processes
from security.fuzz_inputs import QUICK, RECIPE, make

_SPLIT = ("--split", "{0}/split.parquet")
_CPU = ("--device", "cpu")

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "{0}/counts.h5ad", *RECIPE, *_CPU, "--out", "{1}/x"),
    "init": ("init", "{0}/counts.h5ad", *RECIPE, "--out", "{1}/x"),
    "simulate": ("simulate", "--cells", "800", "--set", "simulate.genes=50", "--out", "{1}/x"),
    "preprocess": ("preprocess", "{0}/counts.h5ad", *RECIPE, "--jobs", "1", "--out", "{1}/x"),
    "preprocess by two": (
        *("preprocess", "{0}/counts.h5ad", "{0}/counts.zarr", *RECIPE, "--jobs", "2"),
        *("--out", "{1}/x"),
    ),
    "split": ("split", "{0}/store", *RECIPE, "--out", "{1}/x.parquet"),
    "stats": ("stats", "{0}/store", "--pairs", "20", "--out", "{1}/x"),
    "vocabulary": ("vocabulary", "build", "{0}/counts.h5ad", *RECIPE, "--jobs", "1", "--out", "{1}/x"),
    "align": ("vocabulary", "align", "{0}/store", "--genes", "{0}/genes.txt", "--out", "{1}/x.csv"),
    "pretrain": ("pretrain", "{0}/store", *RECIPE, *_CPU, "--out", "{1}/x"),
    "train": ("train", "{0}/store", *_SPLIT, *RECIPE, *_CPU, "--out", "{1}/x"),
    "finetune": ("finetune", "{0}/bundle", "{0}/store", *_SPLIT, *RECIPE, *_CPU, "--out", "{1}/x"),
    "sample": ("sample", "{0}/bundle", "{0}/store", *_SPLIT, *_CPU, "--out", "{1}/x.h5ad"),
    "baseline": ("baseline", "control", "{0}/store", *_SPLIT, "--out", "{1}/x.h5ad"),
    "evaluate": ("evaluate", "{0}/pred.h5ad", "{0}/store", *QUICK, "--out", "{1}/x"),
    "ceiling": ("ceiling", "{0}/store", *_SPLIT, *QUICK, "--out", "{1}/x"),
    "merge": ("merge", "{0}/part0.h5ad", "{0}/part1.h5ad", "--out", "{1}/x.h5ad"),
    "report": ("report", "{0}/scores", "{0}/base", "--bundle", "{0}/bundle", "--out", "{1}/x.html"),
    "export": ("store", "export", "{0}/store", "--out", "{1}/x.h5ad"),
}
"""Every command; ``{0}`` is the folder of inputs, ``{1}`` that of the output."""

TIMED = {"run": ("x/report.html", "x/report_tables/trained.")}
"""Files that tell how long stages took: beginnings of their names, by command."""

SIGNALS = {"SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}


@dataclass(frozen=True)
class Undisturbed:
    """What a command writes and how long it takes."""

    content: dict[str, str]
    seconds: float


def _line(name: str, good: Path, out: Path) -> list[str]:
    return [word.format(good, out) for word in COMMANDS[name]]


def undisturbed(name: str, good: Path, place: Path) -> Undisturbed:
    """Run a command to its end.

    Raises
    ------
    RuntimeError
        If it fails.
    """
    out = _empty(place)
    ended = forked.command(_line(name, good, out), folder=place / "run")
    if ended.code != 0:
        raise RuntimeError(ended.err)
    return Undisturbed(_compared(name, out), ended.seconds)


def _compared(name: str, out: Path) -> dict[str, str]:
    return {file: what for file, what in contents(out).items() if not file.startswith(TIMED.get(name, ()))}


def _empty(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    out = place / "out"
    out.mkdir(parents=True)
    return out


def disturb(
    name: str, sent: str, moment: float, right: Undisturbed, good: Path, place: Path
) -> dict[str, Any]:
    """Send a signal at a moment (a share of the time that the command takes), run it again, and say what was found.

    Returns
    -------
    dict
        ``problems``: what must not be; ``late``: whether the command had ended before.
    """
    out = _empty(place)
    line, problems = _line(name, good, out), []
    first = forked.command(line, folder=place / "run", send=(SIGNALS[sent], moment * right.seconds))
    late = first.code == 0
    if first.hung:
        problems.append("hangs")
    if first.left:
        problems.append("processes outlive it")
    if not late and sent == "SIGINT":
        problems += _spoken(first)
        if any((place / "run" / "tmp").iterdir()):
            problems.append("something is left in TMPDIR")
    second = forked.command(line, folder=place / "again")
    if second.code != 0:
        problems.append(f"the second run fails: {second.err.strip().splitlines()[-1:]}")
    elif _compared(name, out) != right.content:
        problems.append("another result" + (", called up to date" if "up to date" in second.err else ""))
    if any((place / "again" / "tmp").iterdir()):
        problems.append("the second run leaves something in TMPDIR")
    return {"name": name, "sent": sent, "moment": moment, "late": late, "problems": problems}


def _spoken(ended: forked.Ended) -> list[str]:
    if "Traceback" in ended.err:
        return ["a traceback: " + ended.err.strip().splitlines()[-1]]
    if ended.code not in (75, 130):
        return [f"exit code {ended.code}, signal {ended.signal}"]
    last = ended.err.strip().splitlines()[-1:]
    return [] if last and ("nterrupt" in last[0] or last[0].startswith("stopped early")) else [f"says {last}"]


def campaign(
    names: Sequence[str], each: int, folder: Path, good: Path, *, seed: int = 0, processes: int = 1
) -> list[dict[str, Any]]:
    """Send each signal so many times to each command and return what was found.

    Parameters
    ----------
    names
        Of `COMMANDS`.
    each
        Signals of each kind.
    folder
        Scratch folder.
    good
        Folder of the sound inputs, which are made if it is not there.
    """
    forked.import_all()
    if not good.exists():
        make(good, folder / "making")
    rights = {name: undisturbed(name, good, folder / "first") for name in names}
    rng = random.Random(seed)
    # moments evenly over a command's time, so that few signals reach all of its parts
    jobs = [
        (name, sent, (k + rng.random()) / each) for name in names for sent in SIGNALS for k in range(each)
    ]
    found = in_processes(
        lambda n, place: disturb(*jobs[n], rights[jobs[n][0]], good, place), len(jobs), processes, folder
    )
    return [value for _, value in sorted(found, key=lambda f: f[0])]


def main() -> None:
    """Run the campaign and end with 1 if anything was found."""
    parser = argparse.ArgumentParser(description="Disturb commands by signals, and run them again.")
    parser.add_argument("--each", type=int, default=20, help="signals of each kind to each command")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--good", type=Path, help="folder of the sound inputs, made if it is not there")
    given = parser.parse_args()
    names = given.commands.split(",")
    # no TemporaryDirectory: a forked process that ends would delete it
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        good = given.good or folder / "good"
        found = campaign(names, given.each, folder, good, seed=given.seed, processes=given.processes)
    finally:
        shutil.rmtree(folder)
    print(f"{'command':>18}  {'signal':>8}  sent  before its end  rerun right  problems")
    for command in names:
        for sent in SIGNALS:
            mine = [f for f in found if (f["name"], f["sent"]) == (command, sent)]
            hit, bad = sum(not f["late"] for f in mine), sum(bool(f["problems"]) for f in mine)
            right = sum(not any("another" in p or "fails" in p for p in f["problems"]) for f in mine)
            print(f"{command:>18}  {sent:>8}  {len(mine):4}  {hit:14}  {right:11}  {bad:8}")
    for what, count in Counter((f["name"], f["sent"], p) for f in found for p in f["problems"]).items():
        print(f"{count} × {' '.join(what)}")
    sys.exit(any(f["problems"] for f in found))


if __name__ == "__main__":
    main()
