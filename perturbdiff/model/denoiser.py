"""The denoiser f(x_t, t; control set, covariates): an estimate of the clean perturbed cells.

Properties of the network
- A token is a cell, and a sequence is a set of cells. No position is encoded, so the network is equivariant to a
  permutation that moves perturbed and control cells together.
- The network always sees the control set. Classifier-free guidance replaces only the covariates, by a learned null
  vector.
- AdaLN-Zero modulates the blocks by s = MLP([time, covariates]), which is [B, 1, D] if the cells of a set share their
  covariates.
- The previous estimate of the clean cells (self-conditioning) is an input next to x_t.
- With ``anchor: control``, output cell j is control cell j with a gain and a shift for each gene. With
  ``anchor: predicted`` or ``transferred``, the control cells are first moved by the change that is expected of the
  perturbation.
- With ``gene_noise``, each gene's own noise is added to its output, times a factor that the network gives. All other
  noise passes through the D numbers of a cell, which the genes share.
- The output is not negative. An optional hard gate turns values below the detection limit of the data into exact
  zeros.
- Model values are log1p / `unit`. `encode` and `decode` convert them, and the unit is saved with the weights.

Dimension letters: B sets, S cells in a set, G genes, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perturbdiff.model import cell_sizes
from perturbdiff.model.cell_sizes import Pool
from perturbdiff.model.covariates import CovariateEncoder, Covariates
from perturbdiff.model.expected_changes import PredictedChanges, TransferredChanges
from perturbdiff.model.layers import (
    AdaptiveNorm,
    GeneTable,
    InputLayers,
    MMDiTBlock,
    Rectified,
    TimeEmbedding,
    linear,
    modulate,
    normalise,
)

if TYPE_CHECKING:
    from perturbdiff.config.settings import ModelConfig

NULL_STD = 0.02
ANCHORED_STD = 1e-3
NOISE_START = 0.05  # model units
GAIN_RANGE = (-5.0, 1.0)  # log of the factor on a control value, which lies between 0.007 and 2.7


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
        Names of the data sets. Each has its own input layers.
    semantic
        Width of the frozen vectors of ``perturbation``, ``cell_type`` or ``gene``, for those that have them. The
        vectors are buffers, which are zero until they are filled.
    num_doses
        Number of distinct doses with a learned vector. 0 if the dose is part of the label.

    Attributes
    ----------
    unit
        Model values are log1p / unit.
    gate_threshold
        Detection limit, log1p. Outputs below it become zero if ``config.gate``.
    maximum
        [G], largest log1p value of each gene in training cells. It bounds `decode` if ``config.clip``.
    zero_level
        [G], log1p. `match_zeros` turns values below it into zeros. A gene with level 0 is not changed.
    size_spread
        [perturbations, 2, 2]: how the spread of the cells' log totals, and of their numbers of detected genes, follows
        from that of the control cells: the factor and the power of a `cell_sizes.Spread`. Row 0 is for perturbations
        that were never seen.
    expected
        With ``anchor: predicted`` or ``transferred``, the expected change of each perturbation; else None.
    recompute
        Whether the backward pass computes the blocks' activations again, which saves memory.
    """

    unit: Tensor
    gate_threshold: Tensor
    maximum: Tensor
    zero_level: Tensor
    size_spread: Tensor

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
            raise ValueError("gene_embedding 'table' needs gene vectors, and gene vectors need 'table'")
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
        self.gain_layer = None if config.anchor == "none" else linear(width, num_genes)
        if self.gain_layer is not None:  # the first estimate is the control cell itself
            for layer in (self.output_layer, self.gain_layer):
                nn.init.normal_(layer.weight, std=ANCHORED_STD)
                nn.init.zeros_(layer.bias)
        self.noise_layer = linear(width, num_genes) if config.gene_noise else None
        if self.noise_layer is not None:
            nn.init.normal_(self.noise_layer.weight, std=ANCHORED_STD)
            nn.init.constant_(self.noise_layer.bias, NOISE_START)
        if config.initialisation == "released":
            self._start_as_released()
        self.register_buffer("unit", torch.ones(()))
        self.register_buffer("gate_threshold", torch.zeros(()))
        self.register_buffer("maximum", torch.full((num_genes,), float("inf")))
        self.register_buffer("zero_level", torch.zeros(num_genes))
        self.register_buffer("size_spread", torch.ones(num_perturbations, 2, 2))
        self.expected: PredictedChanges | TransferredChanges | None = None
        if config.anchor == "predicted":
            self.expected = PredictedChanges(num_perturbations, num_genes)
        elif config.anchor == "transferred":
            self.expected = TransferredChanges(num_perturbations, num_cell_types, num_batches, num_genes)

    @torch.no_grad()
    def _start_as_released(self) -> None:
        """Give the weights the spread that they have in the released code.

        There, the shared vectors are drawn from N(0, 1). Two matrices are larger than the part of them that is used:
        half of the control input sees zeros, and half of the last attention's output is not read.
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
        shares: Tensor | None = None,
    ) -> Tensor:
        """Estimate the clean cells.

        Parameters
        ----------
        x_t
            Noised cells [B, S, G], model units.
        t
            Noise level of each set, int64 [B], 0 .. T-1.
        control
            Control cells of the same context [B, S, G], model units. With fewer sets, [B / k, S, G], each stands for k
            successive ones and is embedded once.
        covariates
            Ids [B] or [B, S]. None drops them for all sets.
        self_condition
            Earlier estimate of the clean cells [B, S, G]. None stands for zeros.
        drop
            Boolean [B]: sets whose covariates are dropped.
        dataset
            Index into `datasets` of each set, int64 [B].
        shares
            With ``anchor: transferred``, how much each context counts in the expected change of each set [B, K].

        Returns
        -------
        Non-negative estimate [B, S, G], model units.
        """
        conditioning = self.conditioning(t, covariates, drop)
        times = len(x_t) // len(control)
        firsts = covariates if covariates is None else Covariates(*(ids[::times] for ids in covariates))
        control = self.start(
            control, firsts, in_training=True, shares=None if shares is None else shares[::times]
        )
        x = self.embed(x_t, self_condition, dataset)
        stream = self.embed_control(control, None if dataset is None else dataset[::times])
        if times > 1:
            stream, control = (cells.repeat_interleave(times, 0) for cells in (stream, control))
        return self.estimate(x, stream, conditioning, control, x_t)

    def start(
        self,
        control: Tensor,
        covariates: Covariates | None,
        *,
        in_training: bool = False,
        shares: Tensor | None = None,
    ) -> Tensor:
        """Return the cells [B, S, G] that an estimate starts from: control cells, moved if a change is expected."""
        if self.expected is None or covariates is None:
            return control
        if isinstance(self.expected, TransferredChanges):
            return self.expected(control, covariates, self.unit, shares)
        return self.expected(control, covariates, self.unit, in_training=in_training)

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

    def estimate(
        self, x: Tensor, stream: Tensor, conditioning: Tensor, control: Tensor, noised: Tensor
    ) -> Tensor:
        """Return the estimate [B, S, G] from both streams [B, S, D], the `conditioning` and both kinds of cells."""
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
        if self.noise_layer is not None:
            value = value + noised.float() * self.noise_layer(h).float()
        return self._head(value)

    def conditioning(self, t: Tensor, covariates: Covariates | None, drop: Tensor | None = None) -> Tensor:
        """Return s, the vector that modulates every block: [B, 1, D], or [B, S, D] if cells have own covariates."""
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
        return Rectified.apply(raw, floor, self.config.leak)

    def _gate(self, value: Tensor) -> Tensor:
        if not self.config.gate:
            return value
        below = value * (value < self.gate_threshold / self.unit)
        return value - below.detach()  # the value is zero, and the gradient ignores the gate

    def encode(self, log1p: Tensor) -> Tensor:
        """Convert log1p values to model units."""
        return log1p / self.unit

    def decode(self, value: Tensor) -> Tensor:
        """Convert model units to log1p values that are not negative, within the training range and exactly zero."""
        log1p = self._bounded((value * self.unit).clamp_min(0))
        if self.config.gate:
            log1p = torch.where(log1p < self.gate_threshold, 0.0, log1p)
        return log1p

    def match_zeros(
        self, log1p: Tensor, control: Tensor | None, perturbation: Tensor | None = None
    ) -> Tensor:
        """Make zeros of decoded sets of cells by the genes' `zero_level` (see `cell_sizes.match_zeros`).

        A gene is then zero about as often as in the data, and its mean over a set stays as predicted, up to the gene's
        maximum. Cells [B, S, G] and their control cells are in log1p. Without control cells, numbers of detected
        genes are not matched. The ids of the perturbations [B] tell how much the numbers spread (`size_spread`). A
        model without levels changes nothing.
        """
        if not self.zero_level.any():
            return log1p
        if control is None:
            return self._bounded(cell_sizes.make_zeros(log1p, self.zero_level))
        return self._bounded(
            cell_sizes.match_zeros(log1p, self.zero_level, control, self._spread(perturbation, 1))
        )

    def match_totals(
        self, log1p: Tensor, control: Tensor, perturbation: Tensor | None = None, largest: float = math.inf
    ) -> Tensor:
        """Let the totals of a set vary no more than is expected from its control cells, none above the largest.

        See `cell_sizes.match_totals`, and `size_spread` for what the ids of the perturbations [B] tell.
        """
        spread = self._spread(perturbation, 0)
        return self._bounded(cell_sizes.match_totals(log1p, control, spread, largest))

    def _spread(self, perturbation: Tensor | None, size: int) -> cell_sizes.Spread:
        """Return what `size_spread` says of each set; of labels added after training what row 0 says."""
        if perturbation is None:
            return cell_sizes.Spread()
        known = torch.where(perturbation < len(self.size_spread), perturbation, 0)
        return cell_sizes.Spread(*self.size_spread[known, size][:, None, None].unbind(-1))

    def settle_means(self, log1p: Tensor, control: Tensor, pool: Pool, covariates: Covariates) -> Tensor:
        """Settle the means of conditions that training did not see (see `cell_sizes.settle_means`).

        Cells and control cells [B, S, G] are in log1p. Sets of conditions that were seen, or of which nothing is
        expected, stay as they are.
        """
        if self.expected is None:
            return log1p
        told, share = self.expected.expectation(covariates, pool.mean)
        settled = cell_sizes.settle_means(log1p, control, pool, told, share)
        return torch.where(self.expected.unseen(covariates)[:, None, None], self._bounded(settled), log1p)

    def _bounded(self, log1p: Tensor) -> Tensor:
        return torch.minimum(log1p, self.maximum) if self.config.clip else log1p

    def clean(self, value: Tensor) -> Tensor:
        """Bring an estimate of clean cells, model units, into the range of real cells (see `decode`)."""
        return self.encode(self.decode(value))
