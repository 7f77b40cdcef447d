"""Sample the cells of requested conditions.

Each condition is predicted in sets of m cells, each set from m control cells of the same cell type and batch. The
random numbers of a condition depend only on the seed and its labels, and sets are computed in the same batches for any
number of shards. All shards together therefore contain exactly the cells of a single run.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from torch import Tensor

from perturbdiff.checkpoint.bundle import SAME_DEPTH, Bundle
from perturbdiff.checkpoint.pretrained_embeddings import teach
from perturbdiff.conditions.condition import LABELS, SET, conditions_of
from perturbdiff.conditions.vocabulary import GeneMap, Kind
from perturbdiff.config.settings import SampleConfig
from perturbdiff.diffusion.samplers import set_noise
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.generation import depth_ceiling, generate
from perturbdiff.io.derived_matrices import HIGHEST
from perturbdiff.model import Covariates
from perturbdiff.model.cell_sizes import Pool
from perturbdiff.predictions import DEPTH
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.seeds import generator, state, words
from perturbdiff.sampling.count_draws import CountDraws
from perturbdiff.sampling.starting_controls import ControlSets
from perturbdiff.store.store import Store, dataset_of

logger = logging.getLogger(__name__)

ORIGIN = "path"
"""Attribute of a table of requests with the file that they were read from."""


def check_depth(bundle: Bundle, store: Store) -> float:
    """Return the largest log1p value that a cell with the store's depth can have.

    Raises
    ------
    UserError
        If store and bundle are scaled to different depths.
    """
    ours, theirs = bundle.target_sum, store.target_sum
    if ours is None or not math.isfinite(theirs):
        logger.info("%s: the depth its values refer to is unknown to the store or the bundle", store.path)
    elif abs(theirs / ours - 1) > SAME_DEPTH:
        raise UserError(
            f"{store.path}: cells are scaled to {theirs:g} counts, the model was trained at {ours:g}; "
            f"preprocess again with --set data.target_sum={ours:g}"
        )
    return depth_ceiling(theirs)


def encode(bundle: Bundle, store: Store, wanted: pd.DataFrame) -> Covariates:
    """Return the ids of the requests' labels, int64 [n] each.

    Labels that the model was not trained with are added to it if its semantic tables have them.

    Raises
    ------
    UserError
        If the model is given a perturbation or cell type that it cannot know, neither the store nor the model has a
        cell type, or a batch that neither has looks like one that they have.
    """
    words, used = bundle.vocabulary, bundle.config.model.covariates
    if bundle.config.train.zero_control:
        logger.warning("the model knows contexts only (pretraining): perturbations make no difference")
    label = wanted["perturbation"].where(wanted["perturbation"] != store.control, words.control)
    told = "perturbation" in used and not bundle.config.train.zero_control
    teach(bundle, {"cell_type": wanted["cell_type"], **({"perturbation": label} if told else {})})
    words = bundle.vocabulary
    _check_contexts(bundle, store, wanted)
    try:
        perturbation = words.encode("perturbation", label, strict=told)
    except UserError as error:
        raise UserError(f"{_origin(wanted)}{error}") from None
    cell_type = words.encode("cell_type", wanted["cell_type"], strict="cell_type" in used)
    batch = words.encode("batch", wanted["batch"])
    new = sorted(set(wanted["batch"][batch == 0]))
    if new and "batch" in used:
        logger.warning("batches unknown to the model, predicted as an average batch: %s", listing(new))
    if not told:
        perturbation = np.zeros_like(perturbation)
    return Covariates(*(torch.from_numpy(ids) for ids in (perturbation, cell_type, batch)))


def _origin(wanted: pd.DataFrame) -> str:
    """Return the file of a table of requests with a colon behind it, if it is from a file."""
    return f"{wanted.attrs[ORIGIN]}: " if ORIGIN in wanted.attrs else ""


def _check_contexts(bundle: Bundle, store: Store, wanted: pd.DataFrame) -> None:
    """Refuse a cell type that neither the store nor the model has, and such a batch if it looks misspelt."""
    kinds: tuple[Kind, ...] = ("cell_type", "batch")
    for kind in kinds:
        have = [str(label) for label in store.conditions[kind].unique()]
        known = {*have, *getattr(bundle.vocabulary, kind)}
        for label in dict.fromkeys(wanted[kind]):
            near = nearest(label, sorted(known))
            if label in known or (kind == "batch" and not near):
                continue
            what = f"the {kind.replace('_', ' ')} '{label}'"
            hint = near or f"; the store has {listing(have)}"
            new = " a batch that is really new needs a name unlike the others" if kind == "batch" else ""
            raise UserError(f"{_origin(wanted)}neither {store.path} nor the model has {what}{hint}{new}")


def input_layer(bundle: Bundle, store: Store) -> int:
    """Return the number of the model's data set whose input layers fit this store.

    Raises
    ------
    UserError
        If the model has several data sets and none of them is this store.
    """
    names, name = bundle.vocabulary.datasets, dataset_of(store.path)
    if len(names) > 1 and name not in names:
        raise UserError(
            f"{store.path}: the model has input layers for the data sets {listing(names)}, none for '{name}'; "
            "finetune it on this store, or name the store's folder like one of them"
        )
    return names.index(name) if name in names else 0


def _guidance(wanted: pd.DataFrame, settings: SampleConfig) -> Tensor | None:
    """Return w of each request [n, 1, 1], or None if all use the value in the settings."""
    if "guidance" not in wanted:
        return None
    each = wanted["guidance"].fillna(settings.guidance).to_numpy(np.float32)
    return torch.from_numpy(each)[:, None, None]


class SetToDraw(NamedTuple):
    """One set to sample: the row of its request, its number in that request and how many of its cells are kept."""

    request: int
    number: int
    keep: int


Cells = tuple[np.ndarray | sparse.csr_matrix, pd.DataFrame]
"""Predicted cells [n, genes], float32 log1p or int32 counts in CSR, and their labels, with counts also their depth."""

_ROUNDING = 1  # word behind those of a set's noise: seeds the rounding of its counts


class ConditionSampler:
    """Samples the cells of requested conditions.

    Parameters
    ----------
    bundle
        The model, on the device where it runs.
    store
        The store with the control cells.
    wanted
        ``cell_type, batch, perturbation, n_cells`` and optionally ``guidance``, which overrides the settings.
    settings
        The reverse process.
    seed
        Seed of the noise and of the choice of control cells.

    Attributes
    ----------
    genes
        Columns of the output: the model's genes that the store has; with counts all genes of the store.
    predicted
        With counts: which of them the model predicts, bool [genes]; else None.

    Raises
    ------
    UserError
        If labels, genes or units do not fit.
    """

    def __init__(
        self,
        bundle: Bundle,
        store: Store,
        wanted: pd.DataFrame,
        settings: SampleConfig,
        *,
        seed: int,
    ) -> None:
        self.bundle, self.settings, self.seed = bundle, settings, seed
        self.size = settings.set_size or bundle.config.train.set_size
        self.schedule = NoiseSchedule(bundle.config.schedule.num_steps, bundle.config.schedule.kind)
        settings.check_levels(self.schedule.num_steps)
        self.wanted = wanted.assign(n_cells=wanted["n_cells"].fillna(self.size).astype(int)).reset_index(
            drop=True
        )
        self.gene_map = GeneMap(store.genes, bundle.genes, name=str(store.path))
        logger.info("%s", self.gene_map.report())
        missing = set(self.gene_map.missing)
        self._shared = np.array([gene not in missing for gene in bundle.genes])
        self._draws = CountDraws(store, self.gene_map) if settings.values == "counts" else None
        self.predicted = None if self._draws is None else self._draws.predicted
        self.genes = (
            [gene for gene in bundle.genes if gene not in missing] if self._draws is None else store.genes
        )
        self.ceiling = check_depth(bundle, store)
        if settings.zeros != "predicted" and not bundle.model.zero_level.any():
            logger.warning(
                f"sample.zeros={settings.zeros}: the model knows no levels (untrained, trained without model.gate, or "
                "by an earlier version); zeros stay as predicted"
            )
        self._ids = encode(bundle, store, self.wanted)
        self._dataset = input_layer(bundle, store)
        self._controls = ControlSets(
            store, self.wanted, self.gene_map, size=self.size, seed=seed, choice=settings.controls,
            by_set=bundle.config.loss.mmd_statistic == "set",
        )  # fmt: skip
        self._labels = conditions_of(self.wanted)
        sets = -(-self.wanted["n_cells"].to_numpy(np.int64) // self.size)
        self._first_set = np.cumsum(sets) - sets
        self._guidance = _guidance(self.wanted, settings)
        self.store = store
        self.device = bundle.model.unit.device
        self._settles = self._settles_means()

    def _settles_means(self) -> bool:
        """Return whether means are settled: of unseen conditions, unless sets are meant to differ in them."""
        expected = self.bundle.model.expected
        if expected is None or self.bundle.config.loss.mmd_statistic == "set":
            return False
        return bool(expected.unseen(Covariates(*(ids.to(self.device) for ids in self._ids))).any())

    def _blocks(self) -> list[list[int]]:
        """Return whole conditions in blocks of at least one batch of sets. Shards never split a block."""
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
        """Return the requests of a shard, int [n]: consecutive blocks, with about equally many sets per shard."""
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

    def batches(self, mine: np.ndarray) -> list[list[SetToDraw]]:
        """Return the sets of a shard in the batches that are computed together. A batch has sets of one block only."""
        chosen, most = set(map(int, mine)), self.settings.sets_per_batch
        found: list[list[SetToDraw]] = []
        for block in self._blocks():
            if block[0] in chosen:
                sets = [one for request in block for one in self._sets(request)]
                found += [sets[start : start + most] for start in range(0, len(sets), most)]
        return found

    def _sets(self, request: int) -> list[SetToDraw]:
        cells = int(self.wanted["n_cells"].iloc[request])
        return [
            SetToDraw(request, k, min(self.size, cells - k * self.size))
            for k in range(-(-cells // self.size))
        ]

    @torch.inference_mode()
    def draw(self, sets: list[SetToDraw]) -> Cells:
        """Return the cells of a batch, set by set in order."""
        model, device = self.bundle.model, self.device
        control = model.encode(self._controls([(s.request, s.number) for s in sets]).to(device))
        if self.bundle.config.train.zero_control:
            control = torch.zeros_like(control)
        rows = torch.tensor([one.request for one in sets])
        covariates = Covariates(*(ids[rows].to(device) for ids in self._ids))
        dataset = torch.full((len(sets),), self._dataset, device=device)
        # Noise is drawn on the CPU, so that it is the same on every machine.
        noise = [
            torch.Generator().manual_seed(
                state(*words(self.seed, self._labels[one.request], one.number + 1)) >> 1
            )
            for one in sets
        ]

        def noise_of_sets() -> Tensor:
            shared = self.bundle.config.train.set_noise
            return torch.stack([set_noise(control.shape[1:], g, shared) for g in noise]).to(device)

        guidance = None if self._guidance is None else self._guidance[rows].to(device)
        pool = None
        if self._settles:
            keep = torch.tensor([one.keep for one in sets], device=device)
            pool = Pool(self._controls.pool_means(rows.tolist()).to(device), keep)
        cells = generate(
            model, self.schedule, self.settings, control, covariates, dataset, noise_of_sets,
            guidance=guidance, pool=pool, ceiling=self.ceiling,
        )  # fmt: skip
        log1p = cells.cpu().numpy()
        shared = log1p[:, :, self._shared]
        self._check_values(shared, sets)
        kept = [one.keep for one in sets]
        labels = self.wanted[list(LABELS)].iloc[np.repeat(rows.numpy(), kept)].reset_index(drop=True)
        labels[SET] = np.repeat([self._first_set[one.request] + one.number for one in sets], kept)
        if self._draws is not None:
            drawn = [self._counts(self._draws, one, log1p[i]) for i, one in enumerate(sets)]
            labels[DEPTH] = np.concatenate([depth for _, depth in drawn])
            return sparse.csr_matrix(sparse.vstack([counts for counts, _ in drawn])), labels
        return np.concatenate([shared[i, : one.keep] for i, one in enumerate(sets)]), labels

    def _check_values(self, log1p: np.ndarray, sets: list[SetToDraw]) -> None:
        """Refuse what `evaluate` would refuse, before hours are spent on it."""
        wrong = ~(log1p < HIGHEST)  # NaN too
        if not wrong.any():
            return
        which, _, gene = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        genes = [name for name, shared in zip(self.bundle.genes, self._shared, strict=True) if shared]
        raise UserError(
            f"the model '{self.bundle.config.name}' has diverged, or is hardly trained: it predicts values up to "
            f"{log1p.max():.3g} (first: condition {self._labels[sets[which].request]}, gene '{genes[gene]}'), and "
            f"log1p of normalised counts stays below {HIGHEST:g}; train it longer or with a lower train.learning_rate, "
            "or lower sample.guidance"
        )

    def _counts(
        self, draws: CountDraws, one: SetToDraw, log1p: np.ndarray
    ) -> tuple[sparse.csr_matrix, np.ndarray]:
        """Return the counts and depths of the cells of a set that are kept."""
        rows = self._controls.rows([(one.request, one.number)])[: one.keep]
        rng = generator(*words(self.seed, self._labels[one.request], one.number + 1), _ROUNDING)
        return draws(log1p[: one.keep], rows, self._controls.counts(rows), rng)
