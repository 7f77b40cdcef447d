"""Batches of cell sets for training: rows read, aligned to the model's genes and made dense in a thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor

from perturbdiff.data.cell_sets import CellSet, SetStream
from perturbdiff.data.store import Store
from perturbdiff.data.vocabulary import GeneMap, Vocabulary
from perturbdiff.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW_ON_DISK = 64
"""Rows read together when a store does not fit in memory: one chunk of a store."""


@dataclass
class Batch:
    """The cell sets of one optimiser step on one rank. B sets, S cells in a set, G genes of the model.

    Attributes
    ----------
    target, control
        float32 [B, S, G], log1p.
    perturbation, cell_type, batch
        int64 [B]: ids of the vocabulary.
    dataset
        int64 [B]: position of the data set in ``vocabulary.datasets``, counted from 0.
    condition
        int64 [B]: row of the store's table of conditions.
    """

    target: Tensor
    control: Tensor
    perturbation: Tensor
    cell_type: Tensor
    batch: Tensor
    dataset: Tensor
    condition: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on ``device``."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return Batch(**moved)

    def split(self, parts: int) -> list[Batch]:
        """Return equal batches of successive sets, views of this one."""
        size = len(self.target) // parts
        cut = [slice(i * size, (i + 1) * size) for i in range(parts)]
        return [Batch(**{f.name: getattr(self, f.name)[here] for f in fields(self)}) for here in cut]

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which a GPU copies without waiting."""
        return Batch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


def fits_in_memory(store: Store, share: float) -> bool:
    """Return whether a store's values take at most ``share`` of the memory that is free now."""
    return store.nbytes_in_memory <= share * psutil.virtual_memory().available


def resident(store: Store, share: float = 0.5) -> Store:
    """Return the store held in memory if it fits in ``share`` of what is free, else as it is."""
    if share <= 0 or not fits_in_memory(store, share):
        logger.info("%s is read from disk, in windows of %d cells", store.path, WINDOW_ON_DISK)
        return store
    logger.info("%s is held in memory (%.1f MiB)", store.path, store.nbytes_in_memory / 2**20)
    return store.in_memory()


class SetLoader:
    """The batches of steps ``start_step`` to ``stop_step`` (exclusive), in order, prefetched by a thread.

    Parameters
    ----------
    stores
        Stores (`Store` or `MemoryStore`, see `resident`), in the order of the sampler's ``store`` index.
    sampler
        `CellSetSampler` or `MixtureSampler`.
    vocabulary
        Gives the ids of the covariates; a label it does not have gets id 0.
    genes
        The model's genes; every store is aligned to them by name.
    start_step, stop_step
        First step, and the step before which to end (None: never ends).
    datasets
        Name of each store in ``vocabulary.datasets``; by default the first ones in order.
    prefetch
        Batches kept ready. 0: no thread.
    pin_memory
        Put batches in page-locked memory.

    Attributes
    ----------
    step
        The step whose batch comes next; a new iteration begins there, so it is what a checkpoint keeps.
    gene_maps
        How each store's genes fit the model's.

    Raises
    ------
    UserError
        If a store has no gene in common with the model, or its data set is not in the vocabulary.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        sampler: SetStream,
        *,
        vocabulary: Vocabulary,
        genes: Sequence[str],
        start_step: int = 0,
        stop_step: int | None = None,
        datasets: Sequence[str] | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.stores, self.sampler, self.genes = list(stores), sampler, list(genes)
        self.step, self.stop_step, self.prefetch, self.pin_memory = (
            start_step,
            stop_step,
            prefetch,
            pin_memory,
        )
        names = vocabulary.datasets[: len(self.stores)] if datasets is None else tuple(datasets)
        if len(names) != len(self.stores) or set(names) - set(vocabulary.datasets):
            raise UserError(
                f"data sets {names} do not name the {len(self.stores)} stores in the model's vocabulary"
            )
        self._dataset = [vocabulary.datasets.index(name) for name in names]
        self.gene_maps = [GeneMap(s.genes, self.genes, name=str(s.path)) for s in self.stores]
        for gene_map in self.gene_maps:
            if not gene_map.identity:
                logger.info("%s", gene_map.report())
        self._ids = [vocabulary.encode_conditions(store.conditions) for store in self.stores]

    def load(self, sets: Sequence[CellSet]) -> Batch:
        """Return the batch of these sets, read now."""
        number, size, width = len(sets), len(sets[0].target), len(self.genes)
        values = np.empty((2 * number * size, width), dtype=np.float32)
        for i, (store, gene_map) in enumerate(zip(self.stores, self.gene_maps, strict=True)):
            mine = [b for b, cells in enumerate(sets) if cells.store == i]
            if not mine:
                continue
            rows = np.concatenate([sets[b].target for b in mine] + [sets[b].control for b in mine])
            if gene_map.identity and len(mine) == number:  # rows are already in the order of the batch
                store.dense(rows, values)
                continue
            place = np.array(mine + [number + b for b in mine])
            place = (place[:, None] * size + np.arange(size)).reshape(-1)
            gene_map.dense(store.expression(rows), values, place)
        both = torch.from_numpy(values).view(2, number, size, width)
        ids = {
            kind: torch.tensor([int(self._ids[s.store][kind][s.condition]) for s in sets])
            for kind in ("perturbation", "cell_type", "batch")
        }
        dataset = torch.tensor([self._dataset[s.store] for s in sets])
        condition = torch.tensor([s.condition for s in sets])
        batch = Batch(both[0], both[1], **ids, dataset=dataset, condition=condition)
        return batch.pin_memory() if self.pin_memory else batch

    def __len__(self) -> int:
        if self.stop_step is None:
            raise TypeError("this loader never ends")
        return max(self.stop_step - self.step, 0)

    def __iter__(self) -> Iterator[Batch]:
        batches = (self.load(self.sampler.step(k)) for k in self._steps(self.step))
        if self.prefetch:
            batches = prefetched(batches, self.prefetch)
        try:
            for k, batch in enumerate(batches, start=self.step):
                self.step = k + 1
                yield batch
        finally:
            batches.close()

    def _steps(self, k: int) -> Iterator[int]:
        while self.stop_step is None or k < self.stop_step:
            yield k
            k += 1


def prefetched(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield ``items``, made by a thread at most ``depth`` ahead; its exceptions are raised here.

    Closing the generator ends the thread.
    """
    ready: queue.Queue[T | BaseException | None] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def hand_over(item: T | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not hand_over(item):
                    return
            hand_over(None)
        except BaseException as error:  # noqa: BLE001 - every failure belongs to the consumer
            hand_over(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
