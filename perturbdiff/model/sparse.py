"""Sparse counts to dense log1p values, on whatever device they lie: a batch travels to a GPU as sparse rows."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 0xFFFF


def dense_log1p(
    counts: Tensor, columns: Tensor, starts: Tensor, depth: Tensor, *, genes: int, target_sum: float
) -> Tensor:
    """Return log1p(count · target_sum / depth) of cells given as sparse rows.

    Parameters
    ----------
    counts
        The rows' counts one after the other [values]; int16 is read as unsigned.
    columns
        The gene of each count, any integer type; a row names a gene once.
    starts
        Where each row starts, and the end of the last one, [cells + 1].
    depth
        Total counts of each cell, over all its genes, float32 [cells].
    genes
        G.
    target_sum
        Depth that the values refer to.

    Returns
    -------
    float32 [cells, G]. Nothing waits for the device.
    """
    cells = len(depth)
    lengths = starts.diff().long()
    row = torch.arange(cells, device=counts.device).repeat_interleave(lengths, output_size=len(counts))
    number = counts.int() & _LOW_BITS if counts.dtype == torch.int16 else counts
    values = torch.log1p(number.float() * (target_sum / depth)[row])
    dense = values.new_zeros(cells * genes)
    return dense.scatter_(0, row * genes + columns.long(), values).view(cells, genes)
