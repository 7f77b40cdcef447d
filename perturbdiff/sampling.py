"""Sampling: conditions and real control cells in, predicted cells out.

Each condition is predicted in sets of m cells, each set from m control cells of the same cell type and batch. All
chance of a condition comes from the seed and its labels, and sets are computed in the same batches whatever the
number of shards, so that shards together hold the very cells of a single run.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from perturbdiff import provenance
from perturbdiff.bundle import Bundle
from perturbdiff.config import SampleConfig
from perturbdiff.data.controls import ControlPools, Rows, generator
from perturbdiff.data.loader import resident
from perturbdiff.data.splits import read_split
from perturbdiff.data.store import Store
from perturbdiff.data.vocabulary import GeneMap
from perturbdiff.devices import resolve_device
from perturbdiff.diffusion.samplers import sample as reverse
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.errors import UserError, listing
from perturbdiff.model import Covariates
from perturbdiff.predictions import LABELS, PredictionWriter, append_controls, format_of, requests
from perturbdiff.progress import track

logger = logging.getLogger(__name__)

_SAME_DEPTH = 0.01


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

    Raises
    ------
    UserError
        If labels, genes or units of store and bundle do not fit, or nothing is asked for.
    """
    asked = _asked(split, conditions, shard)
    where = resolve_device(device)
    inputs: dict[str, Any] = {"bundle": bundle, "store": store, **asked}
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


