"""How well do other contexts tell the change of held-out conditions, before any network?

    python lab/other_contexts.py DATA --out FOLDER --tasks kang600-cd4t sim papalexi-2

Tasks are those of `realism.py`, and prepared stores are shared with it. Prints, for each, the squared error of the mean
changes of the held-out conditions over that of no change: all contexts alike, nearly the nearest alone, and weighted by
the distance of their controls as `model.anchor=transferred` does it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from realism import TASKS, prepared

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.config import recipes
from perturbdiff.model import Covariates
from perturbdiff.model.expected_changes import TransferredChanges
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store.pseudobulk import condition_changes
from perturbdiff.store.store import Store
from perturbdiff.training.setup import from_scratch

NEAREST = 100.0  # how much sharper than the weights that were chosen, or than the median distance


def errors(task: str, data: Path, out: Path) -> dict[str, float]:
    """Return the errors of a task's held-out conditions by what tells them."""
    store_path, split, (preset, *settings) = prepared(task, data, out)
    config = recipes.load(preset, [*settings, "model.anchor=transferred"])
    setup = from_scratch(store_path, split, config)
    expected, store = setup.model.expected, Store(store_path)
    if not isinstance(expected, TransferredChanges):
        raise TypeError("the network expects no changes")
    held = np.flatnonzero(parts(store.conditions, read_split(split), store_path) == "test")
    truth = dict(
        condition_changes(
            store, held, ControlPools(store.conditions, Rows(store.conditions), held, quiet=True)
        )
    )
    ids = {
        kind: torch.from_numpy(each)
        for kind, each in setup.vocabulary.encode_conditions(store.conditions).items()
    }
    where = Covariates(*(ids[kind][list(truth)] for kind in ("perturbation", "cell_type", "batch")))
    level = expected.levels[getattr(where, expected.context)]
    wanted = torch.tensor(np.array(list(truth.values())))
    distance = torch.square(expected.levels[:, None] - expected.levels[None]).sum(-1)
    chosen = expected.nearness.clone()
    found = {}
    for name, nearness in (
        ("all alike", torch.zeros_like(chosen)),
        ("nearest", -NEAREST * distance / distance[distance > 0].median()),
        ("weighted", chosen),
    ):
        expected.nearness = nearness
        told = expected(level[:, None], where, torch.ones(()), None)[:, 0] - level
        found[name] = float(torch.square(told - wanted).sum() / torch.square(wanted).sum())
    return found


def main() -> None:
    """Print a line for each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for task in given.tasks:
        found = errors(task, given.data, given.out)
        print(f"{task:14}", *(f"{name} {error:.3f} " for name, error in found.items()), flush=True)


if __name__ == "__main__":
    main()
