"""Layers of the denoiser: small ones, those that genes pass, and the MM-DiT block.

Paper, App. Architecture Implementation Details, "MM-DiT fusion blocks". Both streams of cells have one token per cell.
They are concatenated along the features, which pairs cell j of the perturbed set with cell j of the control set.
Attention runs over the S cells of the set at width 2D.

Dimension letters: B sets, S cells in a set, D model width, H heads, G genes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
SINUSOID_WIDTH = 256


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer with Xavier-uniform weights and zero bias, the initialisation of DiT."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def normalise(x: Tensor) -> Tensor:
    """Layer-normalise the features [..., D] without learned parameters, which are in the modulation."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def sinusoid(t: Tensor, width: int = SINUSOID_WIDTH) -> Tensor:
    """Return the cosine, then the sine features of integer steps ``t`` [...]: float32 [..., width]."""
    half = width // 2
    frequencies = torch.exp(
        -math.log(10000.0) * torch.arange(half, device=t.device, dtype=torch.float32) / half
    )
    angle = t.float()[..., None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def modulate(normalised: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale normalised features [B, S, D] by [B, 1 or S, D]."""
    return normalised * (1 + scale) + shift  # in this order, as the released code rounds


class Modulation(NamedTuple):
    """The AdaLN-Zero vectors of one sublayer: shift and scale of its input, gate of its output. Each [B, 1 or S, D]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor

    def apply(self, normalised: Tensor) -> Tensor:
        """Shift and scale normalised features [B, S, D]."""
        return modulate(normalised, self.shift, self.scale)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """Return ``x`` + gate · ``update``."""
        return torch.addcmul(x, self.gate, update)


class AdaptiveNorm(nn.Module):
    """Projects the conditioning to ``parts`` vectors of width D. They start at zero, so that blocks are identities."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.project = nn.Linear(width, parts * width)
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)

    def forward(self, conditioning: Tensor) -> tuple[Tensor, ...]:
        """Map the conditioning [B, 1 or S, D] to ``parts`` tensors of the same shape."""
        return self.project(F.silu(conditioning)).chunk(self.parts, dim=-1)


class TimeEmbedding(nn.Module):
    """Sinusoid of the diffusion step, followed by a two-layer MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(SINUSOID_WIDTH, width)
        self.project = nn.Linear(width, width)
        for layer in (self.expand, self.project):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, t: Tensor) -> Tensor:
        """Map steps [B] (0 .. T-1) to [B, D]."""
        features = sinusoid(t).to(self.expand.weight.dtype)
        return self.project(F.silu(self.expand(features)))


class MLP(nn.Module):
    """D → ratio·D → D with GELU (tanh form)."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.expand = linear(width, ratio * width)
        self.contract = linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D], cell by cell."""
        return self.contract(F.gelu(self.expand(x), approximate="tanh"))


class Attention(nn.Module):
    """Self-attention over the unordered cells of a set, with RMS-normalised queries and keys."""

    def __init__(self, width: int, heads: int, out_width: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"attention width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.qkv = linear(width, 3 * width)
        self.query_norm = nn.RMSNorm(width // heads, eps=EPS)
        self.key_norm = nn.RMSNorm(width // heads, eps=EPS)
        self.project = linear(width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, width] to [B, S, out_width]."""
        sets, cells, width = x.shape
        qkv = self.qkv(x).reshape(sets, cells, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, S, width / H]
        q, k = self.query_norm(q.float()).to(v.dtype), self.key_norm(k.float()).to(v.dtype)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.project(attended.transpose(1, 2).reshape(sets, cells, width))


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


class MMDiTBlock(nn.Module):
    """Joint attention over both streams, then an MLP for each stream, all modulated by AdaLN-Zero.

    Parameters
    ----------
    width, heads, mlp_ratio
        D, attention heads over 2D, hidden width of the MLPs in units of D.
    mlp_branch
        ``sequential``: the MLP sees the stream after the attention update (paper). ``parallel``: it sees the
        block's input, as the attention does (released code).
    last
        Nothing reads the control stream of the last block, so that block has no control update and no parameters
        for it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: int,
        mlp_branch: Literal["sequential", "parallel"],
        *,
        last: bool = False,
    ) -> None:
        super().__init__()
        self.sequential = mlp_branch == "sequential"
        self.last = last
        self.attention = Attention(2 * width, heads, width if last else 2 * width)
        self.modulation = AdaptiveNorm(width, 6)
        self.control_modulation = AdaptiveNorm(width, 2 if last else 6)
        self.mlp = MLP(width, mlp_ratio)
        self.control_mlp = None if last else MLP(width, mlp_ratio)

    def forward(self, x: Tensor, control: Tensor, conditioning: Tensor) -> tuple[Tensor, Tensor]:
        """Update both streams.

        Parameters
        ----------
        x, control
            Perturbed and control stream, each [B, S, D].
        conditioning
            [B, 1, D], or [B, S, D] if the cells of a set differ in their covariates.
        """
        modulation = self.modulation(conditioning)
        attn, mlp = Modulation(*modulation[:3]), Modulation(*modulation[3:])
        control_modulation = self.control_modulation(conditioning)
        normal_x, normal_control = normalise(x), normalise(control)
        joint = torch.cat([attn.apply(normal_x), modulate(normal_control, *control_modulation[:2])], dim=-1)
        update = self.attention(joint)
        if self.control_mlp is None:
            return self._add_mlp(attn.add(x, update), normal_x, mlp, self.mlp), control
        x_update, control_update = update.chunk(2, dim=-1)
        control_attn, control_mlp = Modulation(*control_modulation[:3]), Modulation(*control_modulation[3:])
        x = self._add_mlp(attn.add(x, x_update), normal_x, mlp, self.mlp)
        control = control_attn.add(control, control_update)
        return x, self._add_mlp(control, normal_control, control_mlp, self.control_mlp)

    def _add_mlp(self, x: Tensor, normal_input: Tensor, modulation: Modulation, mlp: MLP) -> Tensor:
        """Add the gated MLP of the stream ``x``, or of the block's normalised input if the branches are parallel."""
        source = normalise(x) if self.sequential else normal_input
        return modulation.add(x, mlp(modulation.apply(source)))
