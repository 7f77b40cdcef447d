"""Preprocessing against scanpy in memory, scanpy with dask, and the limits of the machine.

    python benchmarks/preprocess.py [--cells 200000 1000000] [--turns 3] [--folder DIR] [--out preprocess.json]

Raw counts of 20,000 genes (`full_transcriptome.py`) are read, checked, cut to 2000 genes, sorted by condition and
written. Every way runs in a process of its own, the ways take turns, and medians over the turns are shown. CPU time is
user and system time of a process and its workers; memory is the highest sum of what the process and its workers hold
for themselves. Inputs are in the page cache after the first turn.

scanpy does less: it checks no value, hashes no input and writes without compression (the cheapest for it). Above
``--scanpy-cells`` it is left out, for lack of memory; dask's sort is tried on the first ``--dask-cells`` cells.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from full_transcriptome import simulate
from processes import MIB, run

HERE = Path(__file__).parent
WIDTH = 30


def measure(path: Path, cells: int, given: argparse.Namespace, folder: Path) -> dict[str, dict]:
    """Let the ways take turns on one input; return the medians of each."""
    ways = ["ours --jobs 1", "ours --jobs 2"]
    if cells <= given.scanpy_cells:
        ways += ["scanpy", "scanpy + dask, to HVG", "scanpy + dask"]
    ways = [w for w in [*ways, "machine"] if not given.only or w in given.only]
    seen: dict[str, list[dict]] = {way: [] for way in ways}
    for turn in range(given.turns):
        for way in ways:
            if way == "scanpy + dask" and turn:
                continue  # once is slow enough
            limit = {"scanpy + dask": given.dask_cells, "machine": 50_000}.get(way, cells)
            command = [sys.executable, "-W", "ignore", str(HERE / "preprocess_sides.py"), way, str(path)]
            row = run([*command, str(folder), "--cells", str(limit)], folder)
            seen[way].append({"cells": min(limit, cells), **row})
            print(line(way, seen[way][-1], None), file=sys.stderr, flush=True)
    return {way: medians(rows) for way, rows in seen.items() if rows}


def measure_gzip(given: argparse.Namespace, folder: Path) -> dict[str, dict]:
    """Measure our way, without workers, on an input that is compressed."""
    path = simulate(folder / "gzip.h5ad", given.gzip_cells, given.genes, compression="gzip")[0]
    alone = argparse.Namespace(**{**vars(given), "only": ["ours --jobs 1"]})
    rows = measure(path, given.gzip_cells, alone, folder / "work")
    show(given.gzip_cells, rows, "gzip")
    return rows


def medians(rows: list[dict]) -> dict:
    """Return the median of every number, also in the phases."""
    merged: dict = {}
    for name, value in rows[0].items():
        if isinstance(value, dict):
            merged[name] = medians([row[name] for row in rows])
        else:
            merged[name] = statistics.median(row[name] for row in rows)
    return merged


def line(way: str, row: dict, ours: dict | None) -> str:
    rate = row["cells"] / row["cpu"]
    ratio = "" if ours is None else f"{ours['cells'] / ours['cpu'] / rate:9.2f}"
    return (
        f"{way:{WIDTH}}{row['cells']:10.0f}{rate:13.0f}{row['cells'] / row['wall']:11.0f}{row['private']:9.0f}"
        f"{ratio}"
    )


def show(cells: int, rows: dict[str, dict], kind: str = "uncompressed") -> None:
    """Print the table of one input."""
    print(
        f"\n{cells} cells, {kind}\n{'':{WIDTH}}{'cells':>10}{'cells/CPU-s':>13}{'cells/s':>11}{'MiB':>9}{'ours x':>9}"
    )
    ours = rows.get("ours --jobs 1", rows.get("ours --jobs 2"))
    for way, row in rows.items():
        if way != "machine":
            print(line(way, row, ours))
            for phase, seconds in row["phases"].items():
                print(f"  {phase:{WIDTH - 2}}{seconds / row['cells'] * 1e6:23.2f} us of CPU per cell")
    if "machine" in rows:
        print("machine, us of CPU per cell")
        for phase, took in limits(rows["machine"]).items():
            print(f"  {phase:{WIDTH - 2}}{took:23.2f}")
    if ours and "files of X" in ours:
        print(
            f"store: {ours['bytes'] / cells:.0f} bytes per cell, {ours['bytes of X'] / cells:.0f} of them counts, "
            f"{ours['values'] / cells:.0f} values; {ours['files of X']:.0f} files of counts, "
            f"{ours['files of X'] / cells * 1e6:.1f} per million cells; disk while running "
            f"{ours['disk'] / cells:.0f} bytes per cell"
        )


def limits(row: dict) -> dict[str, float]:
    """Return what the machine needs per cell, microseconds."""
    compressed = max(1, row["cells compressed"])
    return {
        phase: seconds / (compressed if phase.startswith("blosc") else row["cells"]) * 1e6
        for phase, seconds in row["phases"].items()
    }


def growth(found: dict[str, dict[str, dict]]) -> dict[str, float]:
    """Return what each further cell adds to the peak, bytes, from the smallest and the largest input."""
    sizes = sorted(found, key=int)
    ways = [w for w in found[sizes[0]] if w.startswith("ours") and w in found[sizes[-1]]]
    cells = int(sizes[-1]) - int(sizes[0])
    if not cells:
        return {}
    return {w: (found[sizes[-1]][w]["private"] - found[sizes[0]][w]["private"]) * MIB / cells for w in ways}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, nargs="+", default=[200_000])
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument(
        "--input", type=Path, nargs="+", help="files that full_transcriptome.py made, by --cells"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="ways to measure")
    parser.add_argument("--scanpy-cells", type=int, default=250_000)
    parser.add_argument("--dask-cells", type=int, default=50_000)
    parser.add_argument(
        "--gzip-cells", type=int, default=0, help="also measure so many cells compressed by gzip"
    )
    parser.add_argument("--folder", type=Path, help="where to work; needs some 10 GB per million cells")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, dict]] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for number, cells in enumerate(given.cells):
            made = Path(name) / "counts.h5ad"
            path = given.input[number] if given.input else simulate(made, cells, given.genes)[0]
            work = Path(name) / "work"
            work.mkdir(exist_ok=True)
            found[str(cells)] = measure(path, cells, given, work)
            show(cells, found[str(cells)])
        packed = measure_gzip(given, Path(name)) if given.gzip_cells else {}
    for way, added in growth(found).items():
        print(f"{way}: {added:.1f} bytes of memory for each further cell")
    if given.out:
        about = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        result = {"about": about, "cells": found, "gzip": packed, "growth": growth(found)}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
