"""A store whose held-out cells hold noise."""

import shutil
from pathlib import Path

import numpy as np
import zarr
from small_store import SmallStore

from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store.store import Store


def noisy_store(small: SmallStore, path: Path) -> Path:
    """Copy a store and overwrite the counts of all cells that are not for training."""
    shutil.copytree(small.store, path)
    store, table = Store(path), read_split(small.split)
    held_out = (
        np.asarray(parts(store.conditions, table) != "train") & ~store.conditions["is_control"].to_numpy()
    )
    group = zarr.open_group(path / "part-0000.zarr" / "X", mode="r+")
    indptr, data = group["indptr"][:], group["data"][:]
    rng = np.random.default_rng(0)
    chosen = store.conditions[held_out]
    for start, stop in zip(chosen["start"], chosen["stop"], strict=True):
        a, b = indptr[start], indptr[stop]
        data[a:b] = rng.integers(1, 1000, b - a)
    assert not np.array_equal(data, group["data"][:])
    group["data"][:] = data
    return path
