"""The setup of a training: stores, the cells that it may use, genes, labels and the network to start from."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from perturbdiff.checkpoint.bundle import SAME_DEPTH, Bundle, build_model
from perturbdiff.checkpoint.pretrained_embeddings import (
    Semantics,
    Tables,
    check_tables,
    semantics,
    validation_labels,
)
from perturbdiff.conditions.vocabulary import GeneMap, Vocabulary
from perturbdiff.config.settings import Config
from perturbdiff.loading.cell_sets import CellSetSampler, SetStream
from perturbdiff.loading.loader import SetLoader
from perturbdiff.loading.set_streams import MixtureSampler, PairedSetStream, UnitSetSampler, check_even
from perturbdiff.loading.windows import WindowedSampler
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.large_arrays import long_array
from perturbdiff.runtime.resources import available
from perturbdiff.splits.splits import leave_out, parts, read_split, weak_validation
from perturbdiff.store.store import Store, dataset_of
from perturbdiff.training.distributed.processes import Processes
from perturbdiff.training.known_changes import expect_changes
from perturbdiff.training.size_spread import size_spread
from perturbdiff.training.training_cells import measure
from perturbdiff.training.transfer import (
    Inheritance,
    Transfer,
    transfer_weights,
    with_architecture,
    with_vectors,
)

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 0.7  # share of the free memory


@dataclass
class Source:
    """A store, and the conditions that training and validation may use.

    Attributes
    ----------
    store
        On disk or in memory.
    name
        Its data set's name.
    train, valid
        bool [n_conditions].
    exclude
        bool [n_cells]: rows never to be used, or None.
    """

    store: Any
    name: str
    train: np.ndarray
    valid: np.ndarray
    exclude: np.ndarray | None = None

    def rows(self) -> np.ndarray:
        """Return the store rows that training may use, int64, ascending."""
        used = self.store.conditions[self.train]
        sizes = (used["stop"] - used["start"]).to_numpy(np.int64)
        rows = long_array(int(sizes.sum()), np.dtype(np.int64))
        for start, end, size in zip(used["start"], np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
            rows[end - size : end] = np.arange(start, start + size)
        return rows if self.exclude is None else rows[~self.exclude[rows]]


@dataclass
class TrainingSetup:
    """Everything `fit` needs.

    Attributes
    ----------
    sources
        Stores with their use.
    genes, vocabulary, model
        The model's genes and labels, and the network to start from, its units set.
    facts
        What the bundle should record beyond the training itself.
    tables
        Semantic tables that the bundle should keep.
    """

    sources: list[Source]
    genes: list[str]
    vocabulary: Vocabulary
    model: Denoiser
    config: Config
    facts: dict[str, Any] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)

    @property
    def windowed(self) -> bool:
        """Whether cells are read in windows, since the stores are too large for memory.

        The recipe and the stores decide, not this machine's memory: the stream of sets must not depend on it.
        """
        return _too_large(self.sources, self.config)

    def train_sampler(self, processes: Processes, *, quiet: bool = False) -> SetStream:
        """Return the stream of training sets of this rank; in pairs if the loss compares twins."""
        place: dict[str, Any] = {"rank": processes.rank, "world_size": processes.world_size}
        twins = 2 if self.config.loss.mmd_statistic == "cross" else 1
        check_passes(self.config.train.sets_per_step, self.config.train.accumulate, processes, twins)
        samplers = [
            self._sampler(s, s.train, seed, twins, quiet=quiet, **place)
            for seed, s in enumerate(self.sources)
        ]
        if self.config.loss.mmd_statistic == "set":
            self._check_families(samplers, quiet=quiet)
        stream: CellSetSampler | MixtureSampler = samplers[0]
        if len(samplers) > 1:
            number = self.config.train.sets_per_step // twins
            stream = MixtureSampler(
                samplers, sets_per_step=number, seed=self.config.seed, weights=self._weights(), **place
            )
        return PairedSetStream(stream) if twins == 2 else stream

    def _check_families(self, samplers: Sequence[CellSetSampler], *, quiet: bool) -> None:
        """Raise a `UserError` if the model is told the sets of a store. Warn of stores that do not know them."""
        unknown = {"perturbation"} if self.config.train.zero_control else set()
        told = [name for name in self.config.model.covariates if name not in unknown]
        for source, sampler in zip(self.sources, samplers, strict=True):
            if isinstance(sampler, UnitSetSampler):
                sampler.check_family(told, source.store.set_key)
            elif not quiet:
                logger.warning(
                    "%s does not know which cells were a set: sets are drawn from whole conditions; to learn how wells "
                    "or replicates differ, preprocess with data.set_key (--set-col)",
                    source.store.path,
                )

    def _weights(self) -> tuple[float, ...] | None:
        """Return the stores' shares of the sets, or None if they go by the numbers of cells."""
        chosen, number = self.config.train.store_weights, len(self.sources)
        if chosen == "cells":
            return None
        weights = (1.0,) * number if chosen == "equal" else chosen
        if len(weights) != number or min(weights, default=0) <= 0:
            raise UserError(
                f"train.store_weights={list(weights)}: give one number above 0 for each of the {number} stores"
            )
        return weights

    def limit_steps(self, steps_per_epoch: int) -> None:
        """Limit the number of steps to what ``train.max_epochs`` allows. The learning rate follows that number.

        On small data ``train.min_steps`` comes first: ten passes over a thousand cells teach nothing.
        """
        train = self.config.train
        if train.max_epochs is None:
            return
        steps = min(train.max_steps, max(train.min_steps, math.ceil(train.max_epochs * steps_per_epoch)))
        logger.info("%d steps, %.1f passes over the training cells", steps, steps / steps_per_epoch)
        train = train.model_copy(update={"max_steps": steps})
        self.config = self.config.model_copy(update={"train": train})

    def validation(self) -> tuple[CellSetSampler, SetLoader] | None:
        """Return the stream of validation sets and its loader, or None if no condition is for validation."""
        chosen = next((s for s in self.sources if s.valid.any()), None)
        if chosen is None:
            return None
        sampler = self._sampler(chosen, chosen.valid, 1 << 20, quiet=True)
        return sampler, self.loader(sampler, [chosen])

    def loader(self, sampler: Any, sources: Sequence[Source] | None = None, **options: Any) -> SetLoader:
        """Return a loader over ``sources`` (default: all)."""
        sources = self.sources if sources is None else sources
        names = [s.name for s in sources]
        return SetLoader(
            [s.store for s in sources], sampler, vocabulary=self.vocabulary, genes=self.genes, datasets=names,
            threads=self.config.train.loader_threads, **options,
        )  # fmt: skip

    def _sampler(
        self, source: Source, use: np.ndarray, stream: int, twins: int = 1, **place: Any
    ) -> CellSetSampler:
        train, conditions = self.config.train, source.store.conditions
        if train.zero_control:  # every condition is a target, and its own control, which is not used
            every = np.arange(len(conditions))
            conditions = conditions.assign(is_control=False, control=every)
        options: dict[str, Any] = {
            "set_size": train.set_size,
            "sets_per_step": train.sets_per_step // twins,
            "seed": self.config.seed + stream,
            "control_targets": train.control_targets,
            "exclude": source.exclude,
            **place,
        }
        if self.config.loss.mmd_statistic == "set" and source.store.sets is not None:
            return UnitSetSampler(conditions, use, sets=source.store.set_of(slice(None)), **options)
        return (WindowedSampler if self.windowed else CellSetSampler)(conditions, use, **options)

    def seen(self) -> pd.DataFrame:
        """Return the conditions that training uses: as ``target``, or as ``input`` only."""
        tables = []
        for source in self.sources:
            table = source.store.conditions[
                ["cell_type", "batch", "perturbation", "is_control", "n_cells"]
            ].copy()
            if source.exclude is not None:
                start = source.store.conditions["start"].to_numpy()
                dropped = np.add.reduceat(source.exclude, start, dtype=np.int64)
                table["n_cells"] -= dropped
            targets = self._sampler(source, source.train, 0, quiet=True).target_conditions
            table["role"] = np.where(np.isin(np.arange(len(table)), targets), "target", "input")
            table.insert(0, "dataset", source.name)
            tables.append(table[source.train & (table["n_cells"] > 0)])
        return pd.concat(tables, ignore_index=True)

    def target_sum(self) -> float | None:
        """Return the depth that counts were scaled to, None if unknown or different between the stores."""
        depths = {float(s.store.target_sum) for s in self.sources}
        depth = depths.pop() if len(depths) == 1 else float("nan")
        return depth if np.isfinite(depth) else None

    def bundle(self, model: Denoiser, facts: dict[str, Any], curve: pd.DataFrame) -> Bundle:
        """Return the bundle of a trained network, with facts of its training and the loss terms by step."""
        return Bundle(
            model, self.config, self.genes, self.vocabulary, self.target_sum(), {**facts, **self.facts},
            self.seen(), curve, dict(self.tables),
        )  # fmt: skip


