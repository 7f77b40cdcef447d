"""A store of the tiny data set with a split, made by the real stages."""

from dataclasses import dataclass
from pathlib import Path

import anndata as ad
from tiny_data import tiny_counts

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.splits.splits import make_split
from perturbdiff.store.store import Store


@dataclass(frozen=True)
class SmallStore:
    counts: Path
    store: Path
    split: Path
    recipe: Config

    @property
    def opened(self) -> Store:
        return Store(self.store)


def small_store(folder: Path, overrides=(), adata: ad.AnnData | None = None) -> SmallStore:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipes.load("tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4", *overrides])
    made = SmallStore(folder / "counts.h5ad", folder / "store", folder / "split.parquet", recipe)
    (tiny_counts() if adata is None else adata).write_h5ad(made.counts)
    preprocess([made.counts], made.store, recipe.data)
    make_split(made.store, made.split, recipe)
    return made
