"""A pair of AnnData files to evaluate: real cells, and predicted ones beside the same controls."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

GENES = [f"g{i}" for i in range(30)]
QUICK = (
    "--set",
    "evaluate.bootstrap=20",
    "--set",
    "evaluate.embed_conditions=0",
    "--metrics",
    "expression,de",
)


def pair_side(
    seed=0, *, perturbations=("p1", "p2", "p3"), counts=False, declared=None, cells=12
) -> ad.AnnData:
    """2 cell types × 2 batches; controls are the same for every seed, perturbed cells are drawn anew."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(99)
    blocks, obs = [], []
    for t in ("B", "T"):
        for b in ("d1", "d2"):
            blocks.append(fixed.poisson(1.0, (15, len(GENES))))
            obs += [(t, b, "control", "control")] * 15
            for k, p in enumerate(perturbations):
                mean = np.ones(len(GENES))
                mean[4 * k : 4 * k + 4] += 4.0 * (1 + k)
                blocks.append(rng.poisson(mean, (cells, len(GENES))))
                obs += [(t, b, p, "predicted")] * cells
    frame = pd.DataFrame(obs, columns=["cell_type", "batch", "perturbation", "source"]).astype("category")
    frame.index = [f"c{i}" for i in range(len(frame))]
    values = np.vstack(blocks).astype(np.float32)
    adata = ad.AnnData(
        sp.csr_matrix(values if counts else np.log1p(values)), frame, pd.DataFrame(index=GENES)
    )
    facts = {"scale": "counts" if counts else "log1p", "control": "control"} | (declared or {})
    adata.uns["perturbdiff"] = {k: v for k, v in facts.items() if v is not None}
    return adata
