"""Ten million cells through all stages, one command after the other: time, memory, disk and files of each.

    python benchmarks/ten_million.py --cells 100000 1000000 10000000 [--folder DIR] [--stages NAME …] --out FILE.json
    python benchmarks/ten_million.py --table ten_million.json [--measured preprocess.json] [--update lab/scale.md]

A million cells are drawn (`full_transcriptome.py`): 2,000 genes, about 200 stored values in a cell, 8 cell types, 12
batches, 200 perturbations and controls, with 16-bit counts and 32-bit columns, uncompressed. Larger inputs are several
copies of this file. Then each command runs in a process of its own, without workers. A stage that is in the JSON for
this number of cells is not run again if its output is still there (``--keep``). The input is deleted after
preprocessing: it takes 1.2 GB a million cells. Run a small size first, because the first run compiles the kernels.

Memory is the highest sum of what the processes of a command hold for themselves; of that, what is in no file is told
too, because the system takes the pages of files back when memory is short. Training is that of a small network, on
windows of the store as if it did not fit into memory. 100,000 cells are predicted, whatever the size. The ceiling is
that of one halving, and it and the calibration are of mean profiles.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import scale
from full_transcriptome import Design, simulate
from preprocess_sides import folder_facts
from processes import MIB, Stopwatch, watch

DESIGN = Design(cell_types=8, batches=12, perturbations=201, density=0.1)
GENES = 2000
CELLS_PER_FILE = 1_000_000
PREDICTED = 100_000
LOADING_SECONDS = 60.0
LEAST_FREE = 15e9
"""Bytes of the disk that must stay free."""
BYTES_PER_VALUE = 6
"""Of the input: 16-bit count and 32-bit column."""
BYTES_PER_CELL = 2500
"""Of the disk, while preprocessing: input, scratch and store."""
BYTES_OF_INPUT = 1250

MEANS = ["--metrics", "MAE,R2"]
SMALL = ["train.max_steps=200", "train.max_epochs=null", "train.memory_gib=0", "train.valid_every=100"]
HOLD_OUT = ["split.context_column=batch", "split.num_held_out=1", "split.train_fraction=0.85"]
START, END = "<!-- ten million: start -->", "<!-- ten million: end -->"


@dataclass(frozen=True)
class Place:
    """Where the files of one size are."""

    folder: Path

    def __getattr__(self, name: str) -> str:
        return str(self.folder / name.replace("_", "."))

    def inputs(self) -> list[str]:
        return sorted(str(path) for path in self.folder.glob("counts*.h5ad"))


def commands(place: Place) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each stage's name, its output and its command; each may look at what those before it have made."""
    program = [sys.executable, "-W", "ignore", "-m", "perturbdiff"]
    yield "data check", "", [*program, "data", "check", *place.inputs(), "--config", "recommended"]
    plain = ["--jobs", "1", "--config", "recommended", "--set", "data.num_hvgs=null"]
    yield "preprocess", place.store, [*program, "preprocess", *place.inputs(), "--out", place.store, *plain]
    held_out = [part for pair in HOLD_OUT for part in ("--set", pair)]
    split = ["--split", place.split_parquet]
    yield (
        "split",
        place.split_parquet,
        [*program, "split", place.store, "--out", place.split_parquet, *held_out],
    )
    yield "loading", "", [sys.executable, __file__, "--load", place.store, place.split_parquet]
    small = [part for pair in SMALL for part in ("--set", pair)]
    train = ["train", place.store, *split, "--out", place.bundle, "--device", "cpu", *small]
    yield "training, 200 steps", place.bundle, [*program, *train]
    wanted(Path(place.split_parquet)).to_csv(place.wanted_csv, index=False)
    sample = ["sample", place.bundle, place.store, "--conditions", place.wanted_csv, "--device", "cpu"]
    yield (
        "sampling 100,000 cells",
        place.predicted_h5ad,
        [*program, *sample, "--out", place.predicted_h5ad],
    )
    evaluate = ["evaluate", place.predicted_h5ad, place.store, "--threads", "1"]
    yield "evaluating them", place.scores, [*program, *evaluate, "--out", place.scores]
    yield "statistics", place.stats, [*program, "stats", place.store, *split, "--out", place.stats]
    real = [place.store, *split, "--threads", "1", *MEANS]
    once = ["--set", "evaluate.ceiling_splits=1"]
    yield "ceiling", place.ceiling, [*program, "ceiling", *real, *once, "--out", place.ceiling]
    yield "calibration", place.calibration, [*program, "calibrate", *real, "--out", place.calibration]


