"""Minibatches of cell sets, as dense tensors or as sparse rows that become dense on their device."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

_UNSIGNED = {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}


def dense_log1p(
    counts: Tensor, columns: Tensor, starts: Tensor, factors: Tensor | None, *, genes: int
) -> Tensor:
    """Return log1p(count · factor) of cells given as sparse rows.

    Parameters
    ----------
    counts
        Concatenated counts of the rows [values]. int16 and int32 are read as unsigned.
    columns
        The gene of each count, any integer type. A row contains a gene once.
    starts
        The start of each row, and the end of the last one, [cells + 1].
    factors
        Depth that cells are scaled to, divided by the total counts of the cell over all its genes, float32 [cells].
        None: the values are already log1p.
    genes
        G.

    Returns
    -------
    float32 [cells, G]. The function does not wait for the device.
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
    # each element is written once, so any order gives the same result, and the deterministic one is slow on a GPU
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        dense.scatter_(0, row * genes + columns.long(), values)
    finally:
        torch.set_deterministic_debug_mode(mode)
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

    def relabelled(self, times: int) -> CellSetBatch:
        """Return the batch with the labels of each set ``times`` times, next to each other. The cells stay once."""
        labels = [f.name for f in fields(self) if f.name not in ("target", "control")]
        return replace(self, **{name: getattr(self, name).repeat_interleave(times, 0) for name in labels})

    def split(self, parts: int) -> list[CellSetBatch]:
        """Return equal batches of successive sets, as views of this one."""
        size = len(self.target) // parts
        cut = [slice(i * size, (i + 1) * size) for i in range(parts)]
        return [CellSetBatch(**{f.name: getattr(self, f.name)[here] for f in fields(self)}) for here in cut]

    def pin_memory(self) -> CellSetBatch:
        """Return the batch in page-locked memory, which a GPU can copy asynchronously."""
        return CellSetBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass
class PackedRows:
    """Cells as sparse rows.

    Attributes
    ----------
    values
        [values]: counts as int16 or int32, read as unsigned, or log1p values as float32.
    columns
        int16 or int32 [values]: genes of the model.
    starts
        int64 [cells + 1]: the starts of the rows, and the end of the last one.
    factors
        float32 [cells]: target sum / depth. None if the values are log1p.
    genes
        Number of genes of the model.
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
    """A `CellSetBatch` with sparse rows. It has a tenth of the bytes, and becomes dense on its device.

    Attributes
    ----------
    target, control
        B · S cells each, set by set.

    The other attributes are those of `CellSetBatch`.
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
        """Return the batch in page-locked memory, which a GPU can copy asynchronously."""
        return PackedCellSetBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


class Buffers:
    """Reuses the memory of arrays that are no longer in use. New memory pages cost as much time as filling them.

    Parameters
    ----------
    most
        Maximum number of free arrays to keep.
    """

    def __init__(self, most: int) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=most)

    def take(self, rows: int, columns: int) -> np.ndarray:
        """Return an uninitialised float32 array [rows, columns]."""
        try:
            kept = self._free.pop()
        except IndexError:
            kept = np.empty((rows, columns), np.float32)
        if kept.shape != (rows, columns):
            kept = np.empty((rows, columns), np.float32)
        lent = kept[:]  # a view that lives as long as any tensor that uses it
        weakref.finalize(lent, self._free.append, kept).atexit = False
        return lent
