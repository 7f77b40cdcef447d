"""What `gpu.py` measures with: a clock of the device, turns, counted operations, peak memory, one table."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from straightforward import LABELS, Architecture
from torch.utils.flop_counter import FlopCounterMode

from perturbdiff.model import Denoiser


class Clock:
    """Seconds of work on the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def __call__(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000


def denoiser(given: argparse.Namespace, genes: int) -> Denoiser:
    """Return the network; the gates are not zero, or half of it would do nothing."""
    torch.manual_seed(0)
    model = Denoiser(
        Architecture(width=given.width, depth=given.depth, heads=given.heads), num_genes=genes, **LABELS
    )
    for name, parameter in model.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def interleaved(works: dict[str, Callable[[], object]], clock: Clock, turns: int) -> dict[str, float]:
    """Return the median seconds of each piece of work; they take turns, the first of which warms up."""
    took: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            seconds = clock(work)
            if turn:
                took[name].append(seconds)
    return {name: statistics.median(times) for name, times in took.items()}


def count(work: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def peak_memory(device: torch.device) -> float:
    """Return the peak of allocated memory in MiB, 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0


def show(rows: list[dict]) -> None:
    columns = {"cells/s": 11.0, "ms": 9.2, "TFLOP/s": 8.1, "of peak": 8.3, "MiB": 9.0, "data share": 11.3}
    print(
        f"{'':24}{'genes':>6}{'sets':>6}"
        + "".join(f"{name:>{int(width) + 1}}" for name, width in columns.items())
    )
    for row in rows:
        line = f"{row['what']:24}{row['genes']:6d}{row['sets']:6d}"
        for name, width in columns.items():
            digits = round((width % 1) * 10)
            line += f" {row[name]:{int(width)}.{digits}f}" if name in row else " " * (int(width) + 1)
        print(line)
