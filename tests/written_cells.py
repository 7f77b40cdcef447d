"""A store small enough to be written down, for baselines."""

from functools import cached_property

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.baselines.baseline_task import Task

GENES = ["a", "b", "c"]


class Cells:
    """What a baseline asks of a store, from a table of conditions: cell type, batch, perturbation, part, values.

    ``values`` are the log1p cells of a condition [n, G]; conditions stand in the order given.
    """

    control = "control"

    def __init__(self, rows, genes=GENES):
        self.genes, self.n_genes = list(genes), len(genes)
        table = pd.DataFrame([r[:4] for r in rows], columns=["cell_type", "batch", "perturbation", "part"])
        sizes = [self.size(r[4]) for r in rows]
        stop = np.cumsum(sizes)
        table = table.assign(n_cells=sizes, start=stop - sizes, stop=stop)
        table["is_control"] = table["perturbation"] == "control"
        own = {
            (t, b): i
            for i, (t, b, p) in enumerate(table.iloc[:, :3].itertuples(index=False))
            if p == "control"
        }
        table["control"] = [own.get(k, -1) for k in zip(table["cell_type"], table["batch"], strict=True)]
        self.conditions, self.path, self.rows = table, "cells", rows
        self.asked: list[np.ndarray] = []

    @staticmethod
    def size(values):
        return len(values)

    @cached_property
    def values(self):
        return np.vstack([np.asarray(r[4], float) for r in self.rows])

    def expression(self, rows):
        return sparse.csr_matrix(self.dense(rows))

    def dense(self, rows):
        rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
        self.asked.append(rows)
        return self.values[rows].astype(np.float32)

    def task(self, seed=0):
        part = self.conditions["part"].to_numpy()
        wanted = np.flatnonzero((part == "test") & ~self.conditions["is_control"])
        return Task(self, part == "train", wanted, seed)
