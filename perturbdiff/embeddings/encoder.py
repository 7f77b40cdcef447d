"""A pretrained encoder: tokens of texts, hidden states, and their pooling to one vector per text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing, nearest

if TYPE_CHECKING:
    from perturbdiff.embeddings.embedding_stage import TextKind

logger = logging.getLogger(__name__)

_WANTED = ["*.json", "*.txt", "*.model", "*.safetensors"]  # configuration, vocabulary, weights; no pickles
_INDEX = "model.safetensors.index.json"
# weights that checkpoints of masked language models leave out and no hidden state depends on
_UNUSED = ("pooler.", "contact_head.", "position_ids", "inv_freq")
_NO_LIMIT = 1 << 24  # tokenizers without a limit declare a number far above this
_CHUNK = 512


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
class Located:
    """An encoder's folder, and what is recorded of it.

    Attributes
    ----------
    folder
        Holds ``config.json``, safetensors weights and the tokenizer's files.
    name
        Name on the hub, or the folder's own name.
    commit
        Commit on the hub; None for a folder.
    """

    folder: Path
    name: str
    commit: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return name, commit and SHA-256 of the files that determine the vectors, for the manifest."""
        digest = hashlib.sha256()
        used = [path for pattern in _WANTED for path in self.folder.glob(pattern) if path.is_file()]
        for path in sorted(used):
            digest.update(f"{path.name}\0{files.sha256(path)}\0".encode())
        return {"name": self.name, "commit": self.commit, "sha256": digest.hexdigest()}


def locate(model: str, *, revision: str | None = None, local_only: bool = False) -> Located:
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
        return Located(folder, folder.resolve().name)
    preset = PRESETS.get(model, Preset(model))
    owner, slash, rest = preset.name.partition("/")
    if not (owner and slash and rest) or "/" in rest or owner.startswith((".", "~")):
        hint = nearest(model, PRESETS) or ";"
        raise UserError(
            f"--model {model}: no such folder, and not a model's name{hint} give a folder, "
            f"ORGANISATION/NAME, or one of {listing(PRESETS, len(PRESETS))}"
        )
    found = _snapshot(preset.name, revision or preset.revision, local_only=local_only)
    return Located(found, preset.name, found.name)


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
    problem = ""
    for offline in (True,) if local_only else (True, False):
        if not offline:
            logger.info("looking for %s on the Hugging Face hub", name)
        try:
            found = snapshot_download(name, revision=revision, local_files_only=offline, **wanted)
        except LocalEntryNotFoundError:
            problem = ""
        except (HFValidationError, RevisionNotFoundError, RepositoryNotFoundError) as error:
            what = f"revision '{revision}' of {name}" if isinstance(error, RevisionNotFoundError) else name
            raise UserError(f"--model: the hub has no {what}, or it is not public; check the name") from None
        except OSError as error:  # connection and HTTP errors are among these
            problem = f" ({str(error).strip().splitlines()[0]})"
        else:
            problem = incomplete(Path(found))
            if not problem:
                return Path(found)
            problem = f": it {problem}"
    if problem.startswith(": "):
        raise UserError(f"{name}{problem[1:]}")
    raise UserError(_unreachable(name, revision, local_only=local_only) + problem)


def _unreachable(name: str, revision: str | None, *, local_only: bool) -> str:
    folder = name.rpartition("/")[2]
    at = f" --revision {revision}" if revision else ""
    why = "and --local-only was given" if local_only else "and the hub cannot be reached from here"
    return (
        f"model {name} is not in the cache {why}; on a machine with network run "
        f"'hf download {name}{at} --local-dir {folder}', copy the folder and give it as --model {folder}"
    )


Pool = Literal["mean", "cls", "last"]
DEFAULT_POOL: dict[TextKind, Pool] = {"sequence": "mean", "smiles": "cls", "text": "mean"}


@dataclass(frozen=True)
class Tokens:
    """One text as the encoder reads it: token ids, and which of them are special (begin, end)."""

    ids: np.ndarray  # int32 [tokens]
    special: np.ndarray  # bool [tokens]
    cut: bool


