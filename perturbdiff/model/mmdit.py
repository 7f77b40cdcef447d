"""The MM-DiT block: one attention over two streams of cells, perturbed and control.

Paper, App. Architecture Implementation Details, "MM-DiT fusion blocks". Both streams have one token per cell.
They are concatenated along the features, which pairs cell j of the perturbed set with cell j of the control set.
Attention runs over the S cells of the set at width 2D.

Dimension letters: B sets, S cells in a set, D model width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from perturbdiff.model.layers import MLP, AdaptiveNorm, Attention, Modulation, modulate, normalise


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
