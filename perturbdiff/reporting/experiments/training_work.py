"""What a training cost: the floating-point operations behind each run of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perturbdiff.reporting.loading.results import Run, read_json
from perturbdiff.runtime.files import sha256

CONVENTION = (
    "FLOPs are counted, not measured: two for each multiply-add of a matrix product in a forward pass, "
    "three times that for forward and backward, one more forward pass in the share of sets that are "
    "self-conditioned. This is multiplied by the cells of a step and by the steps until the weights that were "
    "kept. Loss, optimiser and the reading of data are left out, and so is the pretraining that a finetuned model "
    "started from."
)


@dataclass(frozen=True)
class Work:
    """Of one bundle.

    Attributes
    ----------
    parameters
        Learned numbers of the network.
    steps
        Optimiser steps until the weights in the bundle.
    flops
        Floating-point operations of these steps: two for each multiply-add of a matrix product, a backward pass as
        two forward passes. Of this training alone, without one that it started from.
    """

    parameters: int
    steps: int
    flops: float


def works(bundles: Mapping[Run, Path]) -> dict[Run, Work]:
    """Return the work behind each run, given the bundle it was drawn with.

    Networks of one architecture are built once.

    Raises
    ------
    UserError
        If a bundle is damaged.
    """
    built: dict[str, tuple[int, float]] = {}
    by_run = {}
    for run, path in bundles.items():
        record = read_json(path / "config.json")
        facts, config = record.get("training") or {}, record.get("config") or {}
        words = [sha256(path / name) for name in ("genes.json", "vocabulary.json")]
        key = repr((config.get("model"), config.get("train"), *words))
        if key not in built:
            built[key] = _counted(path)
        steps = int(facts.get("chosen_step") or facts.get("steps") or 0)
        by_run[run] = Work(built[key][0], steps, built[key][1] * steps)
    return by_run


def _counted(path: Path) -> tuple[int, float]:
    """Return parameters, and operations of a step, of the network in a bundle."""
    from perturbdiff.checkpoint.bundle import Bundle  # torch: only pages that need it load it
    from perturbdiff.training.network_size import by_group, flops_per_step

    bundle = Bundle.load(path)
    return sum(by_group(bundle.model).values()), flops_per_step(bundle.model, bundle.config)
