"""A store of the tiny data set in four parts with many small shards."""

from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.preprocessing import preprocessing_stage as module
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.store import store_writer


def parts_store(folder: Path, config: DataConfig | None = None, adata: ad.AnnData | None = None) -> Path:
    """Write ``counts.h5ad`` and ``store`` into a folder; return the store."""
    counts = tiny_counts() if adata is None else adata
    if adata is None:
        counts.obs["plate"] = np.arange(counts.n_obs) % 5
        counts.obs["donor"] = np.array(["x", "y"], object)[np.arange(counts.n_obs) % 2]
    counts.write_h5ad(folder / "counts.h5ad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BUCKET_VALUES", 400)
        patch.setattr(module, "CELLS_PER_PART", (60, 60))
        patch.setattr(store_writer, "ROWS_PER_CHUNK", 4)
        patch.setattr(store_writer, "ROWS_PER_SHARD", 16)
        config = config or DataConfig(num_hvgs=40, extra_obs=["plate", "donor"])
        return preprocess([folder / "counts.h5ad"], folder / "store", config)
