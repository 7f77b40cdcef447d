"""Estimates of one batch of sets on the way from noise to cells, where some of the work is the same every time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perturbdiff.model.covariates import Covariates
from perturbdiff.model.denoiser import Denoiser


class _Pair(NamedTuple):
    """What the pass of guidance without covariates made of these tensors."""

    x: Tensor
    previous: Tensor | None
    level: int
    untold: Tensor


class Estimates:
    """A denoiser's estimates for sets whose control cells and covariates stay as they are.

    The control cells go through their input layer once. Both passes of guidance are one: they share the noised
    cells' input layer, and the weights are read once. The values are those of `Denoiser.forward`. Without gradients.

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
    guided
        An estimate without the covariates will be asked for after each one with them, of the very same tensors.
    """

    def __init__(
        self,
        model: Denoiser,
        control: Tensor,
        covariates: Covariates | None,
        dataset: Tensor | None = None,
        *,
        guided: bool = False,
    ) -> None:
        self.model, self.control, self.covariates, self.dataset = model, control, covariates, dataset
        self.guided = guided and covariates is not None
        with torch.no_grad():
            self._control_stream = model.embed_control(control, dataset)
        self._pair: _Pair | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, level: int, previous: Tensor | None, told: bool) -> Tensor:  # noqa: FBT001
        """Estimate the clean cells from ``x`` [B, S, G] at one level, with the covariates or without.

        ``previous`` is an earlier estimate [B, S, G]. Neither may be changed in place between two calls.
        """
        pair = self._pair
        if not told and pair is not None:
            self._pair = None
            if pair.x is x and pair.previous is previous and pair.level == level:
                return pair.untold
        stream = self.model.embed(x, previous, self.dataset)
        t = torch.full((len(x),), level, device=x.device)
        conditioning = self.model.conditioning(t, self.covariates if told else None)
        if not (told and self.guided):
            return self.model.estimate(stream, self._control_stream, conditioning, self.control)
        without = self.model.conditioning(t, None).expand_as(conditioning)
        x_stream, controls, cells = (torch.cat([s, s]) for s in (stream, self._control_stream, self.control))
        both = self.model.estimate(x_stream, controls, torch.cat([conditioning, without]), cells)
        found, untold = both.chunk(2)
        self._pair = _Pair(x, previous, level, untold)
        return found
