"""What ten million to a hundred million cells need, computed from measured rates: the tables of lab/scale.md.

    python benchmarks/preprocess.py --cells 200000 1000000 --gzip-cells 100000 --out preprocess.json
    python benchmarks/scale.py preprocess.json [--loader loader.json] [--update lab/scale.md]

Without ``--update`` the tables are printed. ``loader.json`` is what `loader.py` writes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

MIB, GIB, MB, GB, TB = 2**20, 2**30, 1e6, 1e9, 1e12
START, END = "<!-- computed: start -->", "<!-- computed: end -->"
BYTES_PER_RAW_VALUE = 8.0
"""float32 value and int32 column."""

PBMC_BYTES = 212e9 / 18_830_591_942
"""Of a value in the published file, whose columns have 64 bits because it has more than 2³¹ values."""

BYTES_IN_MEMORY = 4
"""16-bit count and 16-bit column of a stored value."""

BYTES_PER_GENE_SUM = 24
BOOKKEEPING = 16
"""Bytes per cell that preprocess may hold at most, of labels; a peak also varies by what a block happens to hold."""

EFFICIENCY = 0.7
"""What a process does beside others, alone = 1: as two on two busy cores, their start left out."""

READS_PER_CELL = 2 / 64
"""Reads of windows of 64 cells, counts and columns, where no measurement is given."""

LOADER = {
    "windowed, 2000 genes": 300_000,
    "in memory, 2000 genes": 600_000,
    "windowed, 12626 genes": 75_000,
    "in memory, 12626 genes": 180_000,
}
"""Cells per CPU second where no measurement is given: what the loader is required to reach."""


@dataclass(frozen=True)
class Data:
    """A data set: cells, files, genes and stored values per cell of the input, genes and values of the store.

    ``raw_bytes`` are those of an uncompressed value of the input.
    """

    name: str
    cells: float
    files: int
    raw_genes: int
    raw_values: float
    genes: int
    values: float
    raw_bytes: float = BYTES_PER_RAW_VALUE


SETS = (
    Data("PBMC", 9.7e6, 1, 40_352, 1942, 2000, 100, PBMC_BYTES),
    Data("CellxGene", 61e6, 1139, 60_000, 1500, 12_626, 1093),
    Data("Tahoe100M", 101e6, 14, 62_710, 1500, 2000, 100),
)


@dataclass(frozen=True)
class Machine:
    """Processes that work at once and what storage delivers to all of them together, bytes per second."""

    name: str
    workers: int
    storage: float
    nodes: int


MACHINES = (
    Machine("node, 16 cores", 16, 1 * GB, 1),
    Machine("8 workers × 4 cores", 32, 4 * GB, 8),
)


class Rates:
    """What was measured, per stored value or per cell; CPU seconds and bytes."""

    def __init__(self, measured: dict) -> None:
        sizes = sorted(measured["cells"], key=int)
        alone = measured["cells"][sizes[-1]]["ours --jobs 1"]
        pair = measured["cells"][sizes[-1]].get("ours --jobs 2", alone)
        cells, raw, stored = alone["cells"], alone["raw values"], alone["values"]
        phases = alone["phases"]
        self.cells = int(cells)
        self.hash = phases["input hash"] / alone["input bytes"]
        self.read = (phases["reading cells"] + phases["sorting cells"]) / raw
        self.write = phases["writing cells"] / stored
        self.rest = (alone["cpu"] - sum(phases.values())) / cells
        self.rate = cells / alone["cpu"]
        self.store = alone["bytes of X"] / stored
        self.obs = (alone["bytes"] - alone["bytes of X"]) / cells
        self.reads = alone["bytes read"] / alone["reads"]
        self.disk = max(0.0, alone["disk"] - alone["bytes"]) / stored
        self.worker = pair["private"] * MIB / 2
        self.data_files = alone["data files"] / max(1, alone["parts"])
        packed = measured.get("gzip", {}).get("ours --jobs 1")
        self.gzip_read = self.gzip_bytes = float("nan")
        if packed:
            both = packed["phases"]["reading cells"] + packed["phases"]["sorting cells"]
            self.gzip_read = both / packed["raw values"]
            self.gzip_bytes = packed["input bytes"] / packed["raw values"]


def input_bytes(data: Data, rates: Rates, *, gzip: bool) -> float:
    return data.cells * data.raw_values * (rates.gzip_bytes if gzip else data.raw_bytes)


def cpu(data: Data, rates: Rates, *, gzip: bool) -> dict[str, float]:
    """Return CPU seconds: of hashing, of the two passes over the input, of writing, of the rest."""
    per_value = rates.gzip_read if gzip else rates.read
    return {
        "hash": rates.hash * input_bytes(data, rates, gzip=gzip),
        "read": per_value * data.raw_values * data.cells,
        "write": rates.write * data.values * data.cells,
        "rest": rates.rest * data.cells,
    }


def seconds(data: Data, rates: Rates, machine: Machine, *, gzip: bool) -> float:
    """Return wall seconds: input is read three times, at the speed of the processors or of the storage."""
    spent, size = cpu(data, rates, gzip=gzip), input_bytes(data, rates, gzip=gzip)
    power = machine.workers * EFFICIENCY
    hashing = max(spent["hash"], size / machine.storage)  # one file after another, in one process
    reading = max(spent["read"] / power, 2 * size / machine.storage)
    return hashing + reading + spent["write"] / power + spent["rest"]


def preprocess_table(rates: Rates) -> list[str]:
    """Return the table of preprocessing."""
    lines = [
        "| | input | CPU | " + " | ".join(f"time, {m.name}" for m in MACHINES) + " |",
        "|---|---|---|" + "---|" * len(MACHINES),
    ]
    for data in SETS:
        for gzip in (False, True) if rates.gzip_read == rates.gzip_read else (False,):
            kind = "gzip" if gzip else "uncompressed"
            hours = sum(cpu(data, rates, gzip=gzip).values()) / 3600
            times = " | ".join(clock(seconds(data, rates, m, gzip=gzip)) for m in MACHINES)
            size = amount(input_bytes(data, rates, gzip=gzip))
            lines.append(f"| {title(data)} | {size} {kind} | {hours:.1f} h | {times} |")
    return lines


@dataclass(frozen=True)
class Needs:
    """What preprocessing needs, bytes, and the data files of the store."""

    worker: float
    labels: float
    store: float
    scratch: float
    files: int


def needs(data: Data, rates: Rates) -> Needs:
    """Return what preprocessing needs beside time."""
    parts = max(1, round(data.cells / part_cells(data.cells)))
    return Needs(
        worker=rates.worker + data.raw_genes * BYTES_PER_GENE_SUM,
        labels=data.cells * BOOKKEEPING,
        store=data.cells * (data.values * rates.store * max(1, index_bytes(data) / 2) + rates.obs),
        scratch=data.cells * data.values * rates.disk,
        files=round(parts * rates.data_files),
    )


def resource_table(rates: Rates) -> list[str]:
    """Return the table of memory, disk, files and requests of preprocessing."""
    lines = [
        "| | memory of a worker | labels, at most | store | scratch while running | data files "
        "| reads of the input |",
        "|---|---|---|---|---|---|---|",
    ]
    for data in SETS:
        need, requests = needs(data, rates), 3 * input_bytes(data, rates, gzip=False) / rates.reads
        lines.append(
            f"| {title(data)} | {memory(need.worker)} | {memory(need.labels)} "
            f"| {amount(need.store)} | {amount(need.scratch)} | {need.files} | {requests / 1e6:.1f} M |"
        )
    return lines


def part_cells(cells: float) -> float:
    """Return the cells of a part, as preprocess plans them."""
    return min(max(cells / 16, 524_288), 2_097_152)


def index_bytes(data: Data) -> int:
    return 2 if data.genes <= 1 << 15 else 4


def loader_rates(path: Path | None) -> tuple[dict[str, float], float]:
    """Return cells per CPU second by name and reads per cell of the windowed loader."""
    measured = json.loads(path.read_text())["rows"] if path else {}
    rates = {name: measured.get(name, {}).get("cells/CPU-s", rate) for name, rate in LOADER.items()}
    return rates, measured.get("windowed, 2000 genes", {}).get("reads/cell", READS_PER_CELL)


def loader_table(loader: dict[str, float], reads_per_cell: float) -> list[str]:
    """Return the table of one epoch: every cell once, with as many controls."""
    lines = [
        "| | held in memory | CPU, in memory | 4 threads | CPU, windows | 4 threads | 16 threads | reads | "
        "reads at 1 ms, 16 at once |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for data in SETS:
        genes = min((2000, 12_626), key=lambda g: abs(g - data.genes))
        memory, windows = (loader[f"{kind}, {genes} genes"] for kind in ("in memory", "windowed"))
        rows = 2 * data.cells
        held = data.cells * (data.values * BYTES_IN_MEMORY + 8)
        reads = rows * reads_per_cell
        fast, slow = rows / memory, rows / windows
        lines.append(
            f"| {title(data)} | {amount(held)} | {fast / 3600:.2f} h | {clock(fast / 4 / EFFICIENCY)} "
            f"| {slow / 3600:.2f} h | {clock(slow / 4 / EFFICIENCY)} | {clock(slow / 16 / EFFICIENCY)} "
            f"| {reads / 1e6:.1f} M | {clock(reads * 1e-3 / 16)} |"
        )
    return lines


def rate_table(rates: Rates, loader: dict[str, float]) -> list[str]:
    """Return the measured rates from which all else follows."""
    rows = [
        ("preprocess, all of it", f"{rates.rate:,.0f} cells per CPU second ({rates.cells:,} cells)"),
        ("input hash", f"{1 / rates.hash / GB:.2f} GB per CPU second"),
        ("two passes over the input", f"{rates.read * 1e9:.1f} ns of CPU per stored value of the input"),
        ("writing", f"{rates.write * 1e9:.1f} ns of CPU per stored value of the store"),
        ("everything else", f"{rates.rest * 1e6:.2f} µs per cell"),
        ("a read of the input", f"{rates.reads / 1024:.0f} KiB"),
        ("store", f"{rates.store:.2f} bytes per stored value, {rates.obs:.1f} bytes of obs per cell"),
        ("scratch", f"{rates.disk:.1f} bytes per stored value"),
        ("memory", f"{rates.worker / MIB:.0f} MiB per worker"),
    ]
    if rates.gzip_read == rates.gzip_read:
        text = f"{rates.gzip_read * 1e9:.1f} ns per stored value; {rates.gzip_bytes:.2f} bytes on disk"
        rows.append(("two passes over gzip input", text))
    rows += [(f"loader, {name}", f"{rate:,.0f} cells per CPU second") for name, rate in loader.items()]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def comparison_table(measured: dict) -> list[str]:
    """Return what every way of preprocessing took, at each size."""
    lines = [
        "| cells | | cells per CPU second | cells per second | peak, MiB | CPU, ours = 1 |",
        "|---|---|---|---|---|---|",
    ]
    for size, rows in sorted(measured["cells"].items(), key=lambda item: int(item[0])):
        for way, row in rows.items():
            if way != "machine":
                ours = rows["ours --jobs 1"]["cpu"] / rows["ours --jobs 1"]["cells"]
                each = row["cpu"] / row["cells"]
                lines.append(
                    f"| {int(row['cells']):,}{'' if row['cells'] == int(size) else f' of {int(size):,}'} | {way} "
                    f"| {1 / each:,.0f} | {row['cells'] / row['wall']:,.0f} | {row['private']:,.0f} "
                    f"| {each / ours:.2f} |"
                )
    return lines


def phase_table(measured: dict) -> list[str]:
    """Return the CPU time of our phases and of the work that no program can avoid, microseconds per cell."""
    size = min(measured["cells"], key=int)
    rows = measured["cells"][size]
    ours = rows["ours --jobs 1"]
    lines = [f"| µs of CPU per cell, {int(size):,} cells | |", "|---|---|"]
    lines += [f"| {phase} | {took / ours['cells'] * 1e6:.1f} |" for phase, took in ours["phases"].items()]
    lines.append(f"| the rest | {(ours['cpu'] - sum(ours['phases'].values())) / ours['cells'] * 1e6:.1f} |")
    limits = rows.get("machine", {"phases": {}})
    for phase, took in limits["phases"].items():
        cells = limits["cells compressed"] if phase.startswith("blosc") else limits["cells"]
        lines.append(f"| limit of the machine: {phase} | {took / max(1, cells) * 1e6:.1f} |")
    return lines


def title(data: Data) -> str:
    return f"{data.name}, {data.cells / 1e6:.3g} M"


def clock(value: float) -> str:
    """Return seconds as a person says them."""
    if value < 90:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def memory(value: float) -> str:
    return f"{value / MIB:.0f} MiB"


def amount(value: float) -> str:
    if value < GB:
        return f"{value / MB:.3g} MB"
    return f"{value / TB:.2f} TB" if value >= TB else f"{value / GB:.3g} GB"


def page(measured: dict, loader: dict[str, float], reads: float) -> str:
    """Return the computed part of the page."""
    rates = Rates(measured)
    tables = {
        "Beside scanpy": comparison_table(measured),
        "Where the time goes": phase_table(measured),
        "Rates": rate_table(rates, loader),
        "Preprocessing: time": preprocess_table(rates),
        "Preprocessing: memory, disk, files, requests": resource_table(rates),
        "An epoch of loading": loader_table(loader, reads),
    }
    return "\n\n".join(f"### {name}\n\n" + "\n".join(lines) for name, lines in tables.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("--loader", type=Path)
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")
    given = parser.parse_args()
    text = page(json.loads(given.measured.read_text()), *loader_rates(given.loader))
    if given.update is None:
        print(text)
        return
    before, rest = given.update.read_text().split(START)
    given.update.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
