"""What a Python user gives, as the stages read it: cells and splits as files, and recipes.

AnnData are written out and never changed. A recipe is a name, a file, or a `Config`, with changes as a dictionary.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import anndata
import numpy as np
import pandas as pd
import yaml
from scipy import sparse

from perturbdiff.api.messages import PREFIX, short, show_messages
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.evaluation.readers.inputs import is_store
from perturbdiff.io import h5_output
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.files import existing
from perturbdiff.splits.splits import KEYS
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

AnyPath = str | Path
AnyCells = anndata.AnnData | str | Path
"""Cells in memory, or the path of an h5ad, a Zarr folder or a 10x h5 file."""
AnyData = Store | anndata.AnnData | str | Path
"""A store or cells, in memory or by path."""
ADATA = "adata"
"""Name of an AnnData that was given in memory, in messages and as the data set's name."""
LOG1P = "log1p"
"""Layer of predictions in the user's units with the values that the model made."""


class Scratch:
    """A temporary folder. It goes away when it is closed, when nobody holds it any more, or when Python ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        """Delete the folder now."""
        self._end()

    def keep_for(self, owner: Any) -> None:
        """Let the folder stay as long as ``owner``, which reads from it."""
        weakref.finalize(owner, self.close)


@contextmanager
def working(scratch: Scratch | None = None) -> Iterator[Path]:
    """Yield a temporary folder for the block, or that of ``scratch``, which then stays. Messages are shown.

    Raises
    ------
    UserError
        Of the block, in which files in temporary folders have their names alone.
    """
    show_messages()
    folder = scratch or Scratch()
    try:
        yield folder.path
    except UserError as error:
        raise UserError(short(str(error))) from None
    finally:
        if scratch is None:
            folder.close()


def cells_file(cells: AnyData, folder: Path, *, name: str = ADATA) -> Path:
    """Return the path of a file with these cells: the path that was given, or an h5ad written to ``folder``.

    Raises
    ------
    UserError
        If an AnnData is backed by a file, or its values are of no kind that is read.
    """
    if isinstance(cells, anndata.AnnData):
        path = folder / name
        write_cells(cells, path)
        return path
    if not isinstance(cells, str | Path):
        raise UserError(f"give an AnnData or the path of a file, not {type(cells).__name__}")
    return existing(Path(cells), "input")


def write_cells(adata: anndata.AnnData, path: Path) -> None:
    """Write what the stages read of an AnnData: X, raw, layers, obs, var and our entry of uns. It is not changed.

    Predictions in other units are written as the log1p values that the model made.
    """
    if adata.isbacked:
        raise UserError(
            f"the AnnData is backed by {adata.filename}; give that path instead, or adata.to_memory()"
        )
    ours, x, layers = _declared(adata), adata.X, dict(adata.layers)
    if ours.get("kind") == "predictions" and LOG1P in layers:
        ours, x, layers = {**ours, "scale": "log1p"}, layers[LOG1P], {}
    with warnings.catch_warnings(), h5_output.writing(path) as file:
        warnings.simplefilter("ignore")
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        if x is not None:
            anndata.io.write_elem(file, "X", _matrix(x))
        anndata.io.write_elem(file, "obs", plain_frame(adata.obs))
        anndata.io.write_elem(file, "var", plain_frame(adata.var))
        anndata.io.write_elem(file, "layers", {str(k): _matrix(v) for k, v in layers.items()})
        anndata.io.write_elem(file, "uns", {"perturbdiff": ours} if ours else {})
        if adata.raw is not None:
            raw = file.create_group("raw")
            raw.attrs.update({"encoding-type": "raw", "encoding-version": "0.1.0"})
            anndata.io.write_elem(raw, "X", _matrix(adata.raw.X))
            anndata.io.write_elem(raw, "var", plain_frame(adata.raw.var))


def _declared(adata: anndata.AnnData) -> dict[str, Any]:
    """Return what ``uns["perturbdiff"]`` says, without tables."""
    ours = adata.uns.get("perturbdiff", {})
    if not isinstance(ours, Mapping):
        return {}
    return {str(key): value for key, value in ours.items() if not isinstance(value, Mapping | pd.DataFrame)}


def _matrix(values: Any) -> Any:
    """Return values in a form that is written as it is: CSR, CSC or a plain array."""
    if hasattr(values, "compute"):  # a dask array
        values = values.compute()
    if sparse.issparse(values) and values.format not in ("csr", "csc"):
        values = values.tocsr()
    return np.asarray(values) if isinstance(values, np.matrix) else values


def plain_frame(frame: Any) -> pd.DataFrame:
    """Return a copy of obs or var that can be written: labels as categories, text alone as names.

    Columns whose name cannot be that of a column in a file (it has a slash) are left out.
    """
    columns: dict[str, Any] = {}
    for name, values in frame.items():
        if "/" in str(name):
            continue
        kind = values.dtype
        if isinstance(kind, pd.CategoricalDtype):
            texts = kind.categories.dtype != object or all(isinstance(c, str) for c in kind.categories)
            values = values if texts else values.astype(object)
        if not isinstance(values.dtype, pd.CategoricalDtype) and values.dtype.kind not in "biuf":
            values = pd.Series(pd.Categorical(values.map(str, na_action="ignore")), index=values.index)
        columns[str(name)] = values.array
    names = pd.Index([str(name) for name in frame.index], dtype=object)
    return pd.DataFrame(columns, index=names)


def store_path(data: AnyData) -> Path | None:
    """Return the path of a store that was given, or None if it is cells that have to be preprocessed."""
    if isinstance(data, Store):
        return Path(data.path)
    if isinstance(data, str | Path) and is_store(path := existing(Path(data), "input")):
        return path
    return None


def data_path(data: AnyData, folder: Path) -> Path:
    """Return the path of a store or of cells; an AnnData is written to ``folder``."""
    return store_path(data) or cells_file(data, folder)


def split_file(split: pd.DataFrame | AnyPath, folder: Path) -> Path:
    """Return the path of a split: the one given, or a table of `perturbdiff.split` written to ``folder``.

    Raises
    ------
    UserError
        If the table lacks a column.
    """
    if not isinstance(split, pd.DataFrame):
        return Path(split)
    lacking = [name for name in (*KEYS, "part") if name not in split]
    if lacking:
        raise UserError(
            f"split: the table lacks the column {lacking[0]}; it needs {', '.join((*KEYS, 'part'))}"
        )
    path = folder / "split.parquet"
    table = split.copy(deep=False)
    table.attrs = {}  # parquet would keep them, among them the place of the file that the table was read from
    table.to_parquet(path, index=False)
    return path


Recipe = Config | str | Path | None
"""A recipe, the name of a preset or a YAML file. None: ``recommended``."""
Settings = Mapping[str, Any] | None
"""Changes by dotted key, for example ``{"train.max_steps": 500}``: what ``--set`` is on the command line."""

COLUMNS = {
    "perturbation": "data.perturbation_key",
    "control": "data.control",
    "cell_type": "data.cell_type_key",
    "batch": "data.batch_key",
    "layer": "data.layer",
}
"""The setting that each argument for the labels of the data stands for."""


def overrides(settings: Settings) -> list[str]:
    """Return changes in the form of the command line.

    Raises
    ------
    UserError
        If a value is of a type that a recipe cannot hold.
    """
    try:
        return [f"{key}={json.dumps(_plain(value))}" for key, value in (settings or {}).items()]
    except TypeError as error:
        raise UserError(f"settings: {error}; give numbers, texts, truth values, None or lists") from None


def recipe_of(
    config: Recipe = None, settings: Settings = None, *, seed: int | None = None, **labels: Any
) -> Config:
    """Return the complete recipe.

    Parameters
    ----------
    config
        The recipe to start from.
    settings
        Changes by dotted key.
    seed
        Replaces the recipe's seed.
    labels
        Arguments of `COLUMNS`. None leaves what the recipe says.

    Raises
    ------
    UserError
        If the recipe is unknown, a key does not exist or a value has the wrong type.
    """
    named = {COLUMNS[name]: value for name, value in labels.items() if value is not None}
    changes = overrides({**named, **(settings or {})})
    if isinstance(config, Config):
        found = recipes.changed(config, changes) if changes else config
    else:
        found = recipes.load(config, changes)
    return found if seed is None else recipes.changed(found, [f"seed={seed}"])


def said_of_data(
    perturbation: str | None,
    control: str | None,
    batch: str | Literal[False] | None,
    cell_type: str | Literal[False] | None,
    layer: str | None,
) -> dict[str, str | None]:
    """Return what was said of the data, by field of the recipe's section ``data``. None there: the data have none."""
    said = {"perturbation_key": perturbation, "control": control, "layer": layer}
    said |= {"batch_key": batch, "cell_type_key": cell_type}
    return {key: None if value is False else str(value) for key, value in said.items() if value is not None}


def recipe_file(config: Recipe, folder: Path) -> str | None:
    """Return a recipe as a name or a file. Of a `Config`, a file in ``folder`` says what differs from the defaults."""
    if not isinstance(config, Config):
        return None if config is None else str(config)
    path = folder / "config.yaml"
    said = config.model_dump(mode="json", exclude_defaults=True, exclude={"variant"})
    path.write_text(yaml.safe_dump(said, allow_unicode=True), encoding="utf-8")
    return str(path)


def _plain(value: Any) -> Any:
    """Return a value as JSON knows it: paths and NumPy's numbers as plain ones, sets in order."""
    if isinstance(value, str | bool | int | float | None):
        return value
    if hasattr(value, "item") and not getattr(value, "ndim", 0):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple) or hasattr(value, "tolist"):
        return [_plain(one) for one in value]
    raise TypeError(f"{value!r} is no value of a recipe")
