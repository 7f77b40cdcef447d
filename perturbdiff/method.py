"""What made predictions: a model or a baseline, and the settings and seeds that tell its runs apart."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

EXTERNAL_KINDS = {"tool": "external method", "script": "own script"}
"""Kinds of baselines that are not ours, in words."""
SOURCES = ("predicted", "control")
"""What a cell of a predictions file is: column ``source`` of its obs."""


@dataclass(frozen=True)
class Method:
    """What a predictions file says of how its cells were made; evaluation's summary and the report repeat it.

    Attributes
    ----------
    baseline
        Name of the baseline; None for models.
    baseline_kind
        'built-in', 'tool' or 'script'.
    title, version, licence
        Of an external method.
    settings
        Its settings, in words.
    note
        What a reader of its scores should know.
    script
        First digits of the SHA-256 of a user's script.
    recipe
        Name of a model's recipe.
    recipe_key
        Key of everything that determines a model's predictions but seeds.
    train_seed, seed
        Seeds of training and of prediction.
    controls
        How the control cells that cells were made from were chosen: 'shuffled' or 'balanced'.
    """

    baseline: str | None = None
    baseline_kind: str | None = None
    title: str | None = None
    version: str | None = None
    licence: str | None = None
    settings: str | None = None
    note: str | None = None
    script: str | None = None
    recipe: str | None = None
    recipe_key: str | None = None
    train_seed: int | None = None
    seed: int | None = None
    controls: str | None = None

    @classmethod
    def from_json(cls, found: Any) -> Method:
        """Return the method that a table of names describes; names that are not known are left out."""
        told = found if isinstance(found, dict) else {}
        return cls(
            **{f.name: told[f.name] for f in fields(cls) if isinstance(told.get(f.name), str | int | float)}
        )

    def to_json(self) -> dict[str, str | int]:
        """Return what is known, by name."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def external(self) -> bool:
        """Whether this is an external method, trained in an environment or by a script of its own."""
        return self.baseline_kind in EXTERNAL_KINDS
