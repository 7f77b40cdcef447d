"""What a bundle says of itself, without its weights being read: files, recipe, labels, who made it.

It loads quickly on purpose: without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbdiff import __version__
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.io.recognise import confusion
from perturbdiff.runtime import files, outputs, untrusted
from perturbdiff.runtime.errors import UserError, listing

FORMAT = 1
"""Version of the bundle's layout; a reader takes this one and earlier ones."""
FILES = ("model.safetensors", "config.json", "genes.json", "vocabulary.json")
"""What every bundle has."""
CARD = "README.md"
"""The model card. It is for people, who may change it: the manifest says nothing of it."""
STEPS = "steps"
"""Folder in a bundle, and in the checkpoints, that holds a bundle for each kept step."""
TABLES = "embeddings"
"""Folder in a bundle with its semantic tables."""

_LABELS = ("perturbation", "cell_type", "batch")
_SHOWN = 20  # labels of a kind


@dataclass(frozen=True)
class Record:
    """The content of a bundle's ``config.json``.

    Attributes
    ----------
    config
        The recipe that the model was trained with.
    target_sum
        Depth that the training counts were scaled to. None if it is unknown.
    training
        Facts about the training: steps, best step, what was transferred.
    unchanged
        The files that agree with the manifest, by path in the bundle; None if no manifest lists them.
    """

    config: Config
    target_sum: float | None
    training: dict[str, Any]
    unchanged: set[str] | None


def read_record(folder: Path) -> Record:
    """Return a bundle's record after its files were compared with the manifest.

    Raises
    ------
    UserError
        If it is not a bundle, a damaged one, or one of a version of ours that knows more.
    """
    if other := confusion(files.existing(folder, "bundle"), "a model bundle"):
        raise UserError(f"{folder}: {other}; make a bundle with perturbdiff train")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder}: not a model bundle, {', '.join(missing)} missing; make one with train")
    unchanged = _verified(folder)
    record = untrusted.read(folder / "config.json", "JSON")
    try:
        if record["format"] > FORMAT:
            raise UserError(
                f"{folder}: bundle format {record['format']} is newer than this version reads{_newer(folder)}"
            )
        depth, facts = record["target_sum"], record["training"]
        if not (depth is None or (isinstance(depth, int | float) and 0 < depth < math.inf)):
            raise UserError(f"{folder}/config.json: target_sum is {depth!r}, not a depth above zero")
        if not isinstance(facts, dict):
            raise TypeError("training")
        config = record["config"]
    except (KeyError, TypeError) as error:
        raise damaged(folder, error) from None
    try:
        recipe = recipes.validated(config, f"{folder}/config.json")
    except UserError as error:
        if newer := _newer(folder):
            raise UserError(f"{folder}: this version does not know its recipe{newer}") from error
        raise
    return Record(recipe, depth, facts, unchanged)


def recipe_of(folder: Path) -> Config:
    """Return the recipe that a bundle was trained with.

    Raises
    ------
    UserError
        If it is not a bundle, or a damaged one.
    """
    return read_record(folder).config


def damaged(folder: Path, error: Exception) -> UserError:
    """Return the error for a bundle whose files cannot be read."""
    return UserError(
        f"{folder}: the bundle is damaged and cannot be read ({type(error).__name__}); "
        "copy it again or train anew"
    )


def _verified(folder: Path) -> set[str] | None:
    """Compare a bundle with its manifest. The manifest of a bundle lists the files of its kept steps too."""
    if (outer := _outer(folder)) is not None:
        return outputs.verify(outer, below=f"{STEPS}/{folder.resolve().name}")
    return outputs.verify(folder, leave=(STEPS,))


def _outer(folder: Path) -> Path | None:
    """Return the bundle among whose kept steps a folder is, or None."""
    place = folder.resolve()
    outer = place.parent.parent
    has_manifest, outer_has = (outputs.beside(one, "manifest").is_file() for one in (folder, outer))
    return outer if place.parent.name == STEPS and outer_has and not has_manifest else None


def _newer(folder: Path) -> str:
    """Return what to do if a later version than this one made the bundle, else an empty string."""
    made_by = _maker(folder)
    if not made_by or _numbers(made_by) <= _numbers(__version__):
        return ""
    return f"; perturbdiff {made_by} made it and this is {__version__}: install {made_by} or newer"


def _maker(folder: Path) -> str:
    versions = (outputs.read_manifest(_outer(folder) or folder) or {}).get("versions")
    return str(versions.get("perturbdiff") or "") if isinstance(versions, dict) else ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def describe(folder: Path) -> dict[str, Any]:
    """Return the facts of a bundle for people and scripts.

    Returns
    -------
    dict
        ``path, recipe, variant, description, datasets, genes, control, perturbation, cell_type, batch, target_sum,
        training, stage, seed, inputs, versions, bytes``. The labels are lists, ``genes`` is a number, and ``bytes``
        are those of the weights.

    Raises
    ------
    UserError
        If it is not a bundle, or a damaged one.
    """
    record = read_record(folder)
    labels = untrusted.read(folder / "vocabulary.json", "JSON")
    genes = untrusted.read(folder / "genes.json", "JSON")
    manifest = outputs.read_manifest(_outer(folder) or folder) or {}
    try:
        named = {kind: [str(label) for label in labels[kind]] for kind in ("datasets", *_LABELS)}
        control = str(labels["control"])
    except (KeyError, TypeError) as error:
        raise damaged(folder, error) from None
    return {
        "path": str(folder),
        "recipe": record.config.name,
        "variant": record.config.variant,
        "description": record.config.description,
        "genes": len(genes),
        "control": control,
        **named,
        "target_sum": record.target_sum,
        "training": record.training,
        "stage": manifest.get("stage"),
        "seed": manifest.get("seed"),
        "inputs": manifest.get("inputs", {}),
        "versions": manifest.get("versions", {}),
        "bytes": (folder / "model.safetensors").stat().st_size,
    }


def render(facts: dict[str, Any]) -> str:
    """Return `describe`'s facts as aligned lines of text."""
    depth = facts["target_sum"]
    trained = [f"{key.replace('_', ' ')} {value}" for key, value in sorted(facts["training"].items())
               if not isinstance(value, list)]  # fmt: skip
    lines = {
        "bundle": f"{facts['path']} ({facts['bytes'] / 1e6:.1f} MB of weights)",
        "recipe": f"{facts['recipe']} (variant {facts['variant']}): {facts['description']}".removesuffix(
            ": "
        ),
        "genes": f"{facts['genes']:,}, log1p of counts scaled to {'an unknown depth' if depth is None else depth}",
        "data sets": listing(facts["datasets"], _SHOWN),
        "control": facts["control"],
        **{
            {"perturbation": "perturbations", "cell_type": "cell types", "batch": "batches"}[kind]: (
                f"{len(facts[kind]):,}: {listing(facts[kind], _SHOWN)}"
            )
            for kind in _LABELS
        },
        "training": ", ".join(trained),
        "made by": f"{facts['stage'] or 'unknown'}, seed {facts['seed']}",
    }
    for role, entry in facts["inputs"].items():
        lines[role] = f"{entry['name']}  sha256 {entry['sha256']}"
    lines["made with"] = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items() if text)
