"""Layers that genes pass: into the width of the network, with vectors of genes, and out as values above zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perturbdiff.model.layers import linear


class GeneTable(nn.Module):
    """Frozen vectors of genes. Each is mapped to one number, which is added to the gene's expression.

    The input layers turn these numbers into one vector for every cell, as the shared embedding is.

    Attributes
    ----------
    vectors
        Buffer, float32 [G, inputs].
    """

    vectors: Tensor

    def __init__(self, genes: int, inputs: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.zeros(genes, inputs))
        self.project = nn.Linear(inputs, 1)

    def forward(self) -> Tensor:
        """Return one number for each gene [G]."""
        return self.project(self.vectors.to(self.project.weight.dtype))[:, 0]


class InputLayers(nn.Module):
    """Linear maps from genes to D, one for each data set. A set of cells passes through the map of its data set."""

    def __init__(self, inputs: int, width: int, datasets: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(linear(inputs, width) for _ in range(datasets))

    def forward(self, parts: Sequence[Tensor | None], dataset: Tensor | None) -> Tensor:
        """Map the concatenation of ``parts``, each [B, S, G] or None for zeros, to [B, S, D].

        ``dataset`` [B] gives the layer of each set. It may be None if there is only one layer.
        """
        if len(self.layers) == 1:
            return _split_linear(parts, self.layers[0])
        if dataset is None:
            raise ValueError(f"the model has {len(self.layers)} input layers: say each set's data set")
        first = next(part for part in parts if part is not None)
        out = first.new_empty(*first.shape[:-1], self.width)
        for index, layer in enumerate(self.layers):
            selected = dataset == index  # also if no set is selected, so that every weight has a gradient
            embedded = _split_linear([None if part is None else part[selected] for part in parts], layer)
            out = out.to(embedded.dtype)
            out[selected] = embedded
        return out


def _split_linear(parts: Sequence[Tensor | None], layer: nn.Module) -> Tensor:
    """Apply a linear layer to concatenated ``parts``, without concatenating them. A None part costs nothing."""
    weight, bias = cast("Tensor", layer.weight), cast("Tensor", layer.bias)
    total: Tensor | None = None
    size = weight.shape[1] // len(parts)
    for index, part in enumerate(parts):
        if part is None:
            continue
        columns = weight[:, index * size : (index + 1) * size]
        term = F.linear(part.to(weight.dtype), columns, bias if total is None else None)
        total = term if total is None else total + term
    if total is None:
        raise ValueError("nothing to embed")
    return total


class Rectified(torch.autograd.Function):
    """Computes max(raw, 0), and zero below ``floor``.

    The gradient ignores the floor, and below 0 it is multiplied by ``leak``, so that a gene whose values are zero in
    all cells can recover. This is one function because each operation is a pass over all cells and genes.
    """

    @staticmethod
    def forward(ctx: Any, raw: Tensor, floor: Tensor | None, leak: float) -> Tensor:
        """Return the values [B, S, G]."""
        value = F.relu(raw)
        ctx.save_for_backward(raw)
        ctx.leak = leak
        return value if floor is None else torch.where(value < floor, 0.0, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of ``raw``."""
        (raw,) = ctx.saved_tensors
        passed = torch.ops.aten.leaky_relu_backward(gradient, raw, ctx.leak, False)
        return passed.masked_fill_(raw == 0, 0.0), None, None
