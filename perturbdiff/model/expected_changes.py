"""The change that is expected of each perturbation, by which control cells are moved before a network sees them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ExpectedChanges(nn.Module):
    """Moves control cells by the change that is expected of a perturbation.

    The network then estimates what is left. In training, the change of each perturbation is what the other
    perturbations tell of it. So the network learns how far such changes can be trusted, and what is to be done with
    cells that were moved by them, also for perturbations that it has never seen.

    Attributes
    ----------
    changes
        Buffer, float32 [ids, G], log1p: mean change over the training contexts, or else the change that kernel ridge
        regression predicts from the perturbation's vector. Zero for the control and for id 0.
    measured
        Buffer, float32 [ids]: 1 for perturbations of training conditions, else 0.
    left_out
        Buffer, float32 [ids, G]: the same, each predicted by the regression without itself. It is made anew for each
        training and not saved.
    """

    changes: Tensor
    measured: Tensor
    left_out: Tensor

    def __init__(self, ids: int, genes: int) -> None:
        super().__init__()
        self.register_buffer("changes", torch.zeros(ids, genes))
        self.register_buffer("measured", torch.zeros(ids))
        self.register_buffer("left_out", torch.zeros(ids, genes), persistent=False)

    def forward(self, control: Tensor, perturbation: Tensor, unit: Tensor, *, in_training: bool) -> Tensor:
        """Return control cells [B, S, G] (model units, log1p / ``unit``), moved and not negative.

        ``perturbation`` holds ids [B], or [B, S] if the cells of a set differ.
        """
        change = (self.left_out if in_training else self.changes)[perturbation] / unit
        return F.relu(control + (change[:, None] if change.dim() == 2 else change))
