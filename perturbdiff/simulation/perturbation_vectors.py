"""Vectors that describe the perturbations of a simulated screen, as well or as badly as you say."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.config.settings import SimulateConfig
from perturbdiff.simulation.true_effects import Truth, stream

WIDTH = 32
_DECIMALS = 4  # beyond these, numbers depend on the linear algebra library


def perturbation_vectors(config: SimulateConfig, truth: Truth, quality: float, seed: int) -> pd.DataFrame:
    """Return a semantic table of the perturbations: ``name``, then 32 numbers ``v0`` to ``v31``.

    The true log fold changes, averaged over cell types, are turned by a random matrix, and noise is added.

    Parameters
    ----------
    config, truth, seed
        The experiment.
    quality
        Correlation of the numbers with those without noise, 0 (noise alone) to 1.
    """
    labels, types = truth.perturbations["perturbation"].iloc[1:], range(len(truth.cell_types))
    effects = np.array(
        [
            np.mean([truth.log_fold_change(p, c, escape=config.escape) for c in types], axis=0)
            for p in range(1, len(labels) + 1)
        ]
    )
    rng = stream(seed, "vectors")
    known = effects @ rng.normal(size=(effects.shape[1], WIDTH))
    known = (known - known.mean(axis=0)) / max(float(known.std()), 1e-12)
    vectors = quality * known + np.sqrt(1 - quality**2) * rng.normal(size=known.shape)
    columns = {f"v{i}": vectors[:, i].round(_DECIMALS).astype(np.float32) for i in range(WIDTH)}
    return pd.DataFrame({"name": labels.to_numpy(), **columns})
