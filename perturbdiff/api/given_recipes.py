"""Recipes as a Python user gives them: a name, a file, or a `Config`, with changes as a dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.runtime.errors import UserError

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
