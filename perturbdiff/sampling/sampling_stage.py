"""The stage ``sample``: a bundle and a store in, a predictions file out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.pretrained_embeddings import add_tables, read_tables
from perturbdiff.config.settings import SampleConfig
from perturbdiff.embeddings.embedding_tables import SemanticKind
from perturbdiff.predictions import PredictionWriter, append_controls, format_of, requests, seen_facts
from perturbdiff.runtime import provenance
from perturbdiff.runtime.devices import resolve_devices
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track
from perturbdiff.sampling.condition_sampler import ConditionSampler
from perturbdiff.sampling.random_init import reinitialise
from perturbdiff.sampling.recipe_key import recipe_facts
from perturbdiff.sampling.requests import read_requests
from perturbdiff.sampling.worker_processes import drawn
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store

_MEMORY_SHARE = 0.5  # of what is free, for the stores of all processes


def sample(
    bundle: Path,
    store: Path,
    out: Path,
    *,
    split: Path | None = None,
    part: str = "test",
    conditions: Path | None = None,
    config: SampleConfig | None = None,
    seed: int = 0,
    device: str = "auto",
    shard: tuple[int, int] = (0, 1),
    embeddings: Mapping[SemanticKind, Path] | None = None,
    processes: int = 1,
    random_init: bool = False,
    force: bool = False,
) -> Path:
    """Predict conditions with the model ``bundle``.

    Parameters
    ----------
    store
        Gives the control cells; its genes are matched to the model's by name.
    out
        Predictions, .h5ad or .zarr: predicted cells, then the real controls; log1p.
    split, part
        Predict the perturbed conditions of this part, as many cells as there are real ones.
    conditions
        Instead of a split: CSV with ``cell_type, batch, perturbation`` and optionally ``n_cells`` (default: the
        number of the store's cells of that condition, or a set) and ``guidance`` (w, default: the recipe's). A
        column whose one label is 'all' may be left out.
    config
        The reverse process; default: the bundle's.
    seed
        Seed of noise and control cells, and of the weights with ``random_init``.
    device
        ``auto``, ``cpu``, ``cuda``, or several GPUs: ``cuda:0,cuda:1``. Each gets its own process.
    shard
        (i, n): only the i-th of n parts, from 0.
    embeddings
        Semantic tables with further names, by ``perturbation`` or ``cell_type``; of the encoder that made the
        bundle's.
    processes
        Processes on each device; they share out the batches and change no result.
    random_init
        Fresh weights in the bundle's architecture, its units and tables kept: the paper's reference for what a
        trained model is worth.

    Raises
    ------
    UserError
        If labels, genes or units of store and bundle do not fit, or nothing is asked for.
    """
    asked = _asked(split, conditions, shard)
    devices = [name for name in resolve_devices(device) for _ in range(processes)]
    given = embeddings or {}
    inputs: dict[str, Any] = {"bundle": bundle, "store": store, **asked}
    inputs |= {f"embedding.{kind}": path for kind, path in given.items()}
    settings = {
        "sample": config.model_dump(mode="json") if config else None,
        "part": part,
        "shard": list(shard),
        "random_init": random_init,
    }
    folder = format_of(out) == ".zarr"
    with provenance.stage(
        "sample", out, config=settings, inputs=inputs, seed=seed, folder=folder, force=force
    ) as stage:
        if not stage.skip:
            wanted = _wanted(asked, Store(store), part)
            job = Job(bundle, store, wanted, config, seed, given, random_init, processes=len(devices))
            sampler = job.open("cpu" if len(devices) > 1 else devices[0])
            mine = sampler.shard(*shard)
            stage.results |= {
                "conditions": len(mine),
                "cells": int(sampler.wanted["n_cells"].iloc[mine].sum()),
            }
            _write(stage.path, job, sampler, mine, devices)
    return out


@dataclass(frozen=True)
class Job:
    """What each process that samples has to know."""

    bundle: Path
    store: Path
    wanted: pd.DataFrame
    settings: SampleConfig | None
    seed: int
    embeddings: Mapping[SemanticKind, Path]
    random_init: bool
    processes: int = 1
    """How many share this machine's memory."""

    def open(self, device: str) -> ConditionSampler:
        """Return the sampler, its model on ``device``."""
        model = Bundle.load(self.bundle, device)
        add_tables(model, read_tables(self.embeddings))
        if self.random_init:
            reinitialise(model, self.seed)
        settings = self.settings or model.config.sample
        return ConditionSampler(
            model, Store(self.store), self.wanted, settings,
            seed=self.seed, memory_share=_MEMORY_SHARE / self.processes,
        )  # fmt: skip

    def method(self, recipe: str) -> str:
        """Return the name of the method in the predictions."""
        return f"perturbdiff-{recipe}" + ("-random-init" if self.random_init else "")