class Encoder:
    """A model of ``transformers`` in evaluation mode, float32, with its tokenizer.

    Parameters
    ----------
    folder
        The model; only its safetensors are read and none of its code is run.
    device
        ``cpu`` or ``cuda``.

    Raises
    ------
    UserError
        If the folder does not hold an encoder that ``transformers`` knows, or weights are missing.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.device = torch.device(device)
        with _quiet():
            self.tokenizer, self.model = _load(folder)
        self.model.eval().float().to(self.device)
        if getattr(self.model.config, "is_encoder_decoder", False):
            self.model = self.model.get_encoder()
        self.kind: str = self.model.config.model_type

    def limit(self, asked: int | None) -> int | None:
        """Return the largest number of tokens read of a text; ``asked`` if the positions allow it.

        Raises
        ------
        UserError
            If ``asked`` exceeds the positions that the model has learned.
        """
        learned = self._learned_positions()
        if asked is not None:
            if learned is not None and asked > learned:
                raise UserError(f"--max-length {asked}: this model has positions for {learned} tokens")
            return asked
        trained = getattr(self.model.config, "max_position_embeddings", None)
        if trained is not None and self.kind == "esm":
            trained -= 2  # counted from the padding's position on
        known = [n for n in (learned, trained, self.tokenizer.model_max_length) if n and 0 < n < _NO_LIMIT]
        return min(known) if known else None

    def _learned_positions(self) -> int | None:
        """Return how many tokens the learned absolute positions allow, None if positions are relative."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
                padding = module.padding_idx  # where there is one, positions begin after it
                return module.num_embeddings - (0 if padding is None else padding + 1)
        return None

    def tokenise(self, texts: Sequence[str], limit: int | None) -> list[Tokens]:
        """Return the tokens of each text, cut to ``limit`` with the special tokens kept.

        Raises
        ------
        UserError
            If the tokenizer has ids that the model lacks: the two do not belong together.
        """
        settings: dict[str, Any] = {"return_special_tokens_mask": True, "return_attention_mask": False}
        found: list[Tokens] = []
        with _quiet():
            for start in range(0, len(texts), _CHUNK):
                chunk = list(texts[start : start + _CHUNK])
                coded = self.tokenizer(chunk, truncation=False, **settings)
                for i, ids in enumerate(coded["input_ids"]):
                    special, cut = coded["special_tokens_mask"][i], limit is not None and len(ids) > limit
                    if cut:
                        short = self.tokenizer(chunk[i], truncation=True, max_length=limit, **settings)
                        ids, special = short["input_ids"], short["special_tokens_mask"]
                    found.append(Tokens(np.asarray(ids, np.int32), np.asarray(special, bool), cut))
        largest = max((int(t.ids.max()) for t in found if len(t.ids)), default=0)
        rows = self.model.get_input_embeddings().num_embeddings
        if largest >= rows:
            raise UserError(f"--model: its tokenizer gives token {largest}, its weights have {rows} tokens")
        return found

    def unknown(self, tokens: Tokens) -> bool:
        """Return whether a text holds something the tokenizer has no token for."""
        unknown = self.tokenizer.unk_token_id
        return unknown is not None and bool((tokens.ids[~tokens.special] == unknown).any())

    def check_layer(self, layer: int) -> None:
        """Raise a `UserError` unless the model has hidden states number ``layer`` (0: embeddings, -1: last)."""
        count = int(self.model.config.num_hidden_layers) + 1
        if not -count <= layer < count:
            raise UserError(
                f"--layer {layer}: this model has the layers 0 to {count - 1}, or -1 for the last"
            )

    def vectors(self, batch: Sequence[Tokens], pool: Pool, *, specials: bool, layer: int = -1) -> np.ndarray:
        """Return one vector per text.

        Parameters
        ----------
        batch
            Tokens of at least one text.
        pool
            ``mean`` over tokens; ``cls``: the first token's state; ``last``: the last token's.
        specials
            Whether special tokens are in the mean. Padding never is.
        layer
            Which hidden states.

        Returns
        -------
        numpy.ndarray
            float32 [texts, e].
        """
        longest = max(len(t.ids) for t in batch)
        padding = self.tokenizer.pad_token_id
        ids = torch.full((len(batch), longest), 0 if padding is None else padding, dtype=torch.long)
        present = torch.zeros(len(batch), longest, dtype=torch.bool)
        averaged = torch.zeros_like(present)
        for row, tokens in enumerate(batch):
            length = len(tokens.ids)
            ids[row, :length] = torch.from_numpy(tokens.ids).long()
            present[row, :length] = True
            averaged[row, :length] = torch.from_numpy(~tokens.special | specials)
        states = self._states(ids.to(self.device), present.to(self.device), layer)
        if pool == "cls":
            pooled = states[:, 0]
        elif pool == "last":
            ends = present.sum(1) - 1
            pooled = states[torch.arange(len(batch), device=self.device), ends.to(self.device)]
        else:
            weight = averaged.to(self.device, states.dtype)[:, :, None]
            pooled = (states * weight).sum(1) / weight.sum(1)
        return pooled.cpu().numpy().astype(np.float32)

    @torch.inference_mode()
    def _states(self, ids: torch.Tensor, present: torch.Tensor, layer: int) -> torch.Tensor:
        """Return hidden states [texts, tokens, e]."""
        every = layer != -1
        try:
            out = self.model(input_ids=ids, attention_mask=present.long(), output_hidden_states=every)
        except torch.OutOfMemoryError:
            raise UserError(
                f"out of memory with {ids.shape[0]} texts of {ids.shape[1]} tokens; take a smaller --batch-size or "
                "--max-length"
            ) from None
        return out.hidden_states[layer] if every else out.last_hidden_state


def _load(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model of a folder."""
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer

    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
        model, found = AutoModel.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **safe
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{folder}: transformers cannot load it as an encoder: {reason}") from error
    decoder = getattr(model.config, "is_encoder_decoder", False)
    missing = [
        name
        for name in sorted(found["missing_keys"])
        if not any(part in name for part in _UNUSED) and not (decoder and name.startswith("decoder."))
    ]
    if missing:
        raise UserError(f"{folder}: weights are missing: {listing(missing, 3)}; the vectors would be random")
    return tokenizer, model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep notes of ``transformers`` about unused heads and long texts, and its bars, from the person."""
    from transformers.utils import logging as notes

    before, bars = notes.get_verbosity(), notes.is_progress_bar_enabled()
    notes.set_verbosity_error()
    notes.disable_progress_bar()
    try:
        yield
    finally:
        notes.set_verbosity(before)
        if bars:
            notes.enable_progress_bar()
