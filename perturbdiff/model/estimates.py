"""The denoiser's estimates while sets of cells are sampled. Work that is equal in all steps is done once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perturbdiff.model.covariates import Covariates
from perturbdiff.model.denoiser import Denoiser


class _Pair(NamedTuple):
    """The estimate without covariates that belongs to these inputs."""

    x: Tensor
    previous: Tensor | None
    level: int
    unconditional: Tensor


class Estimates:
    """A denoiser's estimates for sets whose control cells and covariates do not change.

    The control cells pass through their input layer once. The two passes of guidance are computed together: they share
    the input layer of the noised cells and read the weights once. The values equal those of `Denoiser.forward`. No
    gradients are computed.

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
        Whether each call with the covariates is followed by one without them, for the same tensor objects.
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
        self.model, self.covariates, self.dataset = model, covariates, dataset
        self.guided = guided and covariates is not None
        with torch.no_grad():
            self.control = model.start(control, covariates)
            self._control_stream = model.embed_control(self.control, dataset)
        self._pair: _Pair | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, level: int, previous: Tensor | None, conditional: bool) -> Tensor:  # noqa: FBT001
        """Estimate the clean cells from ``x`` [B, S, G] at one level, with or without the covariates.

        ``previous`` is an earlier estimate [B, S, G]. Do not change either in place between two calls.
        """
        pair = self._pair
        if not conditional and pair is not None:
            self._pair = None
            if pair.x is x and pair.previous is previous and pair.level == level:
                return pair.unconditional
        stream = self.model.embed(x, previous, self.dataset)
        t = torch.full((len(x),), level, device=x.device)
        conditioning = self.model.conditioning(t, self.covariates if conditional else None)
        if not (conditional and self.guided):
            return self.model.estimate(stream, self._control_stream, conditioning, self.control, x)
        without = self.model.conditioning(t, None).expand_as(conditioning)
        twice = (torch.cat([s, s]) for s in (stream, self._control_stream, self.control, x))
        x_stream, controls, cells, noised = twice
        both = self.model.estimate(x_stream, controls, torch.cat([conditioning, without]), cells, noised)
        estimate, unconditional = both.chunk(2)
        self._pair = _Pair(x, previous, level, unconditional)
        return estimate
