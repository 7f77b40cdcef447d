"""Evaluation beside cell-eval and a plain prototype, on the same files.

    python benchmarks/evaluate.py [--size small|medium|large] [--cell-eval PYTHON] [--prototype FILE]
                                  [--turns 5] [--folder DIR] [--out evaluate.json] [--update lab/speed.md]

Every way has a process of its own that loads the files, warms up and then takes turns with the others; medians over
the turns are shown. Cells lie as CSR and, in other files, as one dense array: cell-eval is given what the file holds
and has a kernel for either. Computing is from opened files to values by metric and perturbation, the tests of both
sides and cell-eval's metrics (without its edistance and clustering, which ours has no counterpart of): ours *in memory*
from the AnnData that the others get as well, *by condition* from files as the command reads them. *All metrics and
tables* is the whole command from files to tables. Peak is the highest resident memory of such a process. PYTHON is that
of an environment with cell-eval 0.8.2, FILE a module with ``evaluate(real, pred, pert_col, control, compat=)``.

``large`` runs the command ``perturbdiff evaluate`` once a turn, every metric, in a new process. With ``--folder`` files
stay and turns that were taken before are not taken again; ``--out`` keeps the rows of other sizes and layouts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from evaluated_cells import CONTROL, Screen, simulate

HERE = Path(__file__).parent
START, END = "<!-- evaluation: start -->", "<!-- evaluation: end -->"
SIZES = {
    "tiny": Screen(cells=240, controls=60, perturbations=6, genes=50),
    "small": Screen(cells=16_600, controls=4_600, perturbations=60),
    "medium": Screen(cells=100_000, controls=5_000, perturbations=300),
    "large": Screen(cells=1_000_000, controls=50_000, perturbations=1000),
}
REFERENCE = "cell-eval"
TURNS = {"small": 5, "medium": 3, "large": 1}
SELDOM = {"small": 3, "medium": 1}
"""Turns of cell-eval at most, which takes minutes."""


@dataclass
class ExpressionView:
    """A process that takes turns."""

    name: str
    command: list[str]
    threads: int
    log: Path
    most: int | None = None
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def start(self) -> None:
        number = str(self.threads)
        kinds = ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "NUMBA_NUM", "POLARS_MAX")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **{f"{kind}_THREADS": number for kind in kinds}},
                stderr=log,
                **pipes,
            )

    def turn(self) -> dict[str, float]:
        assert self.process is not None
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, float]:
        assert self.process is not None
        stream: IO[str] | None = self.process.stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            said = "".join(self.log.read_text().splitlines(keepends=True)[-20:])
            raise RuntimeError(
                f"{self.name} ended with {self.process.wait()}: {' '.join(self.command)}\n{said}"
            )
        return json.loads(line)

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


def sides(given: argparse.Namespace, paths: tuple[Path, Path], work: Path) -> list[ExpressionView]:
    """Return what takes turns on one pair of files."""

    def side(name: str, way: str, threads: int, *more: str, python: str = sys.executable) -> ExpressionView:
        script = str(HERE / "evaluate_sides.py")
        command = [python, "-W", "ignore", script, way, *map(str, (*paths, work)), "--threads", str(threads)]
        return ExpressionView(name, [*command, *more], threads, work / f"{way}-{threads}.log")

    words = {
        "library": "ours, in memory",
        "ours": "ours, by condition",
        "whole": "ours, all metrics and tables",
    }
    found = [
        side(f"{name}, {n} thread{'s' * (n > 1)}", way, n) for way, name in words.items() for n in (1, 2)
    ]
    if given.prototype:
        more = ("--prototype", str(given.prototype))
        found += [side(f"prototype, {n} BLAS thread{'s' * (n > 1)}", "prototype", n, *more) for n in (1, 2)]
    if given.cell_eval:
        seldom = given.seldom or SELDOM.get(given.size)
        found.append(replace(side(REFERENCE, REFERENCE, 2, python=given.cell_eval), most=seldom))
    return found


def measure(
    found: list[ExpressionView], turns: int, journal: Path, only: list[str] | None = None
) -> dict[str, list[dict]]:
    """Let the sides, or only some, take turns; what the journal holds is taken from there."""
    taken: dict[str, list[dict]] = {side.name: [] for side in found}
    if journal.exists():
        for line in journal.read_text().splitlines():
            name, row = json.loads(line)
            taken.setdefault(name, []).append(row)
    due = {side.name: range(len(taken[side.name]), min(turns, side.most or turns)) for side in found}
    found = [side for side in found if due[side.name] and (not only or side.name in only)]
    try:
        for side in found:
            side.start()
            side.answer()  # it has read its files, alone, and all are ready before the first turn
        for number in range(turns):
            for side in [s for s in found if number in due[s.name]]:
                row = {**side.turn(), "load": os.getloadavg()[0]}
                taken[side.name].append(row)
                with journal.open("a") as file:
                    file.write(json.dumps([side.name, row]) + "\n")
                print(
                    f"{side.name:40}{row['reading']:9.2f}{row['wall']:9.2f}{row['cpu']:9.2f}", file=sys.stderr
                )
    finally:
        for side in found:
            side.close()
    return {name: rows for name, rows in taken.items() if rows}


def medians(taken: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    """Return the medians of each way, its highest peak, and how many times as long others took."""
    rows = {}
    for name, seen in taken.items():
        rows[name] = {key: statistics.median(row[key] for row in seen) for key in ("reading", "wall", "cpu")}
        rows[name] |= {"peak": max(row["peak"] for row in seen), "turns": len(seen)}
        rows[name]["load"] = statistics.median(row["load"] for row in seen)
    return rows


def agreement(work: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each of ours and the prototype, by column of cell-eval, the largest difference and what differs.

    Where one side is not defined and the other is, that counts as a difference of infinity.
    """
    files = {path.stem: json.loads(path.read_text()) for path in sorted(work.glob("*-?.json"))}
    theirs = next((values for name, values in files.items() if name.startswith(REFERENCE)), None)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, values in files.items():
        if theirs is None or values is theirs:
            continue
        found[name] = {}
        for column in [c for c in theirs if c in values]:
            pairs = [(values[column][p], value) for p, value in theirs[column].items()]
            apart = [difference(*pair) for pair in pairs]
            found[name][column] = {
                "largest": max(apart),
                "differ": sum(a > 1e-5 for a in apart),
                "compared": len(apart),
            }
    return found


