"""CPU time of an optimiser step with the loss of whole sets, against `cross` with as many true sets.

    OMP_NUM_THREADS=1 python lab/family_costs.py [--steps 15]

The recipe `recommended` with random cells. One step of the one and of the other in turn; medians of the steps and of
their ratios, each with its quartiles. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from perturbdiff.config import recipes
from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.model import Denoiser
from perturbdiff.training.module import TrainingModule

SIZES = ((200, 32, 8), (2000, 32, 4), (2000, 64, 4))  # genes, cells of a set, sets of a step
WARM_UP = 3


class Trainee:
    """A network, its cells and its optimiser for one statistic of the loss."""

    def __init__(self, statistic: str, genes: int, cells: int, sets: int) -> None:
        self.config = recipes.load("recommended", [f"loss.mmd_statistic={statistic}"])
        torch.manual_seed(0)
        network = Denoiser(
            self.config.model, num_genes=genes, num_perturbations=4, num_cell_types=3, num_batches=3
        )
        self.module = TrainingModule(network, self.config)
        target, control = torch.poisson(torch.full((2, sets, cells, genes), 0.5)).log1p()
        ids = torch.arange(sets) // 2 % 2 + 1  # twins have the same labels
        self.batch = CellSetBatch(target, control, ids, ids, ids, torch.zeros(sets, dtype=torch.int64), ids)
        self.optimiser = torch.optim.AdamW(self.module.parameters(), lr=1e-4)

    def step(self, number: int) -> float:
        """Take a step and return its CPU seconds."""
        start = time.process_time()
        draws = self.module.draws(self.batch.target.shape, number)
        self.module.objective(self.batch, draws)["total"].backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return time.process_time() - start


def _quartiles(values: np.ndarray, digits: int) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    print("| genes, cells of a set, sets | `cross`, ms | `set`, ms | ratio |\n|---|---|---|---|")
    for size in SIZES:
        pair = Trainee("cross", *size), Trainee("set", *size)
        spent = np.array([[one.step(n) for one in pair] for n in range(WARM_UP + options.steps)])[WARM_UP:]
        times = " | ".join(_quartiles(1e3 * spent[:, k], 0) for k in (0, 1))
        print(
            f"| {', '.join(map(str, size))} | {times} | {_quartiles(spent[:, 1] / spent[:, 0], 2)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
