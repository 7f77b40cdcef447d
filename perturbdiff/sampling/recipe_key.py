"""Which recipe a model is of, so that runs that differ by their seeds alone are known as runs of one method."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from perturbdiff.config.settings import SampleConfig
from perturbdiff.runtime import provenance

_DIGITS = 16


def recipe_facts(bundle: Path, name: str, settings: SampleConfig, *, random_init: bool) -> dict[str, Any]:
    """Return the name of a model's recipe, a key of all that determines its predictions but seeds, and its seed.

    Parameters
    ----------
    bundle
        The trained model. Its manifest tells how it was trained, on what; without one the key is of its recipe.
    name
        The recipe's name.
    settings
        The reverse process.
    random_init
        Whether the weights are fresh ones.

    Returns
    -------
    dict
        ``recipe``, ``recipe_key`` (hexadecimal) and, if known, ``train_seed``. A model finetuned from another
        has the key of models finetuned from the very same one.
    """
    manifest = provenance.read_manifest(bundle) or {}
    inputs = {
        role: entry.get("sha256")
        for role, entry in (manifest.get("inputs") or {}).items()
        if isinstance(entry, dict)
    }
    recipe = manifest.get("config") or (bundle / "config.json").read_text()
    sampling = settings.model_dump(mode="json")
    made = {"stage": manifest.get("stage"), "config": recipe, "inputs": inputs, "sampling": sampling}
    digest = hashlib.sha256(provenance.as_json({**made, "random_init": random_init}).encode()).hexdigest()
    facts: dict[str, Any] = {"recipe": name, "recipe_key": digest[:_DIGITS]}
    return facts if manifest.get("seed") is None else {**facts, "train_seed": int(manifest["seed"])}