def difference(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return 0.0 if a == b else abs(a - b)


def command_turns(given: argparse.Namespace, paths: tuple[Path, Path], work: Path) -> dict[str, list[dict]]:
    """Run the command in a new process for each turn."""
    name, journal = "ours, the command, 2 threads", work / "turns.jsonl"
    seen = [json.loads(line)[1] for line in journal.read_text().splitlines()] if journal.exists() else []
    out, (real, predicted) = work / "tables", paths
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "perturbdiff.cli.main",
        "-q",
        "evaluate",
        str(predicted),
        str(real),
    ]
    command += ["--out", str(out), "--control", CONTROL, "--threads", "2", "--force"]
    for _ in range(len(seen), given.turns or TURNS.get(given.size, 1)):
        start = time.perf_counter()
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        row = {"reading": 0.0, "wall": time.perf_counter() - start, "cpu": usage.ru_utime + usage.ru_stime}
        seen.append({**row, "peak": usage.ru_maxrss / 1024, "load": os.getloadavg()[0]})
        with journal.open("a") as file:
            file.write(json.dumps([name, seen[-1]]) + "\n")
    return {name: seen}


def one_layout(given: argparse.Namespace, screen: Screen, folder: Path) -> dict[str, Any]:
    """Measure one pair of files."""
    paths = simulate(folder, screen)
    layout = "dense" if screen.dense else "CSR"
    work = folder / f"{given.size}-{layout}"
    work.mkdir(exist_ok=True)
    if given.size == "large" or given.command:
        taken, found = command_turns(given, paths, work), {}
    else:
        turns = given.turns or TURNS.get(given.size, 1)
        taken = measure(sides(given, paths, work), turns, work / "turns.jsonl", given.only)
        found = agreement(work)
    shape = {"cells": screen.cells, "controls": screen.controls, "perturbations": screen.perturbations}
    size = [path.stat().st_size for path in paths]
    return {**shape, "genes": screen.genes, "bytes": size, "rows": medians(taken), "agreement": found}


