"""The denoiser f(x_t, t; control set, covariates): an estimate of the clean perturbed cells.

What is notable
- one token per cell, a set of cells is the sentence; nothing tells cell j its position, so the network is
  equivariant to a permutation that moves perturbed and control cells together
- the control set is always seen; classifier-free guidance drops the covariates only, for a learned null vector
- AdaLN-Zero from s = MLP([time, covariates]), [B, 1, D] when the cells of a set share their covariates
- the previous estimate of the clean cells (self-conditioning) enters beside x_t
- anchored (``anchor: control``), output cell j is control cell j with a gain and a shift for each gene
- non-negative output; optionally a hard gate that turns values below the data's detection limit into exact zeros
- the model works in units of log1p / `unit`; `encode` and `decode` translate, and travel with the weights

Dimension letters: B sets, S cells in a set, G genes, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perturbdiff.model.covariates import CovariateEncoder, Covariates
from perturbdiff.model.layers import AdaptiveNorm, TimeEmbedding, linear, modulate, normalise
from perturbdiff.model.mmdit import MMDiTBlock

if TYPE_CHECKING:
    from perturbdiff.config.settings import ModelConfig

NULL_STD = 0.02
ANCHORED_STD = 1e-3
GAIN_RANGE = (-5.0, 1.0)  # log of the factor on a control value: from nothing to almost threefold


class GeneTable(nn.Module):
    """Frozen vectors of the genes, mapped to one number each that is added to the expression before the input layer.

    The input layers turn it into one vector for every cell, so it stands where the shared embedding does.

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
    """Linear maps genes → D, one for each data set; a set of cells goes through its own data set's."""

    def __init__(self, inputs: int, width: int, datasets: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(linear(inputs, width) for _ in range(datasets))

    def forward(self, parts: Sequence[Tensor | None], dataset: Tensor | None) -> Tensor:
        """Map the concatenation of ``parts``, each [B, S, G] or None for zeros, to [B, S, D].

        ``dataset`` [B] says which layer each set uses; it may be None if there is only one.
        """
        if len(self.layers) == 1:
            return _split_linear(parts, self.layers[0])
        if dataset is None:
            raise ValueError(f"the model has {len(self.layers)} input layers: say each set's data set")
        first = next(part for part in parts if part is not None)
        out = first.new_empty(*first.shape[:-1], self.width)
        for index, layer in enumerate(self.layers):
            mine = dataset == index  # may be none: an empty product still gives every weight a gradient
            chosen = _split_linear([None if part is None else part[mine] for part in parts], layer)
            out = out.to(chosen.dtype)
            out[mine] = chosen
        return out


def _split_linear(parts: Sequence[Tensor | None], layer: nn.Module) -> Tensor:
    """Apply a linear layer to concatenated ``parts`` without concatenating; a None part costs nothing."""
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


class _Rectified(torch.autograd.Function):
    """max(raw, 0), and zero below ``floor``; the gradient passes as if there were no floor, and ``leak`` times below 0.

    So a value that is zero for all cells can come back. One function, because each of its operations is a pass over
    all cells and genes.
    """

    @staticmethod
    def forward(ctx: Any, raw: Tensor, floor: Tensor | None, leak: float) -> Tensor:
        value = F.relu(raw)
        ctx.save_for_backward(raw)
        ctx.leak = leak
        return value if floor is None else torch.where(value < floor, 0.0, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (raw,) = ctx.saved_tensors
        passed = torch.ops.aten.leaky_relu_backward(gradient, raw, ctx.leak, False)
        return passed.masked_fill_(raw == 0, 0.0), None, None


class Denoiser(nn.Module):
    """Estimates the clean cells B_0 from the noised cells B_t (paper, Eq. x0_predictor).

    Parameters
    ----------
    config
        Architecture.
    num_genes
        G.
    num_perturbations, num_cell_types, num_batches
        Sizes of the vocabularies, each with the reserved id 0.
    datasets
        Names of the data sets; each has its own input layers.
    semantic
        Width of the frozen vectors of ``perturbation``, ``cell_type`` or ``gene``, where there are any; they are
        buffers, zero until filled.
    num_doses
        Number of distinct doses with a learned vector; 0 if the dose is part of the label.

    Attributes
    ----------
    unit
        Model values are log1p / unit.
    gate_threshold
        Detection limit, log1p; outputs below it become zero if ``config.gate``.
    maximum
        [G], largest log1p value of each gene in training cells; bounds `decode` if ``config.clip``.
    zero_level
        [G], log1p; below it `match_zeros` makes zeros. 0 where nothing is to be done.
    recompute
        Whether the blocks' activations are computed again in the backward pass, which saves memory.
    """

    unit: Tensor
    gate_threshold: Tensor
    maximum: Tensor
    zero_level: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_genes: int,
        num_perturbations: int,
        num_cell_types: int,
        num_batches: int,
        datasets: Sequence[str] = ("all",),
        semantic: Mapping[str, int] | None = None,
        num_doses: int = 0,
    ) -> None:
        super().__init__()
        self.recompute = False
        width = config.width
        frozen = dict(semantic or {})
        self.config, self.num_genes, self.datasets = config, num_genes, tuple(datasets)
        self.input_layers = InputLayers(2 * num_genes, width, len(datasets))
        self.control_layers = InputLayers(num_genes, width, len(datasets))
        self.gene_embedding = (
            nn.Parameter(NULL_STD * torch.randn(width)) if config.gene_embedding == "shared" else None
        )
        if (config.gene_embedding == "table") != ("gene" in frozen):
            raise ValueError("gene_embedding 'table' and vectors of the genes go together")
        self.gene_table = GeneTable(num_genes, frozen["gene"]) if "gene" in frozen else None
        self.time_embedding = TimeEmbedding(width)
        sizes = {"perturbation": num_perturbations, "cell_type": num_cell_types, "batch": num_batches}
        through_genes = config.covariate_projection == "genes"
        inner = config.projection_width or num_genes
        self.covariate_encoder = CovariateEncoder(
            sizes, config.covariates, config.covariate_width, inner if through_genes else width,
            semantic=frozen, doses=num_doses, dose_beside=config.dose == "concat",
        )  # fmt: skip
        self.covariate_projection = linear(inner, width) if through_genes else None
        self.null_covariates = nn.Parameter(NULL_STD * torch.randn(width))
        self.fusion = (
            nn.Sequential(linear(2 * width, width), nn.SiLU(), linear(width, width))
            if config.fusion == "concat"
            else None
        )
        last = config.depth - 1
        self.blocks = nn.ModuleList(
            MMDiTBlock(width, config.heads, config.mlp_ratio, config.mlp_branch, last=index == last)
            for index in range(config.depth)
        )
        self.final_modulation = AdaptiveNorm(width, 2)
        self.output_layer = linear(width, num_genes)
        self.gain_layer = linear(width, num_genes) if config.anchor == "control" else None
        if self.gain_layer is not None:  # the first estimate is the control cell itself
            for layer in (self.output_layer, self.gain_layer):
                nn.init.normal_(layer.weight, std=ANCHORED_STD)
                nn.init.zeros_(layer.bias)
        if config.initialisation == "released":
            self._start_as_released()
        self.register_buffer("unit", torch.ones(()))
        self.register_buffer("gate_threshold", torch.zeros(()))
        self.register_buffer("maximum", torch.full((num_genes,), float("inf")))
        self.register_buffer("zero_level", torch.zeros(num_genes))

    @torch.no_grad()
    def _start_as_released(self) -> None:
        """Give the layers the spread that they have in the released code.

        Its shared vectors are drawn from N(0, 1), and two of its matrices are larger than what is used of them:
        the control input (half of it sees zeros) and the last attention's output (half of it feeds nothing).
        """
        for vector in (self.gene_embedding, self.null_covariates):
            if vector is not None:
                nn.init.normal_(vector)
        genes, width = self.num_genes, self.config.width
        for layer in self.control_layers.layers:
            cast("nn.Linear", layer).weight.mul_(((genes + width) / (2 * genes + width)) ** 0.5)
        last = cast("MMDiTBlock", self.blocks[-1])
        last.attention.project.weight.mul_(0.75**0.5)

    def forward(
        self,
        x_t: Tensor,
        t: Tensor,
        control: Tensor,
        covariates: Covariates | None,
        *,
        self_condition: Tensor | None = None,
        drop: Tensor | None = None,
        dataset: Tensor | None = None,
    ) -> Tensor:
        """Estimate the clean cells.

        Parameters
        ----------
        x_t
            Noised cells [B, S, G], model units.
        t
            Noise level of each set, int64 [B], 0 .. T-1.
        control
            Control cells of the same context [B, S, G], model units.
        covariates
            Ids [B] or [B, S]; None drops them for all sets.
        self_condition
            Earlier estimate of the clean cells [B, S, G]; None stands for zeros.
        drop
            Boolean [B]: sets whose covariates are dropped.
        dataset
            Index into `datasets` of each set, int64 [B].

        Returns
        -------
        Non-negative estimate [B, S, G], model units.
        """
        conditioning = self.conditioning(t, covariates, drop)
        x = self.embed(x_t, self_condition, dataset)
        return self.estimate(x, self.embed_control(control, dataset), conditioning, control)

    def embed(self, x_t: Tensor, self_condition: Tensor | None, dataset: Tensor | None) -> Tensor:
        """Return the perturbed stream [B, S, D] before the first block."""
        if self.gene_table is not None:
            per_gene = self.gene_table()
            x_t = x_t + per_gene
            self_condition = per_gene.expand_as(x_t) if self_condition is None else self_condition + per_gene
        x = self.input_layers([x_t, self_condition], dataset)
        return x if self.gene_embedding is None else x + self.gene_embedding

    def embed_control(self, control: Tensor, dataset: Tensor | None) -> Tensor:
        """Return the control stream [B, S, D] before the first block."""
        if self.gene_table is not None:
            control = control + self.gene_table()
        stream = self.control_layers([control], dataset)
        return stream if self.gene_embedding is None else stream + self.gene_embedding

    def estimate(self, x: Tensor, stream: Tensor, conditioning: Tensor, control: Tensor) -> Tensor:
        """Return the estimate [B, S, G] from both streams [B, S, D] and the `conditioning`."""
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x, stream = checkpoint(
                    block, x, stream, conditioning, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, stream = block(x, stream, conditioning)
        h = modulate(normalise(x), *self.final_modulation(conditioning))
        value = self.output_layer(h).float()
        if self.gain_layer is not None:
            value = value + control.float() * self.gain_layer(h).float().clamp(*GAIN_RANGE).exp()
        return self._head(value)

    def conditioning(self, t: Tensor, covariates: Covariates | None, drop: Tensor | None = None) -> Tensor:
        """Return s, the vector that modulates every block: [B, 1, D], or [B, S, D] with covariates per cell."""
        time = self.time_embedding(t)[:, None]
        if covariates is None:
            label = self.null_covariates.expand(len(t), 1, -1)
        else:
            label = self.covariate_encoder(covariates)
            if self.covariate_projection is not None:
                label = self.covariate_projection(F.silu(label))
            label = label[:, None] if label.dim() == 2 else label
            if drop is not None:
                label = torch.where(drop[:, None, None], self.null_covariates.to(label.dtype), label)
        if self.fusion is None:
            return F.silu(time + label) if self.config.fusion == "sum-silu" else time + label
        return self.fusion(torch.cat([time.expand(-1, label.shape[1], -1), label], dim=-1))

    def _head(self, raw: Tensor) -> Tensor:
        if self.config.head == "softplus":
            return self._gate(F.softplus(raw))
        floor = self.gate_threshold / self.unit if self.config.gate else None
        return _Rectified.apply(raw, floor, self.config.leak)

    def _gate(self, value: Tensor) -> Tensor:
        if not self.config.gate:
            return value
        below = value * (value < self.gate_threshold / self.unit)
        return value - below.detach()  # zero, but the gradient passes as if it were not gated

    def encode(self, log1p: Tensor) -> Tensor:
        """Translate log1p values to model units."""
        return log1p / self.unit

    def decode(self, value: Tensor) -> Tensor:
        """Translate model units to log1p values: non-negative, within the training range, exact zeros."""
        log1p = (value * self.unit).clamp_min(0)
        if self.config.clip:
            log1p = torch.minimum(log1p, self.maximum)
        if self.config.gate:
            log1p = torch.where(log1p < self.gate_threshold, 0.0, log1p)
        return log1p

    def match_zeros(self, log1p: Tensor) -> Tensor:
        """Turn each gene's values below `zero_level` into zeros; the other cells of the set take over their sum.

        So a gene is zero about as often as in the data, and its mean over the set of cells stays as predicted. A
        gene without a value above its level is left alone.

        Parameters
        ----------
        log1p
            Decoded sets of cells [..., S, G].
        """
        kept = torch.where(log1p < self.zero_level, 0.0, log1p)
        whole, rest = log1p.sum(-2, keepdim=True), kept.sum(-2, keepdim=True)
        matched = torch.where(rest > 0, kept * (whole / rest), log1p)
        return torch.minimum(matched, self.maximum) if self.config.clip else matched

    def clean(self, value: Tensor) -> Tensor:
        """Put an estimate of clean cells, model units, back into what cells can be (see `decode`)."""
        return self.encode(self.decode(value))