def check_passes(sets_per_step: int, accumulate: int, processes: Processes, twins: int) -> None:
    """Raise a `UserError` if the sets of a step cannot be shared out evenly over processes and forward passes."""
    if twins == 2:
        check_even(sets_per_step, processes.world_size)
    if sets_per_step % (twins * processes.world_size * accumulate):
        pairs = "pairs of twin " if twins == 2 else ""
        raise UserError(
            f"train.sets_per_step={sets_per_step} does not make {accumulate} equal passes (train.accumulate) of "
            f"{pairs}sets on {processes.world_size} process(es); choose a multiple of "
            f"{twins * processes.world_size * accumulate}"
        )


def from_scratch(
    store: Path,
    split: Path,
    config: Config,
    tables: Tables | None = None,
    genes: Sequence[str] | None = None,
) -> TrainingSetup:
    """Return the setup of `train`: one store, its split, a new network.

    ``tables`` are semantic tables. ``genes`` are those of the model, by default all of the store; a gene that the
    store lacks raises a `UserError`.
    """
    tables = tables or {}
    check_tables(config.model, tables)
    source = split_source(Store(store), read_split(split), dataset_of(store))
    facts = thin_out([source], config)
    hold([source], config)
    validation = source.store.conditions[source.valid]
    vocabulary = validation_labels(config.model, _vocabulary([source]), [validation], tables)
    names = list(source.store.genes) if genes is None else list(genes)
    if missing := sorted(set(names) - set(source.store.genes)):
        raise UserError(
            f"{store}: lacks {len(missing)} of the {len(names)} genes of --genes: {listing(missing)}; train on genes "
            "that it has"
        )
    vectors = semantics(config.model, names, vocabulary, tables)
    model = new_model(config, names, vocabulary, vectors)
    expect_changes(model, source, names, vocabulary, vectors)
    setup = TrainingSetup([source], names, vocabulary, model, config, facts, tables)
    set_units(setup)
    return setup


