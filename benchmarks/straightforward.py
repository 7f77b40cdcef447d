"""The released mathematics written straight from its description, as the other side of `model.py` and `gpu.py`.

One line of code per sentence of the description and nothing saved: conditioning per cell [B, S, D], the control
head and the last block's control branch computed though no loss sees them, zeros multiplied where there is no
self-conditioning, the energy distance evaluated twice (once for the log), noise in float64, guidance as two whole
passes. Imports torch only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Architecture:
    """The model's settings in the released reading; what `perturbdiff.model.Denoiser` reads of its configuration."""

    width: int = 512
    depth: int = 4
    heads: int = 8
    mlp_ratio: int = 4
    covariate_width: int = 128
    covariates: tuple[str, ...] = ("perturbation", "cell_type", "batch")
    mlp_branch: str = "parallel"
    fusion: str = "sum"
    head: str = "relu"
    gate: bool = False
    clip: bool = False
    gene_embedding: str = "shared"
    covariate_projection: str = "genes"
    projection_width: int | None = None
    initialisation: str = "scaled"
    leak: float = 0.0
    anchor: str = "none"
    gene_noise: bool = False
    dose: str = "label"


@dataclass
class Loss:
    """The released loss."""

    mmd_weight: float = 1.0
    mmd_factor: str = "half"
    mmd_statistic: str = "V"
    set_power: float = 1.0
    mse_weight: float = 1.0
    mse_reduction: str = "mean"


