"""The covariate encoder turns perturbation, dose, cell type and batch into one vector (paper, "Covariate Encoder").

The labels of a covariate have learned vectors, or frozen vectors of their meaning (of a protein's sequence, a molecule
or a text) that pass through a learned linear map. The vectors of all covariates are concatenated and projected
linearly. Id 0 of each covariate is reserved for "none or unknown".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

NAMES = ("perturbation", "cell_type", "batch")


class Covariates(NamedTuple):
    """Covariate ids of sets of cells, int64: [B] if all cells of a set share them, else [B, S]."""

    perturbation: Tensor
    cell_type: Tensor
    batch: Tensor


class SemanticTable(nn.Module):
    """Frozen vectors of labels, followed by a learned linear map.

    Attributes
    ----------
    vectors
        Buffer, float32 [ids, inputs]. Row 0 belongs to the reserved id and is zero.
    """

    vectors: Tensor

    def __init__(self, ids: int, inputs: int, width: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.zeros(ids, inputs))
        self.project = nn.Linear(inputs, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to [..., width]."""
        return self.project(self.vectors[ids].to(self.project.weight.dtype))


class DoseTable(nn.Module):
    """A learned vector for each distinct dose.

    Attributes
    ----------
    weights
        Buffer, float32 [ids, doses]: the doses of each perturbation, as weights. A combination of agents can have
        several doses, and a perturbation without a dose has a row of zeros.
    """

    weights: Tensor

    def __init__(self, ids: int, doses: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.zeros(ids, doses))
        self.vectors = nn.Parameter(torch.randn(doses, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Map perturbation ids [...] to [..., width]."""
        return self.weights[ids].to(self.vectors.dtype) @ self.vectors


class CovariateEncoder(nn.Module):
    """Embeds each covariate by itself, concatenates the vectors in the order of `NAMES` and projects them.

    Parameters
    ----------
    sizes
        Number of ids of each covariate. This includes the reserved id 0.
    names
        The covariates to use, a choice from `NAMES`.
    width
        Width of each covariate's vector.
    out_width
        Width after the projection.
    semantic
        Width of the frozen vectors, for the covariates that have them. The other covariates learn their vectors.
    doses
        Number of distinct doses. 0 means that doses have no vectors.
    dose_beside
        Concatenate the vectors of dose and perturbation (released code) instead of adding them (paper).
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        names: Sequence[str],
        width: int,
        out_width: int,
        *,
        semantic: Mapping[str, int] | None = None,
        doses: int = 0,
        dose_beside: bool = False,
    ) -> None:
        super().__init__()
        self.names = tuple(name for name in NAMES if name in names)
        if not self.names:
            raise ValueError(f"the covariate encoder needs at least one of {', '.join(NAMES)}")
        vectors = semantic or {}
        self.tables = nn.ModuleDict(
            {
                name: SemanticTable(sizes[name], vectors[name], width)
                if name in vectors
                else _learned(sizes[name], width)
                for name in self.names
            }
        )
        has_doses = doses > 0 and "perturbation" in self.names
        self.dose = DoseTable(sizes["perturbation"], doses, width) if has_doses else None
        self.dose_beside = has_doses and dose_beside
        self.project = nn.Linear(width * (len(self.names) + self.dose_beside), out_width)

    def forward(self, covariates: Covariates) -> Tensor:
        """Map ids [B] or [B, S] to [B, out_width] or [B, S, out_width]."""
        vectors: list[Tensor] = []
        for name in self.names:
            ids = getattr(covariates, name)
            vector = self.tables[name](ids)
            if name == "perturbation" and self.dose is not None:
                dose = self.dose(ids)
                vector = torch.cat([vector, dose], dim=-1) if self.dose_beside else vector + dose
            vectors.append(vector)
        return self.project(torch.cat(vectors, dim=-1))


def _learned(ids: int, width: int) -> nn.Embedding:
    table = nn.Embedding(ids, width)
    nn.init.zeros_(table.weight[0].detach())  # an unknown label is the mean of the known ones
    return table
