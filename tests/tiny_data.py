"""The data set and recipe that most tests use."""

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

TINY = ["--config", "tiny"]


def tiny_counts(seed: int = 0, genes: int = 80) -> ad.AnnData:
    """Negative-binomial counts: 2 cell types × 2 batches × (control + 3 perturbations), 10–24 cells each."""
    rng = np.random.default_rng(seed)
    rows, mean = [], rng.lognormal(0.0, 1.0, genes)
    for c, cell_type in enumerate(("B", "T")):
        for b, batch in enumerate(("d1", "d2")):
            for p, perturbation in enumerate(("control", "p1", "p2", "p3")):
                shift = np.ones(genes)
                shift[p * 5 : p * 5 + 5] = 1.0 + p
                shift[40 + c] *= 3.0
                size = 24 if p == 0 else 10 + 2 * b
                rows.append(
                    (
                        cell_type,
                        batch,
                        perturbation,
                        rng.negative_binomial(2, 2 / (2 + mean * shift), (size, genes)),
                    )
                )
    obs = pd.concat(
        [pd.DataFrame({"cell_type": [t] * len(x), "batch": b, "perturbation": p}) for t, b, p, x in rows],
        ignore_index=True,
    )
    obs.index = [f"cell{i}" for i in range(len(obs))]
    x = sp.csr_matrix(np.vstack([r[3] for r in rows]).astype(np.float32))
    shuffled = rng.permutation(len(obs))
    adata = ad.AnnData(
        x[shuffled],
        obs.iloc[shuffled].astype("category"),
        pd.DataFrame(index=[f"g{i}" for i in range(genes)]),
    )
    return adata
