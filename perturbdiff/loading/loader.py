"""Prepares minibatches of cell sets in threads: reads rows, aligns them to the model's genes and makes them dense."""

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
    """Return whether a store's values take at most ``share`` of the free memory."""
    return store.nbytes_in_memory <= share * available()


def resident(store: Store, share: float = 0.5) -> Store:
    """Return the store in memory if it fits into ``share`` of the free memory, and otherwise the store on disk."""
    if share <= 0 or not fits_in_memory(store, share):
        logger.info("%s is read from disk", store.path)
        return store
    logger.info("%s is held in memory (%.1f MiB)", store.path, store.nbytes_in_memory / 2**20)
    return store.in_memory()


class SetLoader:
    """The minibatches of steps ``start_step`` to ``stop_step`` (exclusive), in order. Threads prepare them in advance.

    Parameters
    ----------
    stores
        Each a `Store` or a `MemoryStore` (see `resident`), in the order of the sampler's ``store`` index.
    sampler
        `CellSetSampler`, `WindowedSampler`, `MixtureSampler` or `PairedSetStream`.
    vocabulary
        Gives the ids of the covariates. A label that it does not contain gets id 0.
    genes
        The model's genes. Every store is aligned to them by name.
    start_step, stop_step
        First step, and the step before which to end. None: never ends.
    datasets
        Name of each store in ``vocabulary.datasets``. By default the first ones in order.
    prefetch
        Number of minibatches to keep ready. 0: use no thread.
    threads
        Number of threads that prepare minibatches. The result does not depend on it.
    packed
        Make `PackedCellSetBatch`, which becomes dense on its device.
    pin_memory
        Put minibatches into page-locked memory.

    Attributes
    ----------
    step
        The step of the next minibatch. A new iteration begins there, so a checkpoint saves it.
    gene_maps
        How each store's genes map to the model's.

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
        self._drawing = threading.Lock()  # samplers cache their last draws

    def load(self, sets: Sequence[CellSet]) -> CellSetBatch | PackedCellSetBatch:
        """Read these sets and return them as a minibatch."""
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
        for store, columns, numbers, place in self._by_store(rows, [s.store for s in sets] * 2):
            store.dense(numbers, values, place=place, columns=columns)
        return torch.from_numpy(values).view(2, number, size, len(self.genes))

    def _packed(self, rows: Sequence[np.ndarray], sets: Sequence[CellSet]) -> PackedRows:
        """Return cells as sparse rows, set by set."""
        stored = []
        counts = all(store.input_scale == "counts" for store in self.stores)
        for store, columns, numbers, place in self._by_store(rows, [s.store for s in sets]):
            stored.append((*store.sparse(numbers, columns, as_stored=counts), store.factors(numbers), place))
        genes = len(self.genes)
        cells = sum(len(place) for *_, place in stored)
        lengths, factors = np.zeros(cells + 1, np.int64), np.empty(cells, np.float32)
        for starts, _, _, factor, place in stored:
            lengths[place + 1], factors[place] = np.diff(starts), factor
        offset = np.cumsum(lengths)
        narrow = counts and all(store.dtype == np.uint16 for store in self.stores)
        kind = np.dtype(np.uint16 if narrow else np.uint32 if counts else np.float32)
        columns = np.empty(int(offset[-1]), np.int16 if genes <= 1 << 15 else np.int32)
        values = np.empty(int(offset[-1]), kind)
        for starts, stored_columns, stored_values, _, place in stored:
            row_kernels.take_values(
                starts[:-1], np.diff(starts), place, stored_columns, stored_values, offset, columns, values
            )
        values = values.view(f"i{kind.itemsize}") if counts else values
        kept = torch.from_numpy(factors) if counts else None
        return PackedRows(
            torch.from_numpy(values), torch.from_numpy(columns), torch.from_numpy(offset), kept, genes
        )

    def _by_store(
        self, rows: Sequence[np.ndarray], store_of: Sequence[int]
    ) -> Iterator[tuple[Store, np.ndarray | None, np.ndarray, np.ndarray]]:
        """Yield each store with its map of columns, its rows and their positions in the minibatch."""
        size = len(rows[0])
        for i, (store, columns) in enumerate(zip(self.stores, self._columns, strict=True)):
            of_store = np.array([b for b, s in enumerate(store_of) if s == i])
            if len(of_store):
                place = (of_store[:, None] * size + np.arange(size)).reshape(-1)
                yield store, columns, np.concatenate([rows[b] for b in of_store]), place

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
    """Yield ``work(item)`` of each item in order. Threads work at most ``ahead`` items in advance.

    An exception is raised here when its item is due. Closing the generator ends the threads. Without threads, the
    work is done when the result is requested.
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
