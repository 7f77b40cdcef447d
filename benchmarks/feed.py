"""Batches of simulated cells for `gpu.py`: gathered on the host, shipped as sparse rows, densified on the device."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from perturbdiff.loading.batches import dense_log1p

TARGET_SUM, SCALE = 1e4, 10


class Cells:
    """Simulated counts as sparse rows on the host, gathered into pinned memory by several threads."""

    def __init__(self, given: argparse.Namespace, genes: int, device: torch.device) -> None:
        rng = np.random.default_rng(0)
        self.genes, self.device, self.rng = genes, device, rng
        share = 0.15 if genes <= 2000 else 0.05
        lengths = rng.binomial(genes, share, given.stored)
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.counts = rng.geometric(0.5, self.starts[-1]).astype(np.uint16).view(np.int16)
        first = rng.integers(0, genes, given.stored)  # a row's genes: every few ones from a random place
        place = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], lengths)
        step = np.maximum(genes // np.maximum(lengths, 1), 1)
        self.columns = ((np.repeat(first, lengths) + place * np.repeat(step, lengths)) % genes).astype(
            np.int16
        )
        self.depth = rng.lognormal(8.5, 0.3, given.stored).astype(np.float32)
        self.pool = ThreadPoolExecutor(given.threads)
        self.threads = given.threads
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None

    def gather(self, cells: int) -> tuple[Tensor, ...]:
        """Return counts, columns, starts and factors of random cells, in pinned memory."""
        rows = self.rng.integers(0, len(self.depth), cells)
        lengths = self.starts[rows + 1] - self.starts[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        pinned = self.stream is not None
        counts, columns = (
            torch.empty(int(starts[-1]), dtype=torch.int16, pin_memory=pinned) for _ in range(2)
        )

        def part(low: int, high: int) -> None:
            a, b = starts[low], starts[high]
            source = np.arange(a, b) + np.repeat(
                self.starts[rows[low:high]] - starts[low:high], lengths[low:high]
            )
            np.take(self.counts, source, out=counts.numpy()[a:b], mode="clip")
            np.take(self.columns, source, out=columns.numpy()[a:b], mode="clip")

        edges = np.linspace(0, cells, self.threads + 1).astype(int)
        list(self.pool.map(part, edges[:-1], edges[1:]))
        rest = torch.from_numpy(starts), torch.from_numpy(TARGET_SUM / self.depth[rows])
        return counts, columns, *(tensor.pin_memory() if pinned else tensor for tensor in rest)

    def dense(self, sets: int, size: int, parts: tuple[Tensor, ...]) -> Tensor:
        """Return target and control cells [2, sets, size, G] on the device."""
        moved = [part.to(self.device, non_blocking=True) for part in parts]
        found = dense_log1p(*moved, genes=self.genes)
        return (found / SCALE).view(2, sets, size, self.genes)

    def batch(self, sets: int, size: int) -> Tensor:
        return self.dense(sets, size, self.gather(2 * sets * size))