def read_requests(path: Path, store: Store) -> pd.DataFrame:
    """Read a table of conditions to predict; see `sample`.

    Raises
    ------
    UserError
        If it cannot be read, lacks a column, or a number of cells is not a positive whole number.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a CSV table ({error})") from None
    for name in LABELS:
        only = store.conditions[name].unique()
        if name not in table and list(only) == ["all"]:
            table[name] = "all"
    missing = [name for name in LABELS if name not in table]
    if missing or not len(table):
        what = f"lacks the column {missing[0]}" if missing else "has no rows"
        raise UserError(f"{path}: {what}; it needs cell_type, batch, perturbation and optionally n_cells")
    if table.duplicated(list(LABELS)).any():
        raise UserError(
            f"{path}: a condition occurs twice; give each (cell_type, batch, perturbation) one row"
        )
    known = store.conditions.set_index(list(LABELS))["n_cells"].astype(float)
    rows = pd.MultiIndex.from_frame(pd.DataFrame(table[list(LABELS)]))
    table["there"] = known.reindex(rows).to_numpy()
    if "n_cells" not in table:
        return table.assign(n_cells=table["there"])
    text = table["n_cells"].str.strip()
    number = pd.Series(pd.to_numeric(text, errors="coerce"), index=table.index)
    wrong = text.ne("") & ~((number >= 1) & (number % 1 == 0))
    if wrong.any():
        raise UserError(f"{path}: n_cells must be whole numbers above 0, found '{text[wrong].iloc[0]}'")
    return table.assign(n_cells=number.where(text.ne(""), table["there"]))


def _state(words: tuple[int, ...]) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class _Set:
    """One set to sample: its row among the requests, its number there and how many of its cells are kept."""

    request: int
    number: int
    keep: int


class ConditionSampler:
    """Draws the cells of requested conditions.

    Parameters
    ----------
    bundle
        The model, on the device where it is to run.
    store
        Where the controls are.
    wanted
        ``cell_type, batch, perturbation, n_cells``.
    settings
        The reverse process.
    seed
        Seed of noise and control cells.

    Attributes
    ----------
    genes
        Columns of the output: the model's genes that the store has.

    Raises
    ------
    UserError
        If labels, genes or units do not fit.
    """

    def __init__(
        self, bundle: Bundle, store: Store, wanted: pd.DataFrame, settings: SampleConfig, *, seed: int
    ) -> None:
        self.bundle, self.settings, self.seed = bundle, settings, seed
        self.size = settings.set_size or bundle.config.train.set_size
        self.schedule = NoiseSchedule(bundle.config.schedule.num_steps, bundle.config.schedule.kind)
        if settings.num_steps > self.schedule.num_steps:
            raise UserError(
                f"sample.num_steps={settings.num_steps} is more than the model's {self.schedule.num_steps} levels"
            )
        self.wanted = wanted.assign(n_cells=wanted["n_cells"].fillna(self.size).astype(int)).reset_index(
            drop=True
        )
        self.gene_map = GeneMap(store.genes, bundle.genes, name=str(store.path))
        logger.info("%s", self.gene_map.report())
        missing = set(self.gene_map.missing)
        self._shared = np.array([gene not in missing for gene in bundle.genes])
        self.genes = [gene for gene in bundle.genes if gene not in missing]
        self._check_depth(store)
        self._ids = self._encode(store)
        self._dataset = self._input_layer(store)
        self._rows, self._table = self._pools(store)
        self.store: Any = resident(store)
        self.device = bundle.model.unit.device

    def _check_depth(self, store: Store) -> None:
        ours, theirs = self.bundle.target_sum, store.target_sum
        self.ceiling = math.log1p(theirs) if math.isfinite(theirs) else math.inf
        if ours is None or not math.isfinite(theirs):
            logger.info("%s: the depth its values refer to is unknown to the store or the bundle", store.path)
        elif abs(theirs / ours - 1) > _SAME_DEPTH:
            raise UserError(
                f"{store.path}: cells are scaled to {theirs:g} counts, the model was trained at {ours:g}; "
                f"preprocess again with --set data.target_sum={ours:g}"
            )

    def _encode(self, store: Store) -> Covariates:
        words, used = self.bundle.vocabulary, self.bundle.config.model.covariates
        if self.bundle.config.train.zero_control:
            logger.warning("the model knows contexts only (pretraining): perturbations make no difference")
        label = self.wanted["perturbation"].where(self.wanted["perturbation"] != store.control, words.control)
        told = "perturbation" in used and not self.bundle.config.train.zero_control
        perturbation = words.encode("perturbation", label, strict=told)
        cell_type = words.encode("cell_type", self.wanted["cell_type"], strict="cell_type" in used)
        batch = words.encode("batch", self.wanted["batch"])
        new = sorted(set(self.wanted["batch"][batch == 0]))
        if new and "batch" in used:
            logger.info("batches unknown to the model, predicted as an average batch: %s", listing(new))
        if not told:
            perturbation = np.zeros_like(perturbation)
        return Covariates(*(torch.from_numpy(ids) for ids in (perturbation, cell_type, batch)))

    def _input_layer(self, store: Store) -> int:
        names, name = self.bundle.vocabulary.datasets, store.path.resolve().name
        if len(names) > 1 and name not in names:
            raise UserError(
                f"{store.path}: the model has input layers for the data sets {listing(names)}, none for '{name}'; "
                "finetune it on this store, or name the store's folder like one of them"
            )
        return names.index(name) if name in names else 0

    def _pools(self, store: Store) -> tuple[ControlPools, int]:
        """Return the control cells of each request: requests are appended to the store's conditions."""
        table = store.conditions
        own = pd.DataFrame(table[table["is_control"].to_numpy(bool)])
        own["control_id"] = own.index
        pairs = self.wanted[["cell_type", "batch"]].astype(str)
        found = pairs.merge(
            own[["cell_type", "batch", "control_id"]].astype({"cell_type": str, "batch": str}), how="left"
        )
        asked = pairs.assign(
            perturbation=self.wanted["perturbation"], start=0, stop=0, is_control=False,
            control=found["control_id"].fillna(-1).astype(int).to_numpy(),
        )  # fmt: skip
        columns = ["cell_type", "batch", "perturbation", "start", "stop", "is_control", "control"]
        text = table[columns].astype({"cell_type": str, "batch": str})
        both = pd.DataFrame(pd.concat([text, asked[columns]], ignore_index=True))
        pools = ControlPools(both, Rows(both), np.arange(len(table), len(both)))
        few = sum(pools.rows.count[pools.pool(i)].sum() < self.size for i in range(len(table), len(both)))
        if few:
            logger.info(
                "%d of %d conditions have fewer than %d control cells: their sets repeat some",
                few, len(asked), self.size,
            )  # fmt: skip
        return pools, len(table)

    def _blocks(self) -> list[list[int]]:
        """Return whole conditions in blocks of at least a batch of sets; a block is never cut by a shard."""
        blocks: list[list[int]] = [[]]
        sets = 0
        for request, cells in enumerate(self.wanted["n_cells"]):
            if sets >= self.settings.sets_per_batch:
                blocks.append([])
                sets = 0
            blocks[-1].append(request)
            sets += -(-int(cells) // self.size)
        return blocks

    def shard(self, index: int, number: int) -> np.ndarray:
        """Return the requests of a shard, int [n]: successive blocks, evenly by their sets."""
        blocks = self._blocks()
        sizes = np.array(
            [sum(-(-int(self.wanted["n_cells"].iloc[r]) // self.size) for r in b) for b in blocks]
        )
        middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
        mine = [b for b, place in zip(blocks, middle, strict=True) if int(place * number) == index]
        if not mine:
            logger.warning(
                "shard %d/%d has no condition: there are only %d blocks", index, number, len(blocks)
            )
        return np.array([r for block in mine for r in block], dtype=int)

    def blocks(self, mine: np.ndarray) -> Iterator[tuple[np.ndarray, pd.DataFrame]]:
        """Yield log1p cells [n, genes] and their labels, a batch of sets at a time, conditions in order."""
        chosen = set(map(int, mine))
        for block in self._blocks():
            if block[0] not in chosen:
                continue
            sets = [s for request in block for s in self._sets(request)]
            for start in range(0, len(sets), self.settings.sets_per_batch):
                yield self._batch(sets[start : start + self.settings.sets_per_batch])

    def _sets(self, request: int) -> list[_Set]:
        cells = int(self.wanted["n_cells"].iloc[request])
        return [
            _Set(request, k, min(self.size, cells - k * self.size)) for k in range(-(-cells // self.size))
        ]

    def _words(self, request: int, number: int) -> tuple[int, ...]:
        """Return what seeds a set's noise: the seed, its condition's labels, its number; 0 seeds its controls."""
        labels = "\0".join(str(self.wanted[name].iloc[request]) for name in LABELS)
        digest = hashlib.sha256(labels.encode()).digest()
        return (self.seed, int.from_bytes(digest[:8], "little"), number)

    @torch.inference_mode()
    def _batch(self, sets: list[_Set]) -> tuple[np.ndarray, pd.DataFrame]:
        model, device = self.bundle.model, self.device
        control = model.encode(self._controls(sets).to(device))
        if self.bundle.config.train.zero_control:
            control = torch.zeros_like(control)
        rows = torch.tensor([one.request for one in sets])
        covariates = Covariates(*(ids[rows].to(device) for ids in self._ids))
        dataset = torch.full((len(sets),), self._dataset, device=device)
        # Noise is drawn on the CPU: the same on every machine.
        noise = [
            torch.Generator().manual_seed(_state(self._words(one.request, one.number + 1))) for one in sets
        ]

        def denoise(x: Tensor, level: int, previous: Tensor | None, conditional: bool) -> Tensor:  # noqa: FBT001
            t = torch.full((len(sets),), level, device=device)
            told = covariates if conditional else None
            return model(x, t, control, told, self_condition=previous, dataset=dataset)

        def draw() -> Tensor:
            return torch.stack([torch.randn(control.shape[1:], generator=g) for g in noise]).to(device)

        found = reverse(denoise, draw, self.schedule, self.settings, clean=self._clean)
        log1p = model.decode(found).clamp_max(self.ceiling).cpu().numpy()[:, :, self._shared]
        values = np.concatenate([log1p[i, : one.keep] for i, one in enumerate(sets)])
        repeats = np.repeat([one.request for one in sets], [one.keep for one in sets])
        return values, self.wanted[list(LABELS)].iloc[repeats].reset_index(drop=True)

    def _clean(self, estimate: Tensor) -> Tensor:
        if self.settings.cutoff:
            estimate = torch.where(estimate < self.settings.cutoff, 0.0, estimate)
        return self.bundle.model.clean(estimate)

    def _controls(self, sets: list[_Set]) -> Tensor:
        """Return the control cells [B, S, G] of the sets, log1p.

        The sets of a condition share out its control cells in random order and begin anew when all are used:
        cells drawn twice would make the predicted population narrower than the controls are.
        """
        rows = []
        for one in sets:
            pool = self._rows.pool(self._table + one.request)
            total = int(self._rows.rows.count[pool].sum())
            places = np.arange(one.number * self.size, (one.number + 1) * self.size)
            turns = range(places[0] // total, places[-1] // total + 1)
            order = np.concatenate(
                [generator(*self._words(one.request, 0), turn).permutation(total) for turn in turns]
            )
            rows.append(self._rows.rows.pooled(pool, order[places - places[0] // total * total]))
        values = self.gene_map.dense(self.store.expression(np.concatenate(rows)))
        return torch.from_numpy(values).view(len(sets), self.size, -1)