LABELS = {"num_perturbations": 92, "num_cell_types": 19, "num_batches": 13}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(2 * width, 6 * width)
        self.q_norm = nn.RMSNorm(2 * width // heads, eps=1e-6)
        self.k_norm = nn.RMSNorm(2 * width // heads, eps=1e-6)
        self.proj = nn.Linear(2 * width, 2 * width)
        self.adaln = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.control_adaln = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp, self.control_mlp = (
            nn.Sequential(
                nn.Linear(width, ratio * width), nn.GELU(approximate="tanh"), nn.Linear(ratio * width, width)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor, control: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaln(c).chunk(6, dim=-1)
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = self.control_adaln(c).chunk(6, -1)
        n, nc = self.norm(x), self.norm(control)
        joint = torch.cat([modulate(n, shift, scale), modulate(nc, c_shift, c_scale)], dim=-1)
        sets, cells, width = joint.shape
        qkv = self.qkv(joint).reshape(sets, cells, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        update, c_update = self.proj(out.transpose(1, 2).reshape(sets, cells, width)).chunk(2, dim=-1)
        x = x + gate * update
        x = x + mlp_gate * self.mlp(modulate(n, mlp_shift, mlp_scale))
        control = control + c_gate * c_update
        control = control + c_mlp_gate * self.control_mlp(modulate(nc, c_mlp_shift, c_mlp_scale))
        return x, control


class Head(nn.Module):
    def __init__(self, width: int, genes: int) -> None:
        super().__init__()
        self.adaln = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, genes)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaln(c).chunk(2, dim=-1)
        return F.relu(self.linear(modulate(self.norm(h), shift, scale)))


class Straightforward(nn.Module):
    """x_t, t, control, labels [B, S] or None → estimate of the clean cells and of the control cells."""

    def __init__(self, model: Architecture, genes: int, labels: tuple[int, int, int]) -> None:
        super().__init__()
        width, narrow = model.width, model.covariate_width
        self.x_embedder, self.control_embedder = nn.Linear(2 * genes, width), nn.Linear(2 * genes, width)
        self.gene_null = nn.Parameter(torch.zeros(width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.tables = nn.ModuleList(nn.Embedding(n, narrow) for n in labels)
        self.transform = nn.Linear(narrow * len(labels), genes)
        self.class_emb = nn.Sequential(nn.SiLU(), nn.Linear(genes, width))
        self.class_null = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width, model.heads, model.mlp_ratio) for _ in range(model.depth))
        self.head, self.control_head = Head(width, genes), Head(width, genes)

    def forward(
        self,
        x_t: Tensor,
        t: Tensor,
        control: Tensor,
        labels: tuple[Tensor, ...] | None,
        previous: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        dtype = self.gene_null.dtype
        previous = torch.zeros_like(x_t) if previous is None else previous
        x = self.x_embedder(torch.cat([x_t, previous], dim=-1).to(dtype)) + self.gene_null
        both = torch.cat([control, torch.zeros_like(control)], dim=-1).to(dtype)
        h = self.control_embedder(both) + self.gene_null
        c = self.time(wave(t[:, None]))
        if labels is None:
            c = c + self.class_null  # the one case in which the cells of a set share it
        else:
            parts = [table(ids) for table, ids in zip(self.tables, labels, strict=True)]
            c = c + self.class_emb(self.transform(torch.cat(parts, dim=-1)))
        for block in self.blocks:
            x, h = block(x, h, c)
        return self.head(x, c), self.control_head(h, c)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def wave(t: Tensor) -> Tensor:
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
    angle = t[..., None].float() * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def squared(x: Tensor, y: Tensor) -> Tensor:
    cross = torch.einsum("bng,bmg->bnm", x, y)
    return (x * x).sum(-1)[:, :, None] - 2 * cross + (y * y).sum(-1)[:, None, :]


def energy(x: Tensor, y: Tensor) -> Tensor:
    """Half the energy distance of each pair of sets, diagonals kept."""
    xy, xx, yy = (squared(a, b).clamp_min(1e-8).sqrt().mean((1, 2)) for a, b in ((x, y), (x, x), (y, y)))
    return xy - 0.5 * xx - 0.5 * yy


def alpha_bar(levels: int) -> Tensor:
    return torch.cumprod(1 - torch.linspace(0.1 / levels, 20 / levels, levels, dtype=torch.float64), 0)


def training_loss(
    net: Straightforward, target: Tensor, control: Tensor, labels: tuple[Tensor, ...] | None, t: Tensor,
    noise: Tensor, *, again: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the loss of one step; ``noise`` is float64, ``again`` says whether there is self-conditioning."""
    bar = alpha_bar(1000).to(target.device)[t][:, None, None]
    noised = bar.sqrt() * target + (1 - bar).sqrt() * noise
    previous = None
    if again:
        with torch.no_grad():
            previous = net(noised, t, control, labels)[0]
    estimate, _ = net(noised, t, control, labels, previous)
    mse = (target - estimate).square().mean((1, 2))
    mmd = energy(target, estimate)
    logged = energy(target, estimate.detach())  # per data set, for the log
    return {
        "total": mse.mean() + mmd.nanmean(),
        "mse": mse.mean(),
        "mmd": mmd.mean(),
        "logged": logged.mean(),
    }


@torch.no_grad()
def sample(
    net: Straightforward,
    start: Tensor,
    control: Tensor,
    labels: tuple[Tensor, ...],
    *,
    steps: int,
    weight: float,
) -> Tensor:
    """Return cells by DDIM (η = 0) over ``steps`` levels spread over all, guided, self-conditioned."""
    bars, x, previous = alpha_bar(1000), start, None
    levels = torch.linspace(999, 0, steps, dtype=torch.float64).round().long().tolist()
    for index, level in enumerate(levels):
        bar = float(bars[level])
        t = torch.full((len(x),), level)
        told, _ = net(x, t, control, labels, previous)
        untold, _ = net(x, t, control, None, previous)
        up, down = math.sqrt(1 / bar), math.sqrt(1 / bar - 1)
        noise = (1 + weight) * (up * x - told) / down - weight * (up * x - untold) / down
        clean = (up * x - down * noise).clamp_min(0)
        noise = (up * x - clean) / down
        previous = clean
        if index + 1 < len(levels):
            below = float(bars[levels[index + 1]])
            x = math.sqrt(below) * clean + math.sqrt(1 - below) * noise
    return clean


def with_weights_of(model: nn.Module, genes: int) -> Straightforward:
    """Return the straightforward network with the weights of a `Denoiser` of the released architecture."""
    ours = model.state_dict()
    config = model.config
    shared = Architecture(**{f.name: getattr(config, f.name) for f in fields(Architecture)})
    net = Straightforward(
        shared, genes, tuple(table.num_embeddings for table in model.covariate_encoder.tables.values())
    )
    found = {
        "gene_null": ours["gene_embedding"], "class_null": ours["null_covariates"],
        "x_embedder.weight": ours["input_layers.layers.0.weight"],
        "x_embedder.bias": ours["input_layers.layers.0.bias"],
        "control_embedder.bias": ours["control_layers.layers.0.bias"],
    }  # fmt: skip
    control = ours["control_layers.layers.0.weight"]
    found["control_embedder.weight"] = torch.cat([control, torch.randn_like(control)], dim=1)  # meets zeros
    pairs = {
        "time.0": "time_embedding.expand", "time.2": "time_embedding.project",
        "transform": "covariate_encoder.project", "class_emb.1": "covariate_projection",
        "head.adaln.1": "final_modulation.project", "head.linear": "output_layer",
    }  # fmt: skip
    for index, name in enumerate(model.covariate_encoder.tables):
        found[f"tables.{index}.weight"] = ours[f"covariate_encoder.tables.{name}.weight"]
    for index in range(config.depth):
        inner = {
            "qkv": "attention.qkv", "q_norm": "attention.query_norm", "k_norm": "attention.key_norm",
            "proj": "attention.project", "adaln.1": "modulation.project",
            "control_adaln.1": "control_modulation.project", "mlp.0": "mlp.expand", "mlp.2": "mlp.contract",
            "control_mlp.0": "control_mlp.expand", "control_mlp.2": "control_mlp.contract",
        }  # fmt: skip
        pairs |= {f"blocks.{index}.{a}": f"blocks.{index}.{b}" for a, b in inner.items()}
    state = net.state_dict()
    for theirs, name in pairs.items():
        for kind in ("weight", "bias"):
            if (
                f"{name}.{kind}" in ours
            ):  # the last block's control branch is not there: its weights stay random
                value, whole = ours[f"{name}.{kind}"], state[f"{theirs}.{kind}"].clone()
                whole[: len(value)] = value
                found[f"{theirs}.{kind}"] = whole
    net.load_state_dict(state | found)
    return net
