"""Small layers of the denoiser. Dimension letters: B sets, S cells in a set, D model width, H heads."""

from __future__ import annotations

import math
from typing import NamedTuple

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