def for_finetuning(
    bundle: Path, store: Path, split: Path, config: Config, mode: Transfer, tables: Tables | None = None
) -> TrainingSetup:
    """Return the setup of `finetune`: one store, its split, a network that starts from a bundle's weights."""
    old = Bundle.load(bundle)
    source = split_source(Store(store), read_split(split), dataset_of(store))
    _compare_depths({str(bundle): old.target_sum, str(store): source.store.target_sum})
    facts = thin_out([source], config)
    hold([source], config)
    config = with_architecture(config, old, tables or {})
    inherited = Inheritance.of(old, tables or {})
    validation = source.store.conditions[source.valid]
    vocabulary = inherited.vocabulary(old, _vocabulary([source]), config.model, [validation])
    vocabulary = dataclasses.replace(vocabulary, datasets=(source.name,))
    genes = list(source.store.genes) if mode == "new-genes" else old.genes
    if mode != "new-genes":
        logger.info("%s", GeneMap(source.store.genes, genes, name=str(store)).report())
    vectors = inherited.semantics(config.model, genes, vocabulary)
    model = new_model(config, genes, vocabulary, vectors)
    report = transfer_weights(old, model, vocabulary, mode, doses=(inherited.doses, vectors.doses))
    for line in report:
        logger.info("transfer: %s", line)
    expect_changes(model, source, genes, vocabulary, vectors)
    setup = TrainingSetup([source], genes, vocabulary, model, config, tables=inherited.kept)
    set_units(setup)
    if mode == "keep":
        model.unit.copy_(old.model.unit)  # because its weights expect this unit
    setup.facts = facts | {"pretrained": old.config.name, "transfer": mode, "transferred": report}
    return setup


def for_pretraining(
    stores: Sequence[Path],
    config: Config,
    downstream: Sequence[tuple[Path, Path]],
    genes: Sequence[str] | None,
    tables: Tables | None = None,
) -> TrainingSetup:
    """Return the setup of `pretrain`: several stores without the held-out conditions of downstream splits."""
    from perturbdiff.training.training_cells import HeldOut

    tables = tables or {}
    check_tables(config.model, tables)
    held = HeldOut.collect(downstream)
    sources = []
    for path, name in zip(stores, dataset_names(stores), strict=True):
        store = Store(path)
        train, exclude = held.leave_out(store)
        sources.append(Source(store, name, train, np.zeros_like(train), exclude))
    _compare_depths({str(path): s.store.target_sum for path, s in zip(stores, sources, strict=True)})
    facts = thin_out(sources, config)
    hold(sources, config)
    names = list(genes) if genes else list(dict.fromkeys(g for s in sources for g in s.store.genes))
    vocabulary = _vocabulary(sources)
    if "perturbation" in tables:
        vocabulary = with_vectors(vocabulary, "perturbation", config.model, tables["perturbation"])
    model = new_model(config, names, vocabulary, semantics(config.model, names, vocabulary, tables))
    facts["left_out"] = held.report
    setup = TrainingSetup(sources, names, vocabulary, model, config, facts, tables)
    set_units(setup)
    return setup


