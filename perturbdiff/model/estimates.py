"""Estimates of one batch of sets on the way from noise to cells, where some of the work is the same every time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perturbdiff.model.covariates import Covariates
from perturbdiff.model.denoiser import Denoiser


class _Embedded(NamedTuple):
    x: Tensor
    previous: Tensor | None
    stream: Tensor


class Estimates:
    """A denoiser's estimates for sets whose control cells and covariates stay as they are.

    The control cells go through their input layer once; the two passes of guidance share the noised cells'. The
    values are those of `Denoiser.forward`. Without gradients.

    Parameters
    ----------
    model
        The network.
    control
        Control cells [B, S, G], model units.
    covariates
        Ids [B] or [B, S].
    dataset
        Index of each set's input layers, int64 [B].
    """

    def __init__(
        self, model: Denoiser, control: Tensor, covariates: Covariates | None, dataset: Tensor | None = None
    ) -> None:
        self.model, self.control, self.covariates, self.dataset = model, control, covariates, dataset
        with torch.no_grad():
            self._control_stream = model.embed_control(control, dataset)
        self._embedded: _Embedded | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, level: int, previous: Tensor | None, told: bool) -> Tensor:  # noqa: FBT001
        """Estimate the clean cells from ``x`` [B, S, G] at one level, with the covariates or without.

        ``previous`` is an earlier estimate [B, S, G]. Neither may be changed in place between two calls.
        """
        known = self._embedded
        if known is None or known.x is not x or known.previous is not previous:
            known = self._embedded = _Embedded(x, previous, self.model.embed(x, previous, self.dataset))
        t = torch.full((len(x),), level, device=x.device)
        conditioning = self.model.conditioning(t, self.covariates if told else None)
        return self.model.estimate(known.stream, self._control_stream, conditioning, self.control)