def wanted(split: Path) -> pd.DataFrame:
    """Return the test conditions, with shares of the cells to predict as they have of the real ones."""
    from perturbdiff.splits.splits import read_split

    table = read_split(split)
    test = table[table["part"] == "test"]
    ends = np.round(test["n_cells"].cumsum() * PREDICTED / test["n_cells"].sum()).astype(int)
    sizes = np.maximum(np.diff(ends, prepend=0), 1)
    return pd.DataFrame(test[["cell_type", "batch", "perturbation"]]).assign(n_cells=sizes)


def load(store: str, split: str) -> dict[str, float]:
    """Read the training sets of one epoch, or of a minute, in windows and on one thread."""
    from perturbdiff.conditions.vocabulary import Vocabulary
    from perturbdiff.loading.loader import SetLoader
    from perturbdiff.loading.windows import WindowedSampler
    from perturbdiff.splits.splits import parts, read_split
    from perturbdiff.store.store import Store

    opened = Store(Path(store))
    use = parts(opened.conditions, read_split(Path(split))) == "train"
    sampler = WindowedSampler(opened.conditions, use, set_size=256, sets_per_step=8, seed=0, quiet=True)
    words = Vocabulary.from_conditions([opened.conditions], control=opened.control)
    stop = sampler.steps_per_epoch
    batches = SetLoader([opened], sampler, vocabulary=words, genes=opened.genes, stop_step=stop, threads=1)
    cells, watched = 0, Stopwatch()
    for batch in batches:
        cells += 2 * 256 * len(batch.condition)
        if watched.read()["wall"] > LOADING_SECONDS:
            break
    seen = watched.read()
    return {"cells": cells, "loading cpu": seen["cpu"], "loading wall": seen["wall"]}


def measure(
    cells: int,
    folder: Path,
    record: Callable[[str, dict], None],
    done: dict[str, dict],
    *,
    link: bool,
    stages: Sequence[str] = (),
) -> None:
    """Make the input and run all ``stages`` (by default every one) on it; ``record`` is given what each took."""
    place = Place(folder)
    if not Path(place.store).exists():
        _room(folder, cells * (BYTES_PER_CELL - link * BYTES_OF_INPUT))
        watched = Stopwatch()
        inputs = draw(folder, cells, link=link)
        record(
            "input", {**watched.read(), "bytes": sum(p.stat().st_size for p in inputs), "files": len(inputs)}
        )
    for name, out, command in commands(place):
        if (name in done and (not out or Path(out).exists())) or (stages and name not in stages):
            continue
        _room(folder, 0)
        before, cpu, start = _size(folder)[0], _cpu_of_children(), time.perf_counter()
        said, seen = watch(command, folder)
        facts = {"wall": time.perf_counter() - start, "cpu": _cpu_of_children() - cpu}
        facts |= {kind: seen[kind] for kind in ("private", "anonymous", "pss")}
        facts |= {"scratch": seen["disk"] - before, "load": os.getloadavg()[0]}
        facts["bytes"], facts["files"] = _size(Path(out)) if out else (0, 0)
        if name == "preprocess":
            facts["data files"] = folder_facts(Path(out))["data files"]
        if name == "loading":
            facts |= json.loads(said.splitlines()[-1])
        record(name, facts)
        if name == "preprocess":
            for path in place.inputs():
                Path(path).unlink()


