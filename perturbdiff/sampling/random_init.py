"""A bundle's network before any training: the paper's random-initialisation reference."""

from __future__ import annotations

import torch

from perturbdiff.checkpoint.bundle import Bundle, build_model, frozen_widths


def reinitialise(bundle: Bundle, seed: int) -> None:
    """Give the bundle's network fresh weights; units, gene maxima and frozen tables stay.

    Parameters
    ----------
    bundle
        Is changed; its network stays on its device.
    seed
        Of the weights. The global generator is left as it was.
    """
    old = bundle.model
    weights = old.state_dict()
    num_doses = len(weights.get("covariate_encoder.dose.vectors", ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(
            bundle.config,
            bundle.genes,
            bundle.vocabulary,
            semantic=frozen_widths(weights),
            num_doses=num_doses,
        )
    model.load_state_dict(dict(old.named_buffers()), strict=False)
    model.zero_level.zero_()  # it tells of the trained weights
    bundle.model = model.to(old.unit.device).eval()
