"""The covariate encoder: perturbation, cell type and batch to one vector (paper, "Covariate Encoder").

Each covariate has a table of learned vectors. They are concatenated and linearly projected. Id 0 of each table
is reserved for "none or unknown".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

NAMES = ("perturbation", "cell_type", "batch")


class Covariates(NamedTuple):
    """Ids of the sets' covariates, int64: [B] if the cells of a set agree, else [B, S]."""

    perturbation: Tensor
    cell_type: Tensor
    batch: Tensor


class CovariateEncoder(nn.Module):
    """Embeds each covariate on its own, concatenates in the order of `NAMES` and projects.

    Parameters
    ----------
    sizes
        Number of ids of each covariate, with the reserved id 0.
    names
        The covariates to use, of `NAMES`.
    width
        Width of each covariate's vector.
    out_width
        Width after the projection.
    """

    def __init__(self, sizes: Mapping[str, int], names: Sequence[str], width: int, out_width: int) -> None:
        super().__init__()
        self.names = tuple(name for name in NAMES if name in names)
        if not self.names:
            raise ValueError(f"the covariate encoder needs at least one of {', '.join(NAMES)}")
        tables = {name: nn.Embedding(sizes[name], width) for name in self.names}
        for table in tables.values():
            nn.init.zeros_(table.weight[0].detach())  # an unknown label is the mean of the known ones
        self.tables = nn.ModuleDict(tables)
        self.project = nn.Linear(width * len(self.names), out_width)

    def forward(self, covariates: Covariates) -> Tensor:
        """Map ids [B] or [B, S] to [B, out_width] or [B, S, out_width]."""
        parts = [self.tables[name](getattr(covariates, name)) for name in self.names]
        return self.project(torch.cat(parts, dim=-1))
