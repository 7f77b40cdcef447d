"""The folder of a pretrained encoder: one of the user's, or a model of the Hugging Face hub in its cache."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing, nearest

logger = logging.getLogger(__name__)

_WANTED = ["*.json", "*.txt", "*.model", "*.safetensors"]  # configuration, vocabulary, weights; no pickles
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Preset:
    """A short name's model: its name on the hub, and the revision that holds safetensors if ``main`` does not."""

    name: str
    revision: str | None = None


PRESETS = {
    "esm2-8m": Preset("facebook/esm2_t6_8M_UR50D"),
    "esm2-35m": Preset("facebook/esm2_t12_35M_UR50D"),
    "esm2-150m": Preset("facebook/esm2_t30_150M_UR50D"),
    "esm2-650m": Preset("facebook/esm2_t33_650M_UR50D"),
    "esm2-3b": Preset("facebook/esm2_t36_3B_UR50D", "refs/pr/12"),
    "chemberta": Preset("seyonec/ChemBERTa-zinc-base-v1", "refs/pr/2"),
    "chemberta-77m": Preset("DeepChem/ChemBERTa-77M-MLM", "refs/pr/2"),
    "minilm": Preset("sentence-transformers/all-MiniLM-L6-v2"),
}


@dataclass(frozen=True)
class ModelFolder:
    """An encoder's folder, and what is recorded of it.

    Attributes
    ----------
    path
        Holds ``config.json``, safetensors weights and the tokenizer's files.
    name
        Name on the hub, or the folder's own name.
    commit
        Commit on the hub; None for a folder.
    """

    path: Path
    name: str
    commit: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return name, commit and SHA-256 of the files that determine the vectors, for the manifest."""
        digest = hashlib.sha256()
        used = [path for pattern in _WANTED for path in self.path.glob(pattern) if path.is_file()]
        for path in sorted(used):
            digest.update(f"{path.name}\0{files.sha256(path)}\0".encode())
        return {"name": self.name, "commit": self.commit, "sha256": digest.hexdigest()}


def locate(model: str, *, revision: str | None = None, local_only: bool = False) -> ModelFolder:
    """Find a model: a folder, else in the cache of the hub, else (unless ``local_only``) download it there.

    Parameters
    ----------
    model
        Folder, one of `PRESETS`, or ``ORGANISATION/NAME`` on the hub.
    revision
        Branch, tag or commit on the hub; default: the preset's, else ``main``.
    local_only
        Never use the network.

    Raises
    ------
    UserError
        If there is no such model, it cannot be reached from here, or it has no safetensors weights.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"--revision is for models of the hub; {model} is a folder")
        problem = incomplete(folder)
        if problem:
            raise UserError(f"{model}: {problem}")
        return ModelFolder(folder, folder.resolve().name)
    preset = PRESETS.get(model, Preset(model))
    owner, slash, rest = preset.name.partition("/")
    if not (owner and slash and rest) or "/" in rest or owner.startswith((".", "~")):
        hint = nearest(model, PRESETS) or ";"
        raise UserError(
            f"--model {model}: no such folder, and not a model's name{hint} give a folder, "
            f"ORGANISATION/NAME, or one of {listing(PRESETS, len(PRESETS))}"
        )
    snapshot = _snapshot(preset.name, revision or preset.revision, local_only=local_only)
    return ModelFolder(snapshot, preset.name, snapshot.name)


def incomplete(folder: Path) -> str:
    """Return what an encoder's folder lacks, with what to do, or an empty string."""
    if not (folder / "config.json").is_file():
        return "holds no config.json; give the folder of a transformers model"
    shards = ["model.safetensors"]
    if (folder / _INDEX).is_file():
        try:
            shards = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{_INDEX} is damaged; download the model again"
    missing = [name for name in shards if not (folder / name).is_file()]
    if not missing:
        return ""
    return (
        f"lacks {listing(missing, 3)}; pickled weights are not read: take the revision that the hub's converter made "
        "(--revision refs/pr/N, see the model's page), or save the model again as safetensors"
    )


def _snapshot(name: str, revision: str | None, *, local_only: bool) -> Path:
    """Return the folder of a model in the cache, downloading what it lacks."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted: dict[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": ["*/*"]}
    lacks, reason = "", ""
    for offline in (True,) if local_only else (True, False):
        if not offline:
            logger.info("looking for %s on the Hugging Face hub", name)
        lacks, reason = "", ""
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=offline, **wanted))
        except LocalEntryNotFoundError:
            continue
        except (HFValidationError, RevisionNotFoundError, RepositoryNotFoundError) as error:
            what = f"revision '{revision}' of {name}" if isinstance(error, RevisionNotFoundError) else name
            raise UserError(f"--model: the hub has no {what}, or it is not public; check the name") from None
        except OSError as error:  # connection and HTTP errors are among these
            reason = f" ({str(error).strip().splitlines()[0]})"
            continue
        lacks = incomplete(folder)
        if not lacks:
            return folder
    if lacks:
        raise UserError(f"{name} it {lacks}")
    raise UserError(_unreachable(name, revision, local_only=local_only) + reason)


def _unreachable(name: str, revision: str | None, *, local_only: bool) -> str:
    folder = name.rpartition("/")[2]
    at = f" --revision {revision}" if revision else ""
    why = "and --local-only was given" if local_only else "and the hub cannot be reached from here"
    return (
        f"model {name} is not in the cache {why}; on a machine with network run "
        f"'hf download {name}{at} --local-dir {folder}', copy the folder and give it as --model {folder}"
    )
