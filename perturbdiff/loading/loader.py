"""Batches of cell sets for training: rows read, aligned to the model's genes and made dense, in threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from perturbdiff.conditions.vocabulary import GeneMap, Vocabulary
from perturbdiff.loading.batches import Buffers, CellSetBatch, PackedCellSetBatch, PackedRows
from perturbdiff.loading.cell_sets import CellSet, SetStream
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.resources import available
from perturbdiff.store import row_kernels
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")


def fits_in_memory(store: Store, share: float) -> bool:
    """Return whether a store's values take at most ``share`` of the memory that is free now."""
    return store.nbytes_in_memory <= share * available()


def resident(store: Store, share: float = 0.5) -> Store:
    """Return the store held in memory if it fits in ``share`` of what is free, else as it is."""
    if share <= 0 or not fits_in_memory(store, share):
        logger.info("%s is read from disk", store.path)
        return store
    logger.info("%s is held in memory (%.1f MiB)", store.path, store.nbytes_in_memory / 2**20)
    return store.in_memory()


class SetLoader:
    """The batches of steps ``start_step`` to ``stop_step`` (exclusive), in order, made ahead by threads.

    Parameters
    ----------
    stores
        Stores (`Store` or `MemoryStore`, see `resident`), in the order of the sampler's ``store`` index.
    sampler
        `CellSetSampler`, `WindowedSampler`, `MixtureSampler` or `PairedSetStream`.
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
    threads
        Threads that make batches; what they make does not depend on their number.
    packed
        Make `PackedCellSetBatch`, which becomes dense on the device it is sent to.
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
        threads: int = 1,
        packed: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.stores, self.sampler, self.genes = list(stores), sampler, list(genes)
        self.step, self.stop_step, self.packed, self.pin_memory = start_step, stop_step, packed, pin_memory
        self.threads = min(threads, prefetch)
        self.prefetch = prefetch
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
        self._columns = [None if g.identity else g.columns for g in self.gene_maps]
        self._ids = [vocabulary.encode_conditions(store.conditions) for store in self.stores]
        self._buffers = Buffers(prefetch + 2)
        self._drawing = threading.Lock()  # samplers keep what they drew last

    def load(self, sets: Sequence[CellSet]) -> CellSetBatch | PackedCellSetBatch:
        """Return the batch of these sets, read now."""
        ids = {
            kind: torch.tensor([int(self._ids[s.store][kind][s.condition]) for s in sets])
            for kind in ("perturbation", "cell_type", "batch")
        }
        ids["dataset"] = torch.tensor([self._dataset[s.store] for s in sets])
        ids["condition"] = torch.tensor([s.condition for s in sets])
        batch: CellSetBatch | PackedCellSetBatch
        if self.packed:
            target, control = (
                self._packed([getattr(s, kind) for s in sets], sets) for kind in ("target", "control")
            )
            batch = PackedCellSetBatch(target, control, **ids)
        else:
            both = self._dense(sets)
            batch = CellSetBatch(both[0], both[1], **ids)
        return batch.pin_memory() if self.pin_memory else batch

    def _dense(self, sets: Sequence[CellSet]) -> torch.Tensor:
        """Return targets and controls as float32 log1p [2, B, S, G]."""
        number, size = len(sets), len(sets[0].target)
        values = self._buffers.take(2 * number * size, len(self.genes))
        rows = [s.target for s in sets] + [s.control for s in sets]
        for store, columns, own, place in self._by_store(rows, [s.store for s in sets] * 2):
            store.dense(own, values, place=place, columns=columns)
        return torch.from_numpy(values).view(2, number, size, len(self.genes))

    def _packed(self, rows: Sequence[np.ndarray], sets: Sequence[CellSet]) -> PackedRows:
        """Return cells as sparse rows, set by set."""
        found = []
        counts = all(store.input_scale == "counts" for store in self.stores)
        for store, columns, own, place in self._by_store(rows, [s.store for s in sets]):
            found.append((*store.sparse(own, columns, as_stored=counts), store.factors(own), place))
        genes = len(self.genes)
        cells = sum(len(place) for *_, place in found)
        lengths, factors = np.zeros(cells + 1, np.int64), np.empty(cells, np.float32)
        for starts, _, _, factor, place in found:
            lengths[place + 1], factors[place] = np.diff(starts), factor
        offset = np.cumsum(lengths)
        narrow = counts and all(store.dtype == np.uint16 for store in self.stores)
        kind = np.dtype(np.uint16 if narrow else np.uint32 if counts else np.float32)
        columns = np.empty(int(offset[-1]), np.int16 if genes <= 1 << 15 else np.int32)
        values = np.empty(int(offset[-1]), kind)
        for starts, own_columns, own_values, _, place in found:
            row_kernels.take_values(
                starts[:-1], np.diff(starts), place, own_columns, own_values, offset, columns, values
            )
        values = values.view(f"i{kind.itemsize}") if counts else values
        kept = torch.from_numpy(factors) if counts else None
        return PackedRows(
            torch.from_numpy(values), torch.from_numpy(columns), torch.from_numpy(offset), kept, genes
        )

    def _by_store(
        self, rows: Sequence[np.ndarray], store_of: Sequence[int]
    ) -> Iterator[tuple[Store, np.ndarray | None, np.ndarray, np.ndarray]]:
        """Yield each store with its map of columns, its rows and their places in the batch."""
        size = len(rows[0])
        for i, (store, columns) in enumerate(zip(self.stores, self._columns, strict=True)):
            mine = np.array([b for b, s in enumerate(store_of) if s == i])
            if len(mine):
                place = (mine[:, None] * size + np.arange(size)).reshape(-1)
                yield store, columns, np.concatenate([rows[b] for b in mine]), place

    def __len__(self) -> int:
        if self.stop_step is None:
            raise TypeError("this loader never ends")
        return max(self.stop_step - self.step, 0)

    def __iter__(self) -> Iterator[CellSetBatch | PackedCellSetBatch]:
        batches = in_order(self._make, self._steps(self.step), self.threads, self.prefetch)
        try:
            for k, batch in enumerate(batches, start=self.step):
                self.step = k + 1
                yield batch
        finally:
            batches.close()

    def _make(self, k: int) -> CellSetBatch | PackedCellSetBatch:
        with self._drawing:
            sets = self.sampler.step(k)
        return self.load(sets)

    def _steps(self, k: int) -> Iterator[int]:
        while self.stop_step is None or k < self.stop_step:
            yield k
            k += 1


def in_order(
    work: Callable[[int], T], items: Iterable[int], threads: int, ahead: int
) -> Generator[T, None, None]:
    """Yield ``work(item)`` of each item in order, done by ``threads`` at most ``ahead`` before it is asked for.

    An exception is raised here, in its turn. Closing the generator ends the threads. Without threads the work is
    done when it is asked for.
    """
    if threads < 1:
        yield from map(work, items)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
