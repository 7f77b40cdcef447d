"""Which small values should become zeros, and what should become of their sum? One model, several ways.

    python lab/zero_levels.py DATA --out FOLDER --task kang600-cd14 [--arm SETTINGS]

Trains the recipe of a task of `lab/realism.py` once, and draws the held-out conditions with levels from training cells
(*levels of training*), from predicted and real control cells of the same context (*of own controls*), or with the lower
of the two; the sum of what became zero is given to the gene's other cells as log1p (as the package did), as amounts,
or not at all. Prints a line for each way, means over the held-out conditions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import realism
import scipy.sparse as sp
import torch
from torch import Tensor

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.conditions.vocabulary import Kind
from perturbdiff.config import recipes
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.evaluation.metrics.populations import condition_metrics
from perturbdiff.generation import depth_ceiling, generate
from perturbdiff.model import Covariates
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store.store import Store
from perturbdiff.training.fit import _levels
from perturbdiff.training.training_stages import train

SHOWN = (
    "energy_distance", "nonzero_ratio", "gene_sd_ratio", "library_ratio", "library_sd_ratio", "total_sd_ratio",
    "detected_sd_ratio", "effect_slope",
)  # fmt: skip


def as_log1p(cells: Tensor, level: Tensor) -> Tensor:
    """Give the sum of what becomes zero to the gene's other cells, as log1p values [S, G]."""
    kept = torch.where(cells < level, 0.0, cells)
    before, after = cells.sum(0), kept.sum(0)
    return torch.where(after > 0, kept * (before / after), cells)


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as log1p": as_log1p,
    "as amounts": lambda cells, level: torch.log1p(_amounts(cells, level)),
    "not at all": lambda cells, level: torch.where(cells < level, 0.0, cells),
}


def _amounts(cells: Tensor, level: Tensor) -> Tensor:
    amounts = torch.expm1(cells)
    kept = torch.where(cells < level, 0.0, amounts)
    before, after = amounts.sum(0), kept.sum(0)
    return torch.where(after > 0, kept * (before / after), amounts)


def _dense(store: Store, rows: np.ndarray) -> np.ndarray:
    return sp.csr_matrix(store.expression(rows)).toarray()


class Sampler:
    """Draws cells of single conditions from a bundle, zeros and totals as predicted."""

    def __init__(self, bundle: Bundle, store: Store) -> None:
        self.bundle, self.store = bundle, store
        self.settings = bundle.config.sample.model_copy(update={"zeros": "predicted", "totals": "predicted"})
        self.schedule = NoiseSchedule(bundle.config.schedule.num_steps, bundle.config.schedule.kind)

    def __call__(
        self, labels: Any, controls: np.ndarray, number: int, seed: int
    ) -> tuple[Tensor, np.ndarray]:
        """Return sets of cells [B, S, G] and the store rows of the controls that they start from."""
        size, rng = self.bundle.config.train.set_size, np.random.default_rng(seed)
        sets = -(-number // size)
        turns = 1 + sets * size // len(controls)
        rows = np.concatenate([rng.permutation(controls) for _ in range(turns)])[: sets * size]
        cells = torch.from_numpy(_dense(self.store, rows)).view(sets, size, -1)
        words = self.bundle.vocabulary
        kinds: tuple[Kind, ...] = ("perturbation", "cell_type", "batch")
        ids = [torch.full((sets,), int(words.encode(kind, [labels[kind]])[0])) for kind in kinds]
        noise, model = torch.Generator().manual_seed(seed), self.bundle.model
        drawn = generate(
            model, self.schedule, self.settings, model.encode(cells), Covariates(*ids), torch.zeros(sets).long(),
            lambda: torch.randn(cells.shape, generator=noise), ceiling=depth_ceiling(self.bundle.target_sum),
        )  # fmt: skip
        return drawn, rows


def compared(task: str, arm: str, data: Path, out: Path) -> pd.DataFrame:
    """Return the means over held-out conditions of each way."""
    stored, split, (preset, *settings) = realism.prepared(task, data, out)
    config = recipes.load(preset, [*settings, *arm.split()])
    bundle = Bundle.load(train(stored, split, out / f"zeros-{task}", config, device="cpu"))
    store, known = Store(stored), bundle.model.zero_level
    draw, table = Sampler(bundle, store), store.conditions
    held = (parts(table, read_split(split), stored) == "test") & ~table["is_control"].to_numpy(bool)
    rows = []
    for place in np.flatnonzero(held):
        condition, control = table.iloc[place], table.iloc[int(table["control"].iloc[place])]
        pool = np.arange(int(control["start"]), int(control["stop"]))
        again, started = draw(control, pool, max(256, len(pool)), 7)
        own = _levels(again.flatten(0, 1), torch.from_numpy(_dense(store, started).astype(bool).sum(0)))
        wanted = np.arange(int(condition["start"]), int(condition["stop"]))
        real = sp.csr_matrix(store.expression(wanted))
        mean = _dense(store, pool).mean(0, dtype=np.float64)
        sets, _ = draw(condition, pool, len(wanted), 11)
        levels = {"of training": known, "of own controls": own, "the lower one": torch.minimum(own, known)}
        for kind, level in {"none": torch.zeros_like(own), **levels}.items():
            for way, change in WAYS.items():
                cells = torch.cat([change(one, level) for one in sets]).minimum(bundle.model.maximum)
                cells = cells[: len(wanted)]
                found = condition_metrics(
                    sp.csr_matrix(cells.numpy()), real, SHOWN, max_cells=2000, seed=0, control=mean
                )
                rows.append({"levels": kind, "sum": way if kind != "none" else "", **found})
    return pd.DataFrame(rows).groupby(["levels", "sum"], sort=False)[list(SHOWN)].mean().reset_index()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="kang600-cd14", choices=realism.TASKS)
    parser.add_argument("--arm", default="", help="settings of the recipe")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print(compared(given.task, given.arm, given.data, given.out).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
