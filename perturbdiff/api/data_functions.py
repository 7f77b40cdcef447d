"""The stages that make data, as functions of Python: `simulate`, `preprocess`, `split`, `read_store`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anndata
import pandas as pd

from perturbdiff.api.given_inputs import (
    ADATA,
    AnyCells,
    AnyData,
    AnyPath,
    Recipe,
    Scratch,
    Settings,
    cells_file,
    data_path,
    recipe_of,
    split_file,
    working,
)
from perturbdiff.config.settings import Config
from perturbdiff.preprocessing.preprocessing_stage import Machine
from perturbdiff.preprocessing.preprocessing_stage import preprocess as preprocess_stage
from perturbdiff.simulation.simulation_stage import simulate as simulate_stage
from perturbdiff.splits.splits import make_split, read_split
from perturbdiff.store.store import Store


def simulate(
    out: AnyPath | None = None,
    *,
    cells: int | None = None,
    config: Recipe = None,
    settings: Settings = None,
    seed: int | None = None,
    force: bool = False,
) -> anndata.AnnData:
    """Simulate a perturbation screen whose true effects are known.

    Parameters
    ----------
    out
        Folder to write, as ``perturbdiff simulate`` does: ``counts.h5ad``, ``effects.parquet`` with the true effects
        and ``conditions.csv``. Without it, nothing stays on disk.
    cells
        Number of cells.
    config, settings
        The recipe and changes of it, for example ``{"simulate.genes": 300}``.
    seed
        Random seed. Default: the recipe's.
    force
        Simulate even if an equal output is in ``out``.

    Returns
    -------
    AnnData
        ``X``: raw counts, int32 CSR [cells × genes]. ``obs``: ``perturbation`` (control label ``control``),
        ``cell_type``, ``batch`` and what is known of each cell.

    Raises
    ------
    UserError
        If the recipe asks for the impossible, for example fewer cells than conditions.

    Examples
    --------
    >>> adata = perturbdiff.simulate(cells=1500, settings={"simulate.genes": 120}, seed=1)
    >>> adata.shape
    (1500, 120)
    """
    changes = {**({"simulate.cells": cells} if cells is not None else {}), **(settings or {})}
    with working() as folder:
        recipe = recipe_of(config, changes, seed=seed)
        made = simulate_stage(
            Path(out or folder / "simulated"), recipe.simulate, seed=recipe.seed, force=force
        )
        return anndata.read_h5ad(made / "counts.h5ad")


def preprocess(
    inputs: AnyCells | Sequence[AnyCells],
    out: AnyPath | None = None,
    *,
    perturbation: str | None = None,
    control: str | None = None,
    cell_type: str | None = None,
    batch: str | None = None,
    layer: str | None = None,
    config: Recipe = None,
    settings: Settings = None,
    split: pd.DataFrame | AnyPath | None = None,
    genes: Sequence[str] | AnyPath | None = None,
    obs: Sequence[AnyPath] = (),
    jobs: int = 1,
    seed: int | None = None,
    force: bool = False,
) -> Store:
    """Turn raw counts into a store: check them, select highly variable genes, sort the cells by condition.

    Parameters
    ----------
    inputs
        One or several AnnData, or paths of h5ad, Zarr or 10x h5 files. An AnnData is written to a temporary file
        first, and is not changed.
    out
        Folder of the store. Without it, the store lies in a temporary folder, which goes when the returned object
        does. Its cells, genes and order are the same.
    perturbation, cell_type, batch
        obs columns. Default: as the recipe says. ``settings={"data.batch_key": None}`` says that there is none.
    control
        Label of the control cells in the column ``perturbation``.
    layer
        Where the values are: ``X``, ``raw`` or ``layers/NAME``.
    config, settings
        The recipe and changes of it, for example ``{"data.num_hvgs": 1000}``.
    split
        Split, needed if ``data.hvg_cells`` is ``train``.
    genes
        Names of the genes to keep, in this order, or the path of a list. No genes are then selected.
    obs
        Tables of cell labels by cell name, for inputs that lack them.
    jobs
        Worker processes. The store does not depend on it. A script that asks for several needs
        ``if __name__ == "__main__":`` around its code.
    seed
        Seed of the order of cells within each condition. Default: the recipe's.
    force
        Write even if an equal store is in ``out``.

    Returns
    -------
    Store
        ``conditions`` (a DataFrame), ``genes``, ``obs()`` and ``expression(rows)`` (log1p, float32 CSR).
        `perturbdiff.store.to_anndata` makes an AnnData of it.

    Raises
    ------
    UserError
        If an input cannot be read or does not hold what the recipe says.

    Examples
    --------
    >>> store = perturbdiff.preprocess(adata, config="tiny")
    >>> sorted(store.conditions["cell_type"].unique())
    ['cell_type_1', 'cell_type_2', 'cell_type_3']
    """
    given = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    scratch = Scratch()
    with working(scratch) as folder:
        recipe = recipe_of(
            config, settings, seed=seed,
            perturbation=perturbation, control=control, cell_type=cell_type, batch=batch, layer=layer,
        )  # fmt: skip
        names = [ADATA if len(given) == 1 else f"{ADATA}-{number}" for number in range(len(given))]
        files = [cells_file(one, folder, name=name) for one, name in zip(given, names, strict=True)]  # pyright: ignore[reportArgumentType]
        return _stored(
            files, out, recipe, scratch, jobs=jobs, force=force, obs=[Path(table) for table in obs],
            split=None if split is None else split_file(split, folder), genes=_gene_file(genes, folder),
        )  # fmt: skip


def _stored(
    files: Sequence[Path],
    out: AnyPath | None,
    recipe: Config,
    scratch: Scratch,
    *,
    jobs: int = 1,
    force: bool = False,
    obs: Sequence[Path] = (),
    split: Path | None = None,
    genes: Path | None = None,
) -> Store:
    """Write a store and open it. One in the temporary folder keeps the folder."""
    place = scratch.path / "store" if out is None else Path(out)
    preprocess_stage(
        files, place, recipe.data, split=split, genes=genes, obs=obs, seed=recipe.seed, force=force,
        machine=Machine(jobs=jobs),
    )  # fmt: skip
    for file in files:
        if file.parent == scratch.path:
            file.unlink()
    store = Store(place)
    if out is None:
        scratch.keep_for(store)
    return store


def _gene_file(genes: Sequence[str] | AnyPath | None, folder: Path) -> Path | None:
    """Return the path of a list of genes: the one given, or names written to ``folder``."""
    if genes is None or isinstance(genes, str | Path):
        return None if genes is None else Path(genes)
    path = folder / "genes.txt"
    path.write_text("".join(f"{gene}\n" for gene in genes), encoding="utf-8")
    return path


def split(
    source: AnyData,
    out: AnyPath | None = None,
    *,
    perturbation: str | None = None,
    control: str | None = None,
    cell_type: str | None = None,
    batch: str | None = None,
    config: Recipe = None,
    settings: Settings = None,
    toml: AnyPath | None = None,
    obs: AnyPath | None = None,
    seed: int | None = None,
    force: bool = False,
) -> pd.DataFrame:
    """Choose which conditions are held out.

    Parameters
    ----------
    source
        A store, or cells in memory or in a file, of which only the labels matter.
    out
        Parquet file to write, with the table ``OUT.counts.csv`` beside it. Without it, nothing stays on disk.
    perturbation, cell_type, batch, control
        obs columns and the control's label, for cells that are not in a store. Default: as the recipe says.
    config, settings
        The recipe and changes of it, for example ``{"split.held_out": ["rep_3"]}``.
    toml
        STATE-style TOML file that defines the split instead.
    obs
        Table of cell labels, for a file that lacks them.
    seed
        Seed of the random choices. Default: the recipe's.
    force
        Write even if an equal split is at ``out``.

    Returns
    -------
    DataFrame
        One row per condition: ``cell_type``, ``batch``, ``perturbation``, ``part`` (``train``, ``valid``, ``test`` or
        ``unused``) and ``n_cells``. `train` and `sample` take it as it is, or changed by hand.

    Raises
    ------
    UserError
        If a name has no cells, a held-out context has no controls, or nothing is left to train on.

    Examples
    --------
    >>> parts = perturbdiff.split(store, settings={"split.held_out": ["batch_2"]})
    >>> sorted(parts["part"].unique())
    ['test', 'train', 'valid']
    """
    with working() as folder:
        recipe = recipe_of(
            config,
            settings,
            seed=seed,
            perturbation=perturbation,
            control=control,
            cell_type=cell_type,
            batch=batch,
        )
        made = make_split(
            data_path(source, folder),
            Path(out or folder / "split.parquet"), recipe,
            toml=None if toml is None else Path(toml), obs=None if obs is None else Path(obs),
            seed=recipe.seed, force=force,
        )  # fmt: skip
        return read_split(made)


def read_store(path: AnyPath) -> Store:
    """Open a store that `preprocess` wrote. Nothing but its tables is read.

    Parameters
    ----------
    path
        Folder of the store.

    Returns
    -------
    Store
        ``conditions`` and ``genes`` are in memory. ``obs()``, ``expression(rows)`` (log1p, float32 CSR [n × genes])
        and ``counts(rows)`` read from disk. `perturbdiff.store.to_anndata` makes an AnnData of it, in memory or lazy.

    Raises
    ------
    UserError
        If the path is not a finished store of this version.

    Examples
    --------
    >>> again = perturbdiff.read_store(store.path)
    >>> again.n_genes == len(again.genes)
    True
    """
    with working():
        return Store(Path(path))
