"""The covariate encoder: perturbation, dose, cell type and batch to one vector (paper, "Covariate Encoder").

A covariate's labels have learned vectors, or frozen vectors that say what they mean (a protein's sequence, a
molecule, a text) under a learned linear map. The vectors are concatenated and linearly projected. Id 0 of each
covariate is reserved for "none or unknown".
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


class SemanticTable(nn.Module):
    """Frozen vectors of labels under a learned linear map.

    Attributes
    ----------
    vectors
        Buffer, float32 [ids, inputs]; row 0, of the reserved id, is zero.
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
        Buffer, float32 [ids, doses]: which dose a perturbation id stands for, as weights (several agents have
        several doses; a perturbation without a dose has none).
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
    semantic
        Width of the frozen vectors of the covariates that have them; the others' vectors are learned.
    doses
        Number of distinct doses, 0 for none.
    dose_beside
        The dose's vector is concatenated to the perturbation's (released code) instead of added (paper).
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
        told = doses > 0 and "perturbation" in self.names
        self.dose = DoseTable(sizes["perturbation"], doses, width) if told else None
        self.dose_beside = told and dose_beside
        self.project = nn.Linear(width * (len(self.names) + self.dose_beside), out_width)

    def forward(self, covariates: Covariates) -> Tensor:
        """Map ids [B] or [B, S] to [B, out_width] or [B, S, out_width]."""
        parts = []
        for name in self.names:
            ids = getattr(covariates, name)
            part = self.tables[name](ids)
            if name == "perturbation" and self.dose is not None:
                dose = self.dose(ids)
                part = torch.cat([part, dose], dim=-1) if self.dose_beside else part + dose
            parts.append(part)
        return self.project(torch.cat(parts, dim=-1))


def _learned(ids: int, width: int) -> nn.Embedding:
    table = nn.Embedding(ids, width)
    nn.init.zeros_(table.weight[0].detach())  # an unknown label is the mean of the known ones
    return table