def _compare_depths(depths: Mapping[str, float | None]) -> None:
    """Warn if cells that one network sees are scaled to different depths, where these are known."""
    known = {name: depth for name, depth in depths.items() if depth is not None and math.isfinite(depth)}
    if known and max(known.values()) > (1 + SAME_DEPTH) * min(known.values()):
        logger.warning(
            "cells are scaled to different depths (%s): their log1p values are not on one scale; preprocess them "
            "with one --set data.target_sum=DEPTH",
            listing([f"{name}: {depth:g} counts" for name, depth in known.items()]),
        )


def split_source(store: Store, split: pd.DataFrame, name: str) -> Source:
    """Return a store with the training and validation conditions of a split."""
    part = parts(store.conditions, split, store.path)
    source = Source(store, name, part == "train", part == "valid")
    if why := weak_validation(store.conditions["n_cells"].to_numpy(np.int64)[source.valid]):
        logger.warning("%s", why)
    perturbed = source.train & ~store.conditions["is_control"].to_numpy(bool)
    if not perturbed.any():
        raise UserError(f"{store.path}: the split puts no perturbed condition into training")
    return source


def thin_out(sources: Sequence[Source], config: Config) -> dict[str, Any]:
    """Leave ``train.cells_fraction`` of each perturbation's training cells; return facts for the bundle."""
    fraction = config.train.cells_fraction
    if fraction == 1:
        return {}
    before, after = 0, 0
    for source in sources:
        before += len(source.rows())
        source.exclude = leave_out(
            source.store.conditions, source.train, fraction, config.seed, source.exclude
        )
        after += len(source.rows())
    report = f"{after} of {before}, controls among them (train.cells_fraction {fraction:g})"
    logger.info("training cells: %s", report)
    return {"training_cells": report}


def hold(sources: Sequence[Source], config: Config) -> None:
    """Take the stores into memory if the recipe's limit and this machine allow all of them.

    Processes of one node hold one copy together.
    """
    size = sum(s.store.nbytes_in_memory for s in sources)
    if _too_large(sources, config):
        logger.info("%.1f GiB of cells are read from disk (train.memory_gib)", size / 2**30)
        return
    node = Processes.from_environment().node()
    fits = size <= _MEMORY_SHARE * available()
    if node is not None:
        fits = node.agree("fits", fits)
    if not fits:
        logger.warning(
            "%.1f GiB of cells do not fit in memory now and are read from disk, cell by cell and slowly; "
            "with a smaller train.memory_gib they are read in windows",
            size / 2**30,
        )
        return
    for source in sources:
        source.store = source.store.in_memory(node)


def _too_large(sources: Sequence[Source], config: Config) -> bool:
    return sum(s.store.nbytes_in_memory for s in sources) > config.train.memory_gib * 2**30


def new_model(
    config: Config, genes: list[str], vocabulary: Vocabulary, frozen: Semantics | None = None
) -> Denoiser:
    """Return an untrained network whose weights depend on the seed alone, its semantic vectors in place."""
    frozen = frozen or Semantics()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(config, genes, vocabulary, semantic=frozen.widths, num_doses=len(frozen.doses))
    frozen.put_into(model)
    return model


def set_units(setup: TrainingSetup) -> None:
    """Measure the training cells and set the network's units."""
    sources, config = setup.sources, setup.config
    maps = [GeneMap(s.store.genes, setup.genes, name=str(s.store.path)) for s in sources]
    units = measure(
        [s.store for s in sources], maps, [s.rows() for s in sources],
        unit=config.model.unit, limit=config.train.statistics_cells, seed=config.seed,
    )  # fmt: skip
    units.put_into(setup.model)
    if not config.train.zero_control:  # which knows no perturbations
        spread = size_spread(units.sizes[0], sources[0], setup.vocabulary)
        setup.model.size_spread.copy_(torch.from_numpy(spread))


def dataset_names(stores: Iterable[Path]) -> list[str]:
    """Return a name for each store: that of its data set, made unique by a number."""
    names: list[str] = []
    for path in stores:
        base = name = dataset_of(path)
        number = 2
        while name in names:
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return names


def _vocabulary(sources: Sequence[Source]) -> Vocabulary:
    """Return the labels of the training cells. Other labels cannot be learned."""
    tables = [s.store.conditions[s.train] for s in sources]
    return Vocabulary.from_conditions(
        tables, control=sources[0].store.control, datasets=[s.name for s in sources]
    )
