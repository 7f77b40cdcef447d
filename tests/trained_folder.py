"""The store, the split and the bundle that many tests share."""

from pathlib import Path

from tiny_data import tiny_counts


def make_trained(folder: Path) -> Path:
    """Write counts.h5ad, store, split.parquet and bundle of the tiny recipe into a folder."""
    from perturbdiff.config import recipes
    from perturbdiff.preprocessing.preprocessing_stage import preprocess
    from perturbdiff.splits.splits import make_split
    from perturbdiff.training.training_stages import train

    folder.mkdir(parents=True, exist_ok=True)
    tiny_counts().write_h5ad(folder / "counts.h5ad")
    recipe = recipes.load("tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4"])
    preprocess([folder / "counts.h5ad"], folder / "store", recipe.data)
    make_split(folder / "store", folder / "split.parquet", recipe)
    train(folder / "store", folder / "split.parquet", folder / "bundle", recipe, device="cpu")
    return folder