def _wanted(asked: dict[str, Path], store: Store, part: str) -> pd.DataFrame:
    """Return the conditions to predict."""
    if "split" in asked:
        return requests(store, read_split(asked["split"]), part)
    return read_requests(asked["conditions"], store)


def _asked(split: Path | None, conditions: Path | None, shard: tuple[int, int]) -> dict[str, Path]:
    """Return the file that says what to predict, by its role."""
    if not 0 <= shard[0] < shard[1]:
        raise UserError(f"sample: shard {shard[0]}/{shard[1]} does not exist; shards count from 0/N to N-1/N")
    given = {role: path for role, path in (("split", split), ("conditions", conditions)) if path is not None}
    if len(given) != 1:
        raise UserError("sample: say what to predict: either --split (with --part) or --conditions")
    return given


def _write(path: Path, job: Job, sampler: ConditionSampler, mine: np.ndarray, devices: list[str]) -> None:
    """Write a shard's predicted cells, and the controls of the groups that begin in it."""
    wanted, cells, bundle = sampler.wanted, sampler.store, sampler.bundle
    first = wanted.drop_duplicates(["cell_type", "batch"]).index
    groups = wanted.loc[first[np.isin(first, mine)]]
    batches = sampler.batches(mine)
    if len(devices) > 1 and batches:
        blocks = drawn(job.open, batches, devices[: len(batches)])
    else:
        blocks = map(sampler.draw, batches)
    with PredictionWriter(
        path, sampler.genes,
        method=job.method(bundle.config.name), control=cells.control, target_sum=cells.target_sum,
        dataset=cells.path.resolve().name, facts={**_facts(job, sampler), **_seen(job, sampler, mine)},
    ) as writer:  # fmt: skip
        with track("sampling", int(wanted["n_cells"].iloc[mine].sum())) as work:
            for values, labels in blocks:
                writer.append(values, labels)
                work.advance(len(labels))
        append_controls(writer, cells, groups)


def _facts(job: Job, sampler: ConditionSampler) -> dict[str, Any]:
    """Return what the predictions file tells of how its cells were made."""
    settings, name = sampler.settings, sampler.bundle.config.name
    return {
        **recipe_facts(job.bundle, name, settings, random_init=job.random_init),
        "guidance": "per condition" if "guidance" in sampler.wanted else settings.guidance,
        "num_steps": settings.num_steps,
        "controls": settings.controls,
        "start_level": settings.start_level or sampler.schedule.num_steps,
        "seed": job.seed,
        "random_init": job.random_init,
        "zero_control": sampler.bundle.config.train.zero_control,
    }


def _seen(job: Job, sampler: ConditionSampler, mine: np.ndarray) -> dict[str, Any]:
    """Return how many of the conditions the model was trained on, and the first of them; nothing if unknown."""
    seen = sampler.bundle.seen
    if job.random_init or not len(seen):
        return {}
    labels = ["cell_type", "batch", "perturbation"]
    wanted = sampler.wanted.iloc[mine]
    targets = pd.MultiIndex.from_frame(seen.loc[seen["role"] == "target", labels].astype(str))
    known = pd.MultiIndex.from_frame(wanted[labels].astype(str)).isin(targets)
    return seen_facts(pd.DataFrame(wanted[known]))
