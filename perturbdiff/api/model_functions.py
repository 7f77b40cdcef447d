"""The stages that make and use models, as functions of Python: `train` and `sample`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anndata
import pandas as pd

from perturbdiff.api.data_functions import preprocess
from perturbdiff.api.given_inputs import (
    AnyData,
    AnyPath,
    Recipe,
    Scratch,
    Settings,
    overrides,
    recipe_of,
    split_file,
    store_path,
    working,
)
from perturbdiff.api.perturbation_model import Part, PerturbDiff
from perturbdiff.api.requests import Conditions, OwnLabels, condition_file, control_store
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.bundle_record import read_record
from perturbdiff.config import recipes
from perturbdiff.embeddings.embedding_tables import SemanticKind
from perturbdiff.predictions import read_predictions
from perturbdiff.sampling.sampling_stage import sample as sampling_stage
from perturbdiff.screen.stages import Stages
from perturbdiff.store.store import Store, dataset_of
from perturbdiff.training.training_stages import train as training_stage


def train(
    store: AnyData,
    split: pd.DataFrame | AnyPath,
    out: AnyPath | None = None,
    *,
    perturbation: str | None = None,
    control: str | None = None,
    cell_type: str | None = None,
    batch: str | None = None,
    layer: str | None = None,
    config: Recipe = None,
    settings: Settings = None,
    embeddings: Mapping[SemanticKind, AnyPath] | None = None,
    device: str = "auto",
    seed: int | None = None,
    force: bool = False,
) -> PerturbDiff:
    """Train a model from scratch on the training conditions of a split.

    Parameters
    ----------
    store
        A store, as `preprocess` returns it, or its path. Else cells with raw counts, as an AnnData or a file, which
        `preprocess` makes a temporary store of. `PerturbDiff` also guesses their columns.
    split
        What is held out, as `split` returns it, or its file.
    out
        Folder of the bundle. A run that was interrupted goes on from ``OUT.checkpoints``. Without it, the bundle lies
        in a temporary folder, which goes when the returned object does; `PerturbDiff.save` keeps it.
    perturbation, cell_type, batch, control, layer
        obs columns, the control's label and the place of the values, for cells that are not in a store. Default: as
        the recipe says.
    config, settings
        The recipe and changes of it, for example ``{"train.max_steps": 500}``.
    embeddings
        Files with vectors by ``perturbation``, ``cell_type`` or ``gene``.
    device
        ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
    seed
        Random seed. Default: the recipe's.
    force
        Train even if an equal bundle is in ``out``.

    Returns
    -------
    PerturbDiff
        The model, for `PerturbDiff.predict`, `PerturbDiff.evaluate` and `sample`.

    Raises
    ------
    UserError
        If store or cells, split and recipe do not fit together.
    StoppedEarly
        If the training was asked to stop. The same call goes on if ``out`` was given.

    Examples
    --------
    >>> trained = perturbdiff.train(store, parts, config="tiny")
    """
    scratch = Scratch()
    with working(scratch) as folder:
        recipe = recipe_of(
            config, settings, seed=seed,
            perturbation=perturbation, control=control, cell_type=cell_type, batch=batch, layer=layer,
        )  # fmt: skip
        parts = split_file(split, folder)
        cells = store if isinstance(store, anndata.AnnData) else None
        place = store_path(store)
        if place is None:
            needed = parts if recipe.data.hvg_cells == "train" else None
            store = preprocess(store, config=recipe, split=needed)  # pyright: ignore[reportArgumentType]
            place = store.path
        tables: dict[SemanticKind, Path] = {kind: Path(path) for kind, path in (embeddings or {}).items()}
        bundle = training_stage(
            place,
            parts,
            Path(out or folder / "bundle"),
            recipe,
            embeddings=tables,
            device=device,
            force=force,
        )
        stages = Stages(folder, recipe, dataset_of(place), place, parts, bundle, device=device, jobs=1)
        return PerturbDiff.of(bundle, stages, device=device, cells=cells, keep=(scratch, store))


def sample(
    model: PerturbDiff | AnyPath,
    store: AnyData,
    out: AnyPath | None = None,
    *,
    split: pd.DataFrame | AnyPath | None = None,
    part: Part = "test",
    conditions: Conditions | None = None,
    config: Recipe = None,
    settings: Settings = None,
    embeddings: Mapping[SemanticKind, AnyPath] | None = None,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
) -> anndata.AnnData:
    """Generate cells with a trained model, in the form in which ``perturbdiff sample`` writes them.

    `PerturbDiff.predict` does the same for cells in memory, and gives them your own columns and units.

    Parameters
    ----------
    model
        The model or its bundle.
    store
        The control cells: a store or its path, or cells as an AnnData or a file, with the columns of the model's
        recipe (`PerturbDiff.load` can name others). Genes are matched by name.
    out
        File to write (.h5ad or .zarr). Without it, nothing stays on disk.
    split, part
        Predict the perturbed conditions of this part, as many cells as there really are.
    conditions
        Predict these instead: perturbations by name, or a table (or its CSV) with ``perturbation, cell_type, batch``
        and optionally ``n_cells`` and ``guidance``.
    config, settings
        A recipe instead of the bundle's own, and changes, for example ``{"sample.guidance": 1.0}``.
    embeddings
        Files with vectors of further labels.
    device
        ``auto``, ``cpu``, ``cuda`` or one GPU by number (``cuda:0``).
    seed
        Random seed of the noise and of the choice of control cells.
    force
        Sample even if an equal output is at ``out``.

    Returns
    -------
    AnnData
        ``X``: log1p values, float32 CSR. Predicted cells come first, then the real control cells (``obs["source"]``).
        ``obs``: ``perturbation, cell_type, batch, source, cell``.

    Raises
    ------
    UserError
        If labels, genes or units do not fit, or it is not said what to predict.

    Examples
    --------
    >>> predicted = perturbdiff.sample(trained, store, split=parts)
    >>> sorted(predicted.obs["source"].unique())
    ['control', 'predicted']
    """
    with working() as folder:
        bundle = model.path if isinstance(model, PerturbDiff) else Path(model)
        data = model.config.data if isinstance(model, PerturbDiff) else read_record(bundle).config.data
        place = store_path(store) or control_store(store, Bundle.load(bundle), data, folder).path
        request: dict[str, Any] = {"part": part, "device": device, "seed": seed, "force": force}
        request["embeddings"] = {kind: Path(path) for kind, path in (embeddings or {}).items()}
        request["config"] = _sampling(bundle, config, settings)
        if split is not None:
            request["split"] = split_file(split, folder)
        if conditions is not None:
            request["conditions"] = condition_file(conditions, Store(place), OwnLabels.of(data), folder)
        made = sampling_stage(bundle, place, Path(out or folder / "predicted.h5ad"), **request)
        return read_predictions(made)


def _sampling(bundle: Path, config: Recipe, settings: Settings) -> Any:
    """Return the settings of sampling if others than the bundle's own were asked for."""
    if config is not None:
        return recipe_of(config, settings).sample
    if settings:
        return recipes.changed(read_record(bundle).config, overrides(settings)).sample
    return None
