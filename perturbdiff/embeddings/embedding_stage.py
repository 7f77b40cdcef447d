"""The stage that turns names with sequences, SMILES or texts into a semantic table, and the folder of its encoder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perturbdiff.embeddings.embedding_tables import EmbeddingTable, write_as
from perturbdiff.embeddings.encoder import DEFAULT_POOL, Encoder, Pool, Tokens
from perturbdiff.embeddings.named_texts import NamedTexts, TextKind, read_named_texts
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.progress import track
from perturbdiff.runtime.provenance import stage
from perturbdiff.runtime.resources import resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


_LIBRARIES = ("tokenizers", "transformers")


def embed(
    source: Path,
    out: Path,
    *,
    model: str,
    kind: TextKind | None = None,
    pool: Pool | None = None,
    layer: int = -1,
    max_length: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    revision: str | None = None,
    local_only: bool = False,
    force: bool = False,
) -> Path:
    """Compute a semantic table with a pretrained encoder (paper, App. Covariate Encoder).

    Parameters
    ----------
    source
        FASTA, CSV or TSV; see `read_named_texts`.
    out
        ``.parquet`` or ``.npz``.
    model
        Folder, name on the Hugging Face hub, or one of `PRESETS`.
    kind
        What the texts are; default: what the file says.
    pool
        ``mean``, ``cls`` or ``last``; default: mean for sequences and texts, cls for SMILES. The mean of a text is
        over all its tokens, that of a sequence or SMILES over its own, without begin and end.
    layer
        Which hidden states: 0 the embeddings, -1 the last layer.
    max_length
        Tokens read of each text, begin and end included; default: what the model was made for.
    batch_size
        Texts at a time; the result does not depend on it beyond rounding.
    device
        ``auto``, ``cpu`` or ``cuda``.
    revision
        Branch, tag or commit on the hub.
    local_only
        Never use the network.
    force
        Run even if an equal output is there.

    Raises
    ------
    UserError
        If the input cannot be read, the model is not there or does not fit, or ``transformers`` is missing.
    """
    _check(out, batch_size, max_length)
    device = resolve_device(device)
    entries = read_named_texts(source, kind)
    folder = locate(model, revision=revision, local_only=local_only)
    pool = pool or DEFAULT_POOL[entries.kind]
    config = {
        "kind": entries.kind,
        "pool": pool,
        "layer": layer,
        "max_length": max_length,
        "model": folder.identity(),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
    with stage("embed", out, config=config, inputs={"input": source}, force=force) as run:
        if run.skip:
            return out
        encoder = Encoder(folder.path, device)
        encoder.check_layer(layer)
        limit = encoder.limit(max_length)
        tokens = _tokens(encoder, entries, limit)
        vectors = _vectors(encoder, tokens, pool, entries.kind, layer=layer, batch_size=batch_size)
        write_as(EmbeddingTable(entries.names, vectors), run.path, out.suffix)
        run.results |= {"names": len(entries.names), "width": vectors.shape[1], "max_length": limit}
        run.results |= {"cut": sum(t.cut for t in tokens), "unknown": sum(map(encoder.unknown, tokens))}
        run.notes |= {"device": device, "batch_size": batch_size}
    return out


def _check(out: Path, batch_size: int, max_length: int | None) -> None:
    """Refuse what cannot be computed or written, before the model is looked up."""
    if out.suffix not in (".parquet", ".npz"):
        raise UserError(f"--out {out}: a semantic table is a .parquet or .npz file")
    if batch_size < 1 or (max_length is not None and max_length < 3):
        raise UserError("--batch-size must be at least 1 and --max-length at least 3")
    if importlib.util.find_spec("transformers") is None:
        raise UserError("embed needs the package transformers: pip install 'perturbdiff[embed]'")


def _tokens(encoder: Encoder, entries: NamedTexts, limit: int | None) -> list[Tokens]:
    """Return the tokens of all texts, and warn of what the encoder will not read."""
    if encoder.kind == "esm" and entries.kind != "sequence":
        raise UserError(f"--model: this one reads protein sequences, the input holds {entries.kind}")
    tokens = encoder.tokenise(entries.texts, limit)

    def names_of(test: Callable[[Tokens], bool]) -> list[str]:
        return [name for name, t in zip(entries.names, tokens, strict=True) if test(t)]

    if empty := names_of(lambda t: bool(t.special.all())):
        raise UserError(f"the model's tokenizer finds nothing in the {entries.kind} of {listing(empty)}")
    if cut := names_of(lambda t: t.cut):
        logger.warning(
            "%d of %d are longer than %s tokens and were cut: %s", len(cut), len(tokens), limit, listing(cut)
        )
    if unknown := names_of(encoder.unknown):
        logger.warning(
            "%d of %d hold signs or words that the model does not know: %s; is it made for this kind (%s)?",
            len(unknown),
            len(tokens),
            listing(unknown),
            entries.kind,
        )
    return tokens


def _vectors(
    encoder: Encoder, tokens: Sequence[Tokens], pool: Pool, kind: TextKind, *, layer: int, batch_size: int
) -> np.ndarray:
    """Return vectors float32 [names, e] in the order of ``tokens``; texts of similar length share a batch."""
    order = np.argsort(
        [-len(t.ids) for t in tokens], kind="stable"
    )  # the longest first: too little memory shows early
    vectors: np.ndarray | None = None
    with track("embedding", len(tokens), "names") as work:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = [tokens[row] for row in rows]
            values = encoder.vectors(batch, pool, specials=kind == "text", layer=layer)
            if vectors is None:
                vectors = np.empty((len(tokens), values.shape[1]), np.float32)
            vectors[rows] = values
            work.advance(len(rows))
    if vectors is None or not np.isfinite(vectors).all():
        raise UserError("the model gives vectors that are not finite; are its weights whole?")
    return vectors