def table(measured: dict[str, Any]) -> str:
    """Return the tables of everything measured, in Markdown."""
    parts = []
    for title in sorted(measured, key=lambda t: (list(SIZES).index(t.split(", ")[0]), t)):
        found, (size, layout) = measured[title], title.split(", ")
        loads = [row["load"] for row in found["rows"].values()]
        parts.append(
            f"**{size.capitalize()}, {layout}**: {found['perturbations']:,} perturbations, {found['genes']:,} genes, "
            f"{found['cells']:,} real and as many predicted cells, {found['controls']:,} of them controls; load of the "
            f"machine {min(loads):.1f} to {max(loads):.1f}.\n\n"
            "| | reading, s | computing, s | CPU s | peak, MiB | cell-eval / this | CPU | with reading | "
            "its peak / this | prototype / this |\n|---|---|---|---|---|---|---|---|---|---|"
        )
        parts[-1] += "".join("\n" + line(name, row, found["rows"]) for name, row in found["rows"].items())
        alike: dict[str, list[str]] = {}
        for name, columns in found["agreement"].items():
            alike.setdefault(agreement_words(columns), []).append(f"`{name}`")
        parts += [f"{', '.join(names)} and cell-eval: {words}." for words, names in alike.items()]
    return "\n\n".join(parts)


def line(name: str, row: dict[str, float], rows: dict[str, dict[str, float]]) -> str:
    """Return a row of a table; how many times as long the others took only beside ours."""
    whole = "tables" in name or "command" in name
    cells = [
        name,
        "in computing" if whole else f"{row['reading']:.2f}",
        *(f"{row[k]:.2f}" for k in ("wall", "cpu")),
    ]
    ratios = [""] * 5
    theirs, plain = rows.get(REFERENCE), [r for n, r in rows.items() if n.startswith("prototype")]
    if name.startswith("ours") and theirs is not None:
        both = (theirs["reading"] + theirs["wall"]) / (row["reading"] + row["wall"])
        wall, cpu, peak = (theirs[key] / row[key] for key in ("wall", "cpu", "peak"))
        ratios[:4] = [f"{ratio:.1f}" for ratio in (wall, cpu, both, peak)]
    if name.startswith("ours") and plain:
        ratios[4] = f"{min(r['wall'] for r in plain) / row['wall']:.1f}"
    return "| " + " | ".join([*cells, f"{row['peak']:.0f}", *ratios]) + " |"


def agreement_words(columns: dict[str, dict[str, float]]) -> str:
    """Say how far the values of one way are from cell-eval's."""
    apart = {column: row for column, row in columns.items() if row["differ"]}
    largest = max((row["largest"] for row in columns.values() if not row["differ"]), default=0.0)
    said = f"{len(columns) - len(apart)} of {len(columns)} columns agree within {largest:.1e}"
    for column, row in apart.items():
        said += (
            f"; `{column}` differs in {row['differ']:.0f} of {row['compared']:.0f} perturbations, by up to "
        )
        said += f"{row['largest']:.1e}"
    return said


def update(page: Path, text: str) -> None:
    """Put the tables between the page's marks."""
    before, rest = page.read_text().split(START)
    page.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, help="without it the tables are made of what --out holds")
    parser.add_argument("--layout", choices=["CSR", "dense"], nargs="+", default=["CSR", "dense"])
    parser.add_argument("--cell-eval", metavar="PYTHON", help="Python of an environment with cell-eval")
    parser.add_argument("--prototype", type=Path, metavar="FILE")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--seldom", type=int, help="turns of cell-eval at most")
    parser.add_argument("--only", nargs="+", help="ways to measure")
    parser.add_argument("--command", action="store_true", help="the command, as for large")
    parser.add_argument("--folder", type=Path, help="where to work; large needs 4 GB, dense 16 GB")
    parser.add_argument("--out", type=Path, help="JSON with what was measured before")
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")
    return parser.parse_args()


def main() -> None:
    given = parsed()
    measured = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    if given.size:
        with tempfile.TemporaryDirectory() as name:
            folder = given.folder or Path(name)
            folder.mkdir(parents=True, exist_ok=True)
            for layout in given.layout:
                screen = replace(SIZES[given.size], dense=layout == "dense")
                measured[f"{given.size}, {layout}"] = one_layout(given, screen, folder)
                if given.out:
                    given.out.write_text(json.dumps(measured, indent=1) + "\n")
    text = table(measured)
    if given.update:
        update(given.update, text)
    print(text)


if __name__ == "__main__":
    main()
