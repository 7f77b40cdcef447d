"""The stage ``sample``: a bundle and a store in, a predictions file out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff import provenance
from perturbdiff.bundle import Bundle
from perturbdiff.config import SampleConfig
from perturbdiff.data.embeddings import SemanticKind
from perturbdiff.data.splits import read_split
from perturbdiff.data.store import Store
from perturbdiff.devices import resolve_device
from perturbdiff.errors import UserError
from perturbdiff.predictions import PredictionWriter, append_controls, format_of, requests
from perturbdiff.progress import track
from perturbdiff.sampling.conditions import ConditionSampler
from perturbdiff.sampling.requests import read_requests
from perturbdiff.semantics import add_tables, read_tables


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
        number of the store's cells of that condition, or a set). A column whose one label is 'all' may be left out.
    config
        The reverse process; default: the bundle's.
    seed
        Seed of noise and control cells.
    shard
        (i, n): only the i-th of n parts, from 0.
    embeddings
        Semantic tables with further names, by ``perturbation`` or ``cell_type``; of the encoder that made the
        bundle's.

    Raises
    ------
    UserError
        If labels, genes or units of store and bundle do not fit, or nothing is asked for.
    """
    asked = _asked(split, conditions, shard)
    where = resolve_device(device)
    given = embeddings or {}
    inputs: dict[str, Any] = {"bundle": bundle, "store": store, **asked}
    inputs |= {f"embedding.{kind}": path for kind, path in given.items()}
    settings = {
        "sample": config.model_dump(mode="json") if config else None,
        "part": part,
        "shard": list(shard),
    }
    folder = format_of(out) == ".zarr"
    with provenance.stage(
        "sample", out, config=settings, inputs=inputs, seed=seed, folder=folder, force=force
    ) as stage:
        if not stage.skip:
            model, cells = Bundle.load(bundle, where), Store(store)
            add_tables(model, read_tables(given))
            if "split" in asked:
                wanted = requests(cells, read_split(asked["split"]), part)
            else:
                wanted = read_requests(asked["conditions"], cells)
            sampler = ConditionSampler(model, cells, wanted, config or model.config.sample, seed=seed)
            mine = sampler.shard(*shard)
            stage.results |= {
                "conditions": len(mine),
                "cells": int(sampler.wanted["n_cells"].iloc[mine].sum()),
            }
            _write(stage.path, sampler, mine)
    return out


def _asked(split: Path | None, conditions: Path | None, shard: tuple[int, int]) -> dict[str, Path]:
    """Return the file that says what to predict, by its role."""
    if not 0 <= shard[0] < shard[1]:
        raise UserError(f"sample: shard {shard[0]}/{shard[1]} does not exist; shards count from 0/N to N-1/N")
    given = {role: path for role, path in (("split", split), ("conditions", conditions)) if path is not None}
    if len(given) != 1:
        raise UserError("sample: say what to predict: either --split (with --part) or --conditions")
    return given


def _write(path: Path, sampler: ConditionSampler, mine: np.ndarray) -> None:
    """Write a shard's predicted cells, and the controls of the groups that begin in it."""
    wanted, cells, bundle = sampler.wanted, sampler.store, sampler.bundle
    first = wanted.drop_duplicates(["cell_type", "batch"]).index
    groups = wanted.loc[first[np.isin(first, mine)]]
    with PredictionWriter(
        path, sampler.genes,
        method=f"perturbdiff-{bundle.config.name}", control=cells.control, target_sum=cells.target_sum,
        dataset=cells.path.resolve().name,
        facts={"guidance": sampler.settings.guidance, "num_steps": sampler.settings.num_steps, "seed": sampler.seed},
    ) as writer:  # fmt: skip
        with track("sampling", int(wanted["n_cells"].iloc[mine].sum())) as work:
            for values, labels in sampler.blocks(mine):
                writer.append(values, labels)
                work.advance(len(labels))
        append_controls(writer, cells, groups)
