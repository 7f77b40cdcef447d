"""Moves control cells by the change that is expected of a perturbation, before a network estimates what is left.

Dimension letters: B sets, S cells in a set, G genes, K contexts (with the reserved id 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perturbdiff.model.covariates import Covariates


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

    def add(self, changes: Tensor) -> None:
        """Append the changes [n, G] of perturbations that training did not see."""
        self.changes = torch.cat([self.changes, changes.to(self.changes)])
        self.left_out = torch.cat([self.left_out, changes.to(self.left_out)])
        self.measured = torch.cat([self.measured, self.measured.new_zeros(len(changes))])


class TransferredChanges(nn.Module):
    """Changes that a perturbation's other contexts tell (``anchor: transferred``), similar ones more.

    A context is a cell type, or a batch if there is one cell type. The change expected in a context is the mean over
    the *other* contexts in which the perturbation was trained on, weighted by exp(`nearness`). That of a training
    condition does not know the condition itself, neither in training nor in sampling, so that the network sees in
    training what it will see for contexts that it was not trained on. Genes that rise are raised by the mean change.
    Genes that fall are multiplied by the share that the same contexts keep of their controls' level, since a gene
    cannot fall by more than there is. Nothing moves where no other context tells.

    Attributes
    ----------
    changes
        Buffer, float32 [1 + n, G], log1p: the mean changes of n pairs of perturbation and context. Row 0 is zero.
    rows
        Buffer, [ids, K]: the row of ``changes`` of a perturbation in a context, or 0. It is float32, as all of a bundle.
    levels
        Buffer, float32 [K, G], log1p: the means of the contexts' control cells.
    nearness
        Buffer, float32 [K, K]: logarithms of the weights in a context (rows) of each other one. Row 0, for a context
        that was not in training, is zero: all count the same.
    """

    changes: Tensor
    rows: Tensor
    levels: Tensor
    nearness: Tensor

    def __init__(self, ids: int, cell_types: int, batches: int, genes: int) -> None:
        super().__init__()
        self.context = "cell_type" if cell_types > 2 else "batch"
        contexts = cell_types if cell_types > 2 else batches
        self.register_buffer("changes", torch.zeros(1, genes))
        self.register_buffer("rows", torch.zeros(ids, contexts))
        self.register_buffer("levels", torch.zeros(contexts, genes))
        self.register_buffer("nearness", torch.zeros(contexts, contexts))

    def forward(self, control: Tensor, covariates: Covariates, unit: Tensor, *, in_training: bool) -> Tensor:
        """Return moved control cells [B, S, G], in units of ``unit``. The covariates hold ids [B] or [B, S].

        ``in_training`` changes nothing.
        """
        del in_training
        ids, contexts = covariates.perturbation, getattr(covariates, self.context)
        if ids.dim() == 1:
            change, level = self.told(ids, contexts)
        else:
            pairs, place = torch.unique(
                torch.stack([ids, contexts], -1).flatten(0, 1), dim=0, return_inverse=True
            )
            change, level = (told[place].view_as(control) for told in self.told(*pairs.unbind(-1)))
        kept = (1 + change.clamp_max(0) / level.clamp_min(torch.finfo(level.dtype).tiny)).clamp_min(0)
        added = F.relu(change) / unit
        if ids.dim() == 1:
            kept, added = kept[:, None], added[:, None]
        return torch.addcmul(added, control, kept)

    def told(self, ids: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Return what other contexts tell of n perturbations: mean changes, and levels of their controls, each [n, G].

        Ids of labels that were added after training count as unknown.
        """
        known, contexts_known = self.rows.shape
        ids, contexts = ids.where(ids < known, 0), contexts.where(contexts < contexts_known, 0)
        rows = self.rows[ids].long()
        every = torch.arange(contexts_known, device=rows.device)
        tells = (rows > 0) & (every != contexts[:, None])
        weight = self.nearness[contexts].masked_fill(~tells, -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("nk,nkg->ng", weight, self.changes[rows]), weight @ self.levels

    def _load_from_state_dict(self, state: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        """Take the number of trained conditions from the weights."""
        if (saved := state.get(f"{prefix}changes")) is not None:
            self.changes = self.changes.new_zeros(len(saved), self.changes.shape[1])
        super()._load_from_state_dict(state, prefix, *rest)  # pyright: ignore[reportArgumentType]
