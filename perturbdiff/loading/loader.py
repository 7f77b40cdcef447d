"""Batches of cell sets for training: rows read, aligned to the model's genes and made dense, in threads."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from perturbdiff.conditions.vocabulary import GeneMap, Vocabulary
from perturbdiff.loading.cell_sets import CellSet, SetStream
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.resources import available
from perturbdiff.store import row_kernels
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

_UNSIGNED = {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}


def dense_log1p(
    counts: Tensor, columns: Tensor, starts: Tensor, factors: Tensor | None, *, genes: int
) -> Tensor:
    """Return log1p(count · factor) of cells given as sparse rows.

    Parameters
    ----------
    counts
        The rows' counts one after the other [values]; int16 and int32 are read as unsigned.
    columns
        The gene of each count, any integer type; a row names a gene once.
    starts
        Where each row starts, and the end of the last one, [cells + 1].
    factors
        Depth that the values refer to / total counts of each cell over all its genes, float32 [cells]. None: the
        values are log1p already.
    genes
        G.

    Returns
    -------
    float32 [cells, G]. Nothing waits for the device.
    """
    cells = len(starts) - 1
    row = torch.arange(cells, device=counts.device).repeat_interleave(
        starts.diff().long(), output_size=len(counts)
    )
    bits = _UNSIGNED.get(counts.dtype)
    values = (counts if bits is None else counts.long() & bits).float()
    if factors is not None:
        values = torch.log1p(values * factors[row])
    dense = values.new_zeros(cells * genes)
    # A place is written once: no order of writing changes anything, and the orderly way is slow on a GPU.
    orderly = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        dense.scatter_(0, row * genes + columns.long(), values)
    finally:
        torch.use_deterministic_algorithms(orderly)
    return dense.view(cells, genes)


@dataclass
class CellSetBatch:
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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> CellSetBatch:
        """Return the batch with its tensors on ``device``."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return CellSetBatch(**moved)

    def split(self, parts: int) -> list[CellSetBatch]:
        """Return equal batches of successive sets, views of this one."""
        size = len(self.target) // parts
        cut = [slice(i * size, (i + 1) * size) for i in range(parts)]
        return [CellSetBatch(**{f.name: getattr(self, f.name)[here] for f in fields(self)}) for here in cut]

    def pin_memory(self) -> CellSetBatch:
        """Return the batch in page-locked memory, from which a GPU copies without waiting."""
        return CellSetBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass
class PackedRows:
    """Cells as sparse rows.

    Attributes
    ----------
    values
        [values]: int16 or int32, counts read as unsigned; or float32, log1p.
    columns
        int16 or int32 [values]: genes of the model.
    starts
        int64 [cells + 1]: where rows start, and the end of the last.
    factors
        float32 [cells]: target sum / depth; None where the values are log1p.
    genes
        Genes of the model.
    """

    values: Tensor
    columns: Tensor
    starts: Tensor
    factors: Tensor | None
    genes: int

    def _each(self, change: str, *arguments: object, **options: object) -> PackedRows:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {
            n: getattr(t, change)(*arguments, **options) for n, t in tensors.items() if torch.is_tensor(t)
        }
        return replace(self, **moved)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedRows:
        """Return the rows on ``device``."""
        return self._each("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> PackedRows:
        """Return the rows in page-locked memory."""
        return self._each("pin_memory")

    def dense(self) -> Tensor:
        """Return the cells as float32 log1p [cells, G]."""
        return dense_log1p(self.values, self.columns, self.starts, self.factors, genes=self.genes)

    def __getitem__(self, cells: slice) -> PackedRows:
        first, last, _ = cells.indices(len(self.starts) - 1)
        starts = self.starts[first : last + 1]
        inside = slice(int(starts[0]), int(starts[-1]))
        factors = None if self.factors is None else self.factors[first:last]
        return PackedRows(self.values[inside], self.columns[inside], starts - starts[0], factors, self.genes)


@dataclass
class PackedCellSetBatch:
    """A `CellSetBatch` on its way to a device: a tenth of the bytes, dense when it has arrived.

    Attributes
    ----------
    target, control
        B · S cells each, set by set.

    The others are those of `CellSetBatch`.
    """

    target: PackedRows
    control: PackedRows
    perturbation: Tensor
    cell_type: Tensor
    batch: Tensor
    dataset: Tensor
    condition: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> CellSetBatch:
        """Return the batch on ``device``, dense."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        for kind in ("target", "control"):
            cells = moved[kind].dense()
            moved[kind] = cells.view(len(self.condition), -1, cells.shape[1])
        return CellSetBatch(**moved)

    def split(self, parts: int) -> list[PackedCellSetBatch]:
        """Return equal batches of successive sets."""
        size, cells = len(self.condition) // parts, (len(self.target.starts) - 1) // parts
        pieces = []
        for i in range(parts):
            sets, rows = slice(i * size, (i + 1) * size), slice(i * cells, (i + 1) * cells)
            cut = {
                f.name: getattr(self, f.name)[rows if f.name in ("target", "control") else sets]
                for f in fields(self)
            }
            pieces.append(PackedCellSetBatch(**cut))
        return pieces

    def pin_memory(self) -> PackedCellSetBatch:
        """Return the batch in page-locked memory, from which a GPU copies without waiting."""
        return PackedCellSetBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


class Buffers:
    """Memory of arrays that nobody holds any more, used again: fresh pages cost as much as filling them.

    Parameters
    ----------
    most
        Free arrays to keep.
    """

    def __init__(self, most: int) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=most)

    def take(self, rows: int, columns: int) -> np.ndarray:
        """Return a float32 array [rows, columns] of any content."""
        try:
            kept = self._free.pop()
        except IndexError:
            kept = np.empty((rows, columns), np.float32)
        if kept.shape != (rows, columns):
            kept = np.empty((rows, columns), np.float32)
        lent = kept[:]  # lives as long as any tensor over it
        weakref.finalize(lent, self._free.append, kept).atexit = False
        return lent


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
