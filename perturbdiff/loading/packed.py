"""Sparse counts to dense log1p values, on whatever device they lie: a batch travels to a GPU as sparse rows."""

from __future__ import annotations

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
