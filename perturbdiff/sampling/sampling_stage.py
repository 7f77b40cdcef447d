"""The stage ``sample``: reads a bundle and a store, and writes a predictions file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from perturbdiff.checkpoint.bundle import Bundle, build_model, frozen_widths
from perturbdiff.checkpoint.pretrained_embeddings import add_tables, read_tables
from perturbdiff.conditions.condition import LABELS
from perturbdiff.config.settings import SampleConfig
from perturbdiff.embeddings.embedding_tables import SemanticKind
from perturbdiff.method import Method
from perturbdiff.predictions import PredictionWriter, append_controls, format_of, requests, seen_facts
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track
from perturbdiff.runtime.resources import resolve_devices
from perturbdiff.sampling.condition_sampler import ConditionSampler
from perturbdiff.sampling.shards import drawn
from perturbdiff.sampling.wanted_conditions import read_requests
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store

_DIGITS = 16


def reinitialise(bundle: Bundle, seed: int) -> None:
    """Give the bundle's network fresh weights; units, gene maxima and frozen tables stay.

    Parameters
    ----------
    bundle
        The bundle to change; its network stays on its device.
    seed
        Seed of the weights. The global generator is not changed.
    """
    old = bundle.model
    weights = old.state_dict()
    num_doses = len(weights.get("covariate_encoder.dose.vectors", ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(
            bundle.config,
            bundle.genes,
            bundle.vocabulary,
            semantic=frozen_widths(weights),
            num_doses=num_doses,
        )
    model.load_state_dict(dict(old.named_buffers()), strict=False)
    model.zero_level.zero_()  # it was measured with the trained weights
    bundle.model = model.to(old.unit.device).eval()


def method_of(bundle: Path, name: str, settings: SampleConfig, *, random_init: bool) -> Method:
    """Return a model's recipe name, a key of everything except seeds that determines its predictions, and its seed.

    Parameters
    ----------
    bundle
        The trained model. Its manifest says how and on what it was trained. Without a manifest, only its recipe
        enters the key.
    name
        The recipe's name.
    settings
        The reverse process.
    random_init
        Whether the weights are untrained.

    Returns
    -------
    Method
        With ``recipe``, ``recipe_key`` (hexadecimal) and, if known, ``train_seed``. Finetuned models share a key only
        if they started from the same model.
    """
    manifest = provenance.read_manifest(bundle) or {}
    inputs = {
        role: entry.get("sha256")
        for role, entry in (manifest.get("inputs") or {}).items()
        if isinstance(entry, dict)
    }
    recipe = manifest.get("config") or (bundle / "config.json").read_text()
    sampling = settings.model_dump(mode="json", exclude={"values"})  # the same method in other units
    made = {"stage": manifest.get("stage"), "config": recipe, "inputs": inputs, "sampling": sampling}
    digest = hashlib.sha256(provenance.as_json({**made, "random_init": random_init}).encode()).hexdigest()
    seed = manifest.get("seed")
    return Method(recipe=name, recipe_key=digest[:_DIGITS], train_seed=None if seed is None else int(seed))


def sample(
    bundle: Path,
    store: Path,
    out: Path,
    *,
    split: Path | None = None,
    part: str = "test",
    conditions: Path | None = None,
    columns: Mapping[str, str | None] | None = None,
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
        The store with the control cells. Its genes are matched to the model's genes by name.
    out
        Predictions, .h5ad or .zarr: predicted cells, followed by the real controls, in log1p units or counts.
    split, part
        Predict the perturbed conditions of this part, with as many cells as there are real ones.
    conditions
        Instead of a split: CSV with ``cell_type, batch, perturbation`` and optionally ``n_cells`` (default: the
        number of cells of that condition in the store, or one set) and ``guidance`` (w, default: as in the recipe).
        A column whose only label is 'all' may be left out.
    columns
        The names of ``perturbation``, ``cell_type`` and ``batch`` in that table where they are others.
    config
        The reverse process; default: the bundle's.
    seed
        Seed of noise and control cells, and of the weights with ``random_init``.
    device
        ``auto``, ``cpu``, ``cuda``, or several GPUs: ``cuda:0,cuda:1``. Each gets its own process.
    shard
        (i, n): only the i-th of n parts, from 0.
    embeddings
        Semantic tables with further names, by ``perturbation`` or ``cell_type``, from the encoder that made those of
        the bundle.
    processes
        Processes on each device. They share the batches and change no result.
    random_init
        Use fresh weights in the bundle's architecture and keep its units and tables: the paper's reference for the
        gain by training.

    Raises
    ------
    UserError
        If labels, genes or units of store and bundle do not fit, or neither a split nor conditions are given.
    """
    requested = _list_of_conditions(split, conditions, shard)
    devices = [name for name in resolve_devices(device) for _ in range(processes)]
    tables = embeddings or {}
    inputs: dict[str, Any] = {"bundle": bundle, "store": store, **requested}
    inputs |= {f"embedding.{kind}": path for kind, path in tables.items()}
    settings = {
        "sample": config.model_dump(mode="json") if config else None,
        "part": part,
        "shard": list(shard),
        "random_init": random_init,
    }
    if named := {label: column for label, column in (columns or {}).items() if column is not None}:
        settings["columns"] = named
    folder = format_of(out) == ".zarr"
    with provenance.stage(
        "sample", out, config=settings, inputs=inputs, seed=seed, folder=folder, force=force
    ) as stage:
        if not stage.skip:
            wanted = _wanted(requested, Store(store), part, columns)
            job = Job(bundle, store, wanted, config, seed, tables, random_init)
            sampler = job.open("cpu" if len(devices) > 1 else devices[0])
            chosen = sampler.shard(*shard)
            stage.results |= {
                "conditions": len(chosen),
                "cells": int(sampler.wanted["n_cells"].iloc[chosen].sum()),
            }
            _write(stage.path, job, sampler, chosen, devices)
    return out


