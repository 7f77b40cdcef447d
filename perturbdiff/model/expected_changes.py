"""The change that is expected of each perturbation, by which control cells are moved before a network sees them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_RAISED = 3.0
"""No value is raised by more than this factor to bring its gene's mean to the expected one."""


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
    explained
        Buffer, float32 scalar: how much of the differences between changes the vectors explain, when each training
        perturbation is predicted without itself, 0 to 1.
    left_out
        Buffer, float32 [ids, G]: the same, each predicted by the regression without itself. It is made anew for each
        training and not saved.
    """

    changes: Tensor
    measured: Tensor
    explained: Tensor
    left_out: Tensor

    def __init__(self, ids: int, genes: int) -> None:
        super().__init__()
        self.register_buffer("changes", torch.zeros(ids, genes))
        self.register_buffer("measured", torch.zeros(ids))
        self.register_buffer("explained", torch.zeros(()))
        self.register_buffer("left_out", torch.zeros(ids, genes), persistent=False)

    def forward(self, control: Tensor, perturbation: Tensor, unit: Tensor, *, in_training: bool) -> Tensor:
        """Return control cells [B, S, G] (model units, log1p / ``unit``), moved and not negative.

        ``perturbation`` holds ids [B], or [B, S] if the cells of a set differ.
        """
        change = (self.left_out if in_training else self.changes)[perturbation] / unit
        return F.relu(control + (change[:, None] if change.dim() == 2 else change))

    def settle_means(self, log1p: Tensor, control: Tensor, pool: Tensor, perturbation: Tensor) -> Tensor:
        """Scale each gene in sets of unseen perturbations so that its mean is the expected one.

        A network tells the mean of an unseen perturbation less surely than the shape of its cells. So the change of
        the mean is between the network's and the one that the vectors tell, at `explained` of the way. And it is the
        change from the mean of all matched control cells. The few that a set starts from have a mean of their own.

        Parameters
        ----------
        log1p
            Predicted cells [B, S, G], log1p.
        control
            The control cells that they start from, log1p [B, S, G].
        pool
            Mean of all matched control cells of each set, log1p [B, G].
        perturbation
            Ids [B].

        Returns
        -------
        The cells. Zeros stay zeros, and sets of the control and of perturbations that were seen stay as they are.
        """
        expected = self.changes[perturbation]
        unseen = (self.measured[perturbation] == 0) & expected.any(-1)
        mean = log1p.mean(-2)
        change = torch.lerp(expected, mean - control.mean(-2), self.explained)
        factor = F.relu(pool + change) / mean.clamp_min(1e-6)
        factor = torch.where(unseen[:, None], factor.clamp_max(MOST_RAISED), 1.0)
        return log1p * factor[:, None]
