"""The command `perturbdiff evaluate` beside those of cell-eval2 and cell-eval, and the rank tests beside other engines.

    python benchmarks/evaluators.py --all --cell-eval2 PYTHON --cell-eval PYTHON [--older PYTHON]
                                    [--shape 60|300|tenth|competition ...] [--folder DIR]
                                    [--out benchmarks/measured/evaluators.json] [--update lab/evaluation-speed.md]

Every turn is a process of its own, as a user starts it, with one thread: start-up, compiling and reading are part of
it. The ways take turns. CPU seconds are of the process and its children, peak is the largest resident memory. With
``--out`` each turn is written as soon as it is over, and turns that were taken before are not taken again.

Files are simulated (`evaluated_cells.py`): counts for the definition cell-eval2, log1p for the older ones, CSR and
dense. *tenth* has the genes, controls and cells per perturbation of the 2026 competition and a tenth of its
perturbations; *competition* all of them, for ours alone unless ``--whole`` is given: the others hold both files in
memory several times. PYTHON is that of an environment with cell-eval2 0.20.0 (and illico 0.6), with cell-eval 0.8.2,
or (older) with 0.6.6. `--all` takes about 25 minutes on two idle cores, and 7 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from evaluate_sides import COLUMN, CONTROL, COSTLY, names_of_theirs
from evaluated_cells import Screen, simulate

HERE = Path(__file__).parent
START, END = "<!-- evaluators: start -->", "<!-- evaluators: end -->"
GENES, DENSITY = 18_533, 0.17
SHAPES = {
    "tiny": Screen(cells=1200, controls=300, perturbations=6, genes=400),
    "60": Screen(cells=16_600, controls=4_600, perturbations=60),
    "300": Screen(cells=100_000, controls=5_000, perturbations=300),
    "tenth": Screen(cells=22_000, controls=10_000, perturbations=30, genes=GENES, density=DENSITY),
    "competition": Screen(cells=130_000, controls=10_000, perturbations=300, genes=GENES, density=DENSITY),
}
TURNS = {"60": 3, "300": 3, "tenth": 3}
SELDOM = {"60, CSR": 3}
"""Turns of the others, where it is not one."""
BY_DEFINITION = {"cell-eval2": True, "cell-eval-0.8.2": False, "cell-eval-0.6.6": False}
"""Whether the definition is one of counts."""
ENGINES = ("ours", "illico", "numba-mwu")
WITHOUT = "without its ends"
"""Of the scale: what is read from before, or not made."""
_COMMAND = [sys.executable, "-W", "ignore", "-m", "perturbdiff.cli.main", "-q", "evaluate"]


@dataclass(frozen=True)
class Way:
    """What takes turns: a command for one pair of files."""

    name: str
    group: str
    command: list[str]
    turns: int
    before: list[str] | None = None
    """Command that makes what this one reads, in its output folder; it is run once, and not measured."""


def commands(given: argparse.Namespace, files: dict[bool, tuple[Path, Path]], out: Path) -> Iterator[tuple]:
    """Yield group, name and command of every evaluation that ``given`` allows; ``files`` are log1p and counts."""
    pythons = {
        "cell-eval2": given.cell_eval2,
        "cell-eval-0.8.2": given.cell_eval,
        "cell-eval-0.6.6": given.older,
    }
    theirs = ",".join(names_of_theirs())
    for definition, counts in [pair for pair in BY_DEFINITION.items() if pair[1] in files]:
        real, predicted = map(str, files[counts])
        own = [*_COMMAND, predicted, real, "--out", str(out / "ours"), "--control", CONTROL]
        own += ["--definition", definition, "--threads", "1", "--force"]
        if not counts:
            yield definition, "ours", [*own, "--metrics", theirs]
        yield definition, "ours" if counts else "ours, all metrics", own
        if counts:
            again = [str(out / "ours-again") if word == str(out / "ours") else word for word in own]
            yield definition, f"ours, {WITHOUT}", [*again, "--ends", str(out / "ours")]
        if pythons[definition] is None:
            continue
        program = str(Path(pythons[definition]).parent / ("cell-eval2" if counts else "cell-eval"))
        command = [
            program,
            "run",
            "-ap",
            predicted,
            "-ar",
            real,
            "--pert-col",
            COLUMN,
            "-o",
            str(out / definition),
        ]
        if counts:
            command += ["--preset", "vcc2026", "--control", CONTROL, "--set", "num_threads=1"]
            yield definition, f"cell-eval2, {WITHOUT}", command
            yield definition, "cell-eval2 --anchor", [*command, "--anchor"]
        else:
            command += ["--control-pert", CONTROL, "--num-threads", "1", "--skip-metrics", ",".join(COSTLY)]
            yield definition, definition, command


def ways(given: argparse.Namespace, shape: str, layout: str, folder: Path) -> list[Way]:
    """Return what is measured on files of one shape and layout."""
    screen = replace(SHAPES[shape], dense=layout == "dense")
    files = {counts: simulate(folder, replace(screen, counts=counts)) for counts in given.values}
    out = folder / f"out-{shape}-{layout}"
    out.mkdir(exist_ok=True)
    few = shape == "competition"
    found = []
    for group, name, command in commands(given, files, out):
        own = name.startswith("ours")
        if few and not own and not given.whole:
            continue
        if name.endswith("--anchor") and (shape, layout) != ("60", "CSR"):
            continue
        turns = TURNS.get(shape, 1) if own else SELDOM.get(f"{shape}, {layout}", 1)
        before = next((way.command for way in found if "--ends" in command and way.name == "ours"), None)
        found.append(Way(name, group, command, 1 if name.endswith("--anchor") else turns, before))
    if True in files and layout == "CSR" and not few:
        for engine in ENGINES if given.cell_eval2 else ENGINES[:1]:
            python = sys.executable if engine == "ours" else given.cell_eval2
            command = [
                python,
                "-W",
                "ignore",
                str(HERE / "rank_tests.py"),
                engine,
                str(files[True][0]),
                "--log",
            ]
            command += ["--save", str(out / f"p-{engine}.npy")]
            found.append(Way(engine, "rank tests", command, TURNS.get(shape, 1)))
    return found


def turn(way: Way, log: Path) -> dict[str, float]:
    """Run a command once."""
    if way.before and not Path(way.command[-1]).exists():
        subprocess.run(way.before, check=True, stdout=subprocess.DEVNULL)
    kinds = ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "NUMBA_NUM", "POLARS_MAX")
    start = time.perf_counter()
    with log.open("w") as said:
        process = subprocess.Popen(
            way.command,
            env={**os.environ, **{f"{kind}_THREADS": "1" for kind in kinds}},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(way.command)} ended with {process.returncode}: {log.read_text()[-2000:]}"
        )
    row = {"cpu": usage.ru_utime + usage.ru_stime, "wall": time.perf_counter() - start}
    row |= {"peak": usage.ru_maxrss / 1024, "load": os.getloadavg()[0]}
    if way.group == "rank tests":
        tests = json.loads(printed.splitlines()[-1])
        row |= {"cpu": tests["cpu"], "wall": tests["wall"]}
        saved = Path(way.command[-1])
        row["apart"] = float(np.abs(np.load(saved) - np.load(saved.with_name("p-ours.npy"))).max())
    return row


def measure(given: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[dict]]]:
    """Let all ways take turns, shape by shape; return rows by "shape, layout" and "group: way"."""
    taken = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    for shape in given.shape:
        for layout in ("CSR", "dense") if shape in ("tiny", "60", "300") else ("CSR",):
            rows = taken.setdefault(f"{shape}, {layout}", {})
            found = ways(given, shape, layout, folder)
            for number in range(max(way.turns for way in found)):
                for way in found:
                    seen = rows.setdefault(f"{way.group}: {way.name}", [])
                    if len(seen) > number or number >= way.turns:
                        continue
                    seen.append(turn(way, folder / "log"))
                    print(f"{shape}, {layout} {way.group}: {way.name} {seen[-1]}", file=sys.stderr)
                    if given.out:
                        given.out.write_text(json.dumps(taken, indent=1) + "\n")
    return taken


def table(taken: dict[str, dict[str, list[dict]]]) -> str:
    """Return a table in Markdown: medians, and how many times as much as the first of ours each needs."""
    parts = []
    for title, rows in taken.items():
        shape, layout = title.split(", ")
        screen = SHAPES[shape]
        parts.append(
            f"**{screen.perturbations} perturbations, {screen.genes:,} genes, {screen.cells:,} cells a side, "
            f"{screen.controls:,} of them controls, {layout}**\n\n"
            "| | CPU s | × ours | wall s | peak MiB | × ours | turns | load |\n|---|---|---|---|---|---|---|---|"
        )
        ours: dict[str, dict[str, float]] = {}
        for name, seen in rows.items():
            if not seen:
                continue
            group = name.split(": ")[0]
            row = {
                key: statistics.median(one[key] for one in seen) for key in ("cpu", "wall", "peak", "load")
            }
            first = ours.setdefault(group, row)  # of rivals without ends it is ours without ends
            if name.endswith(WITHOUT):
                first = ours.setdefault(group + WITHOUT, row)
            if max(one.get("apart", 0.0) for one in seen) > 0:
                name += f" (p differs by up to {max(one['apart'] for one in seen):.0e})"
            times = [f"{row[key] / first[key]:.1f}" if row is not first else "" for key in ("cpu", "peak")]
            parts[-1] += (
                f"\n| {name} | {row['cpu']:.1f} | {times[0]} | {row['wall']:.1f} | {row['peak']:.0f} | {times[1]} "
                f"| {len(seen)} | {row['load']:.1f} |"
            )
    return "\n\n".join(parts)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="all shapes but tiny")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=[], help="without any, only the tables")
    parser.add_argument("--values", choices=["counts", "log1p"], nargs="+", default=["counts", "log1p"])
    for name, of in (("cell-eval2", "cell-eval2 and illico"), ("cell-eval", "0.8.2"), ("older", "0.6.6")):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"Python of an environment with {of}")
    parser.add_argument("--whole", action="store_true", help="the others at the competition's shape too")
    parser.add_argument("--folder", type=Path, help="where files stay")
    parser.add_argument("--out", type=Path, help="JSON with what was measured before")
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")
    given = parser.parse_args()
    given.shape = list(SHAPES)[1:] if given.all else given.shape
    given.values = [name == "counts" for name in given.values]
    return given


def main() -> None:
    given = parsed()
    with tempfile.TemporaryDirectory() as name:
        folder = (given.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        text = table(measure(given, folder))
    if given.update:
        before, rest = given.update.read_text().split(START)
        given.update.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    print(text)


if __name__ == "__main__":
    main()