@dataclass(frozen=True)
class Job:
    """What each sampling process needs to know."""

    bundle: Path
    store: Path
    wanted: pd.DataFrame
    settings: SampleConfig | None
    seed: int
    embeddings: Mapping[SemanticKind, Path]
    random_init: bool

    def open(self, device: str) -> ConditionSampler:
        """Return the sampler with its model on ``device``."""
        model = Bundle.load(self.bundle, device)
        add_tables(model, read_tables(self.embeddings))
        if self.random_init:
            reinitialise(model, self.seed)
        settings = self.settings or model.config.sample
        return ConditionSampler(
            model, Store(self.store), self.wanted, settings, seed=self.seed,
        )  # fmt: skip

    def method(self, recipe: str) -> str:
        """Return the name of the method in the predictions."""
        return f"perturbdiff-{recipe}" + ("-random-init" if self.random_init else "")


def _wanted(
    requested: dict[str, Path], store: Store, part: str, columns: Mapping[str, str | None] | None
) -> pd.DataFrame:
    """Return the conditions to predict."""
    if "split" in requested:
        return requests(store, read_split(requested["split"]), part)
    return read_requests(requested["conditions"], store, columns)


def _list_of_conditions(
    split: Path | None, conditions: Path | None, shard: tuple[int, int]
) -> dict[str, Path]:
    """Return the file that names the conditions to predict, by its role."""
    if not 0 <= shard[0] < shard[1]:
        raise UserError(f"sample: shard {shard[0]}/{shard[1]} does not exist; shards count from 0/N to N-1/N")
    lists = {role: path for role, path in (("split", split), ("conditions", conditions)) if path is not None}
    if len(lists) != 1:
        raise UserError("sample: say what to predict: either --split (with --part) or --conditions")
    return lists


def _write(path: Path, job: Job, sampler: ConditionSampler, chosen: np.ndarray, devices: list[str]) -> None:
    """Write a shard's predicted cells, and the controls of the groups that begin in it."""
    wanted, cells, bundle = sampler.wanted, sampler.store, sampler.bundle
    first = wanted.drop_duplicates(["cell_type", "batch"]).index
    groups = wanted.loc[first[np.isin(first, chosen)]]
    batches = sampler.batches(chosen)
    if len(devices) > 1 and batches:
        blocks = drawn(job.open, batches, devices[: len(batches)])
    else:
        blocks = map(sampler.draw, batches)
    with PredictionWriter(
        path, sampler.genes,
        method=job.method(bundle.config.name), control=cells.control, target_sum=cells.target_sum,
        dataset=cells.path.resolve().name, facts={**_facts(job, sampler), **_seen(job, sampler, chosen)},
        predicted=sampler.predicted,
    ) as writer:  # fmt: skip
        with track("sampling", int(wanted["n_cells"].iloc[chosen].sum())) as work:
            for values, labels in blocks:
                writer.append(values, labels)
                work.advance(len(labels))
        append_controls(writer, cells, groups)


def _facts(job: Job, sampler: ConditionSampler) -> dict[str, Any]:
    """Return the facts that the predictions file records about how its cells were made."""
    settings, name = sampler.settings, sampler.bundle.config.name
    made_by = method_of(job.bundle, name, settings, random_init=job.random_init)
    return {
        **replace(made_by, seed=job.seed, controls=settings.controls).to_json(),
        "guidance": "per condition" if "guidance" in sampler.wanted else settings.guidance,
        "num_steps": settings.num_steps,
        "start_level": settings.start_level or sampler.schedule.num_steps,
        "random_init": job.random_init,
        "zero_control": sampler.bundle.config.train.zero_control,
    }


def _seen(job: Job, sampler: ConditionSampler, chosen: np.ndarray) -> dict[str, Any]:
    """Return how many of the conditions were in the training data, and the first of them; nothing if unknown."""
    seen = sampler.bundle.seen
    if job.random_init or not len(seen):
        return {}
    labels = list(LABELS)
    wanted = sampler.wanted.iloc[chosen]
    targets = pd.MultiIndex.from_frame(seen.loc[seen["role"] == "target", labels].astype(str))
    known = pd.MultiIndex.from_frame(wanted[labels].astype(str)).isin(targets)
    return seen_facts(pd.DataFrame(wanted[known]))
