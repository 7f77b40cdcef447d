"""Moves control cells by the change that is expected of a perturbation, before a network estimates what is left.

Dimension letters: B sets, S cells in a set, G genes, K contexts (with the reserved id 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perturbdiff.model.covariates import Covariates

_NETWORKS_SHARE = 2 / 3


class PredictedChanges(nn.Module):
    """Changes that perturbations' vectors tell (``anchor: predicted``). Control cells are moved by adding them.

    In training, the change of each perturbation is what the other perturbations tell of it. So the network learns how
    far such changes can be trusted, and what is to be done with cells that were moved by them, also for perturbations
    that it has never seen.

    Attributes
    ----------
    changes
        Buffer, float32 [ids, G], log1p: mean change over the training contexts, or else the change that kernel ridge
        regression predicts from the perturbation's vector. Zero for the control and for id 0.
    measured
        Buffer, float32 [ids]: 1 for perturbations of training conditions, else 0.
    explained
        Buffer, float32 scalar: how much of the differences between changes the vectors explain, when each training
        perturbation is predicted without itself, 0 to 1; -1 if a bundle of an earlier version does not tell.
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

    def forward(self, control: Tensor, covariates: Covariates, unit: Tensor, *, in_training: bool) -> Tensor:
        """Return control cells [B, S, G] (model units, log1p / ``unit``), moved and not negative.

        The covariates hold ids [B], or [B, S] if the cells of a set differ.
        """
        change = (self.left_out if in_training else self.changes)[covariates.perturbation] / unit
        return F.relu(control + (change[:, None] if change.dim() == 2 else change))

    def unseen(self, covariates: Covariates) -> Tensor:
        """Return, for ids [n], which perturbations were not in training but have a change that vectors tell."""
        told = (self.measured == 0) & (self.explained >= 0) & self.changes.any(-1)
        return told[covariates.perturbation]

    def expectation(self, covariates: Covariates, level: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the changes [B, G] that vectors tell, log1p, and the share that a network's own change counts."""
        return self.changes[covariates.perturbation], self.explained

    def add(self, changes: Tensor) -> None:
        """Append the changes [n, G] of perturbations that training did not see."""
        self.changes = torch.cat([self.changes, changes.to(self.changes)])
        self.left_out = torch.cat([self.left_out, changes.to(self.left_out)])
        self.measured = torch.cat([self.measured, self.measured.new_zeros(len(changes))])


class TransferredChanges(nn.Module):
    """Changes that a perturbation made in other contexts (``anchor: transferred``). Near contexts count more.

    A context is a cell type, or a batch if there is one cell type. The expected change is a mean over the contexts in
    which the perturbation was trained on. In sampling, their weights follow from how near they are. In training, the
    weights are drawn anew for each set: the network starts from cells that were moved well or badly, sees which, and
    learns to mend each. Genes that rise are raised by the mean change. Genes that fall are multiplied by
    the share of their level that the same contexts keep, since a gene cannot fall by more than there is.

    Attributes
    ----------
    changes
        Buffer, float32 [1 + n, G], log1p: the mean changes of n pairs of perturbation and context. Row 0 is zero.
    rows
        Buffer, float32 [ids, K], whole numbers: the row of ``changes`` of a perturbation in a context, or 0.
    levels
        Buffer, float32 [K, G], log1p: the means of the contexts' control cells.
    nearness
        Buffer, float32 [K, K]: logarithms of the weights that a context (row) gives to all. Row 0, for a context that
        was not in training, is zero, so that all count the same.
    """

    changes: Tensor
    rows: Tensor
    levels: Tensor
    nearness: Tensor

    def __init__(self, ids: int, cell_types: int, batches: int, genes: int) -> None:
        super().__init__()
        self.context: Literal["cell_type", "batch"] = "cell_type" if cell_types > 2 else "batch"
        contexts = cell_types if cell_types > 2 else batches
        self.register_buffer("changes", torch.zeros(1, genes))
        self.register_buffer("rows", torch.zeros(ids, contexts))
        self.register_buffer("levels", torch.zeros(contexts, genes))
        self.register_buffer("nearness", torch.zeros(contexts, contexts))

    def forward(self, control: Tensor, covariates: Covariates, unit: Tensor, shares: Tensor | None) -> Tensor:
        """Return moved control cells [B, S, G], in units of ``unit``.

        The covariates hold ids [B], or [B, S] if the cells of a set differ. ``shares`` [B, K] are weights of the
        contexts for each set, or None for those of sampling.
        """
        if len(self.changes) == 1:
            return control
        ids, contexts = covariates.perturbation, getattr(covariates, self.context)
        if ids.dim() == 1:
            change, level = (each[:, None] for each in self.told(ids, contexts, shares))
        else:
            pairs, place = torch.unique(
                torch.stack([ids, contexts], -1).flatten(0, 1), dim=0, return_inverse=True
            )
            change, level = (each[place].view_as(control) for each in self.told(*pairs.unbind(-1)))
        return torch.addcmul(F.relu(change) / unit, control, _kept(change, level))

    def unseen(self, covariates: Covariates) -> Tensor:
        """Return, for ids [n], which perturbations were not in training in their context, but were in others."""
        known, known_contexts = self.rows.shape
        contexts = getattr(covariates, self.context)
        rows = self.rows[covariates.perturbation.where(covariates.perturbation < known, 0)]
        own = rows.gather(1, contexts.where(contexts < known_contexts, 0)[:, None])[:, 0]
        return (own == 0) & rows.any(-1)

    def expectation(self, covariates: Covariates, level: Tensor) -> tuple[Tensor, float]:
        """Return the changes [B, G] that other contexts tell of cells with the mean ``level`` [B, G], log1p.

        And the share that a network's own change counts, where a condition was not in training. Both have errors of
        about the same size there, which are not the same (lab/realism.md).
        """
        change, own_level = self.told(covariates.perturbation, getattr(covariates, self.context))
        return F.relu(change) + level * (_kept(change, own_level) - 1), _NETWORKS_SHARE

    def told(self, ids: Tensor, contexts: Tensor, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean change of n perturbations, and the level of the controls that it belongs to, each [n, G].

        Ids of labels that were added after training count as unknown.
        """
        known, known_contexts = self.rows.shape
        rows = self.rows[ids.where(ids < known, 0)].long()
        if shares is None:
            weight = self.nearness[contexts.where(contexts < known_contexts, 0)]
            weight = weight.masked_fill(rows == 0, -torch.inf).softmax(-1).nan_to_num(0.0)
        else:
            weight = shares * (rows > 0)
            weight = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        weight = weight[..., None]  # sums and not matrix products, which autocast would round
        return (weight * self.changes[rows]).sum(1), (weight * self.levels).sum(1)

    def _load_from_state_dict(self, state: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        """Take the number of trained conditions from the weights."""
        if (saved := state.get(f"{prefix}changes")) is not None:
            self.changes = self.changes.new_zeros(*saved.shape[:1], self.changes.shape[1])
        super()._load_from_state_dict(state, prefix, *rest)  # pyright: ignore[reportArgumentType]


def _kept(change: Tensor, level: Tensor) -> Tensor:
    """Return the share of a gene's level that is left after a change, 1 if it rises."""
    return (1 + change.clamp_max(0) / level.clamp_min(torch.finfo(level.dtype).tiny)).clamp_min(0)