def draw(folder: Path, cells: int, *, link: bool) -> list[Path]:
    """Write the input: a million cells, and as many copies of them as make up the number."""
    first = folder / "counts-0.h5ad"
    if not first.exists():
        simulate(first, min(cells, CELLS_PER_FILE), GENES, design=DESIGN, values="u2")
    copies = [folder / f"counts-{k}.h5ad" for k in range(1, cells // CELLS_PER_FILE)]
    for path in copies:
        if not path.exists():
            (os.link if link else shutil.copyfile)(first, path)
    return [first, *copies]


def _room(folder: Path, needed: float) -> None:
    free = shutil.disk_usage(folder).free
    if free - needed < LEAST_FREE:
        sys.exit(
            f"{folder}: {free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB needed beside {LEAST_FREE / 1e9:.0f} GB"
        )


def _cpu_of_children() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _size(path: Path) -> tuple[int, int]:
    """Return the bytes and the number of the files in a folder, or of a file."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files), len(files)


def stage_table(found: dict[str, dict]) -> list[str]:
    """Return what each stage took at each size, and how memory grew from the second largest size to the largest."""
    sizes = sorted(found, key=int)
    lines = [
        "| | cells | on the clock | CPU | memory, MiB | in no file, MiB | bytes in no file for each further cell "
        "| disk while running | output | files |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for stage in dict.fromkeys(stage for size in sizes for stage in found[size]):
        before: tuple[int, float] | None = None
        for size in (s for s in sizes if stage in found[s]):
            row, cells = found[size][stage], int(size)
            own, grown = row.get("anonymous"), ""
            if own is not None and before is not None:
                grown = f"{(own - before[1]) * MIB / (cells - before[0]):.1f}"
            before = None if own is None else (cells, own)
            memory = ("" if value is None else f"{value:,.0f}" for value in (row.get("private"), own))
            lines.append(
                f"| {stage} | {cells:,} | {scale.clock(row['wall'])} | {row['cpu']:.0f} s "
                f"| {' | '.join(memory)} | {grown} | {scale.amount(row['scratch']) if 'scratch' in row else ''} "
                f"| {scale.amount(row['bytes']) if row['bytes'] else ''} | {row['files'] or ''} |"
            )
    return lines


def prediction_table(found: dict[str, dict], rates: scale.Rates, windowed: float) -> list[str]:
    """Return what the rates of a million cells say of the largest size, beside what was measured."""
    size = max(found, key=int)
    rows, cells = found[size], float(size)
    values = rows["input"]["bytes"] / cells / BYTES_PER_VALUE
    data = scale.Data("", cells, int(rows["input"]["files"]), GENES, values, GENES, values, BYTES_PER_VALUE)
    made, loaded = rows["preprocess"], rows["loading"]
    need = scale.needs(data, rates)
    measured = {
        "preprocess, CPU": (sum(scale.cpu(data, rates, gzip=False).values()), made["cpu"], "{:.0f} s".format),
        "preprocess, memory": (need.worker + need.labels, made["private"] * MIB, scale.memory),
        "store": (need.store, made["bytes"], scale.amount),
        "scratch": (need.scratch, made["scratch"] - made["bytes"], scale.amount),
        "files of data": (need.files, made["data files"], str),
        "loading, cells per CPU second": (
            windowed,
            loaded["cells"] / loaded["loading cpu"],
            "{:,.0f}".format,
        ),
    }
    lines = [f"| {int(size):,} cells | computed | measured | measured / computed |", "|---|---|---|---|"]
    for name, (computed, seen, said) in measured.items():
        lines.append(f"| {name} | {said(computed)} | {said(seen)} | {seen / computed:.2f} |")
    return lines


def page(found: dict[str, dict], given: argparse.Namespace) -> str:
    lines = stage_table(found)
    if {"input", "preprocess", "loading"} <= set(found[max(found, key=int)]):
        rates = scale.Rates(json.loads(given.measured.read_text()))
        windowed = scale.loader_rates(given.loader)[0][f"windowed, {GENES} genes"]
        lines += ["", *prediction_table(found, rates, windowed)]
    return "\n".join(lines)


def measure_all(given: argparse.Namespace) -> dict[str, dict]:
    """Measure every size that is not in the JSON yet, and write it after each stage."""
    found: dict[str, dict] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for cells in given.cells:
        rows = found.setdefault(str(cells), {})

        def record(stage: str, facts: dict, rows: dict = rows) -> None:
            rows[stage] = facts
            given.out.write_text(json.dumps(found, indent=1) + "\n")
            print(stage, {key: round(value, 1) for key, value in facts.items()}, flush=True)

        folder = given.folder / f"cells-{cells}"
        folder.mkdir(parents=True, exist_ok=True)
        measure(cells, folder, record, rows, link=given.link, stages=given.stages)
        if not given.keep:
            shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measured = Path(__file__).parent / "measured"
    parser.add_argument("--cells", type=int, nargs="+", default=[100_000])
    parser.add_argument(
        "--stages", nargs="+", default=(), metavar="NAME", help="only these, as the table names them"
    )
    parser.add_argument("--folder", type=Path, help="where to work; needs 2.5 GB for each million cells")
    parser.add_argument("--keep", action="store_true", help="keep the store and the other outputs")
    parser.add_argument(
        "--link", action="store_true", help="copies of the input are hard links: half the disk"
    )
    parser.add_argument("--out", type=Path, default=Path("ten_million.json"))
    parser.add_argument("--table", type=Path, help="only make the tables of this JSON")
    parser.add_argument("--measured", type=Path, default=measured / "preprocess.json")
    parser.add_argument("--loader", type=Path, default=measured / "loader.json")
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")
    parser.add_argument("--load", nargs=2, metavar=("STORE", "SPLIT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(load(*given.load)))
        return
    with tempfile.TemporaryDirectory() as name:
        given.folder = given.folder or Path(name)
        found = json.loads(given.table.read_text()) if given.table else measure_all(given)
    text = page(found, given)
    if given.update is None:
        print(text)
        return
    before, rest = given.update.read_text().split(START)
    given.update.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
