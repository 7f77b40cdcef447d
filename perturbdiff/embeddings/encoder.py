"""A pretrained encoder: tokens of texts, hidden states, and their pooling to one vector per text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from perturbdiff.embeddings.named_texts import TextKind
from perturbdiff.runtime.errors import UserError, listing

# Checkpoints of masked language models leave these weights out; no hidden state depends on them.
_UNUSED = ("pooler.", "contact_head.", "position_ids", "inv_freq")
_NO_LIMIT = 1 << 24  # tokenizers without a limit declare a number far above this
_TEXTS_AT_ONCE = 512

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

    def limit(self, max_length: int | None) -> int | None:
        """Return the largest number of tokens read of a text: ``max_length``, else what the model was made for.

        Raises
        ------
        UserError
            If ``max_length`` exceeds the positions that the model has learned.
        """
        learned = self._learned_positions()
        if max_length is not None:
            if learned is not None and max_length > learned:
                raise UserError(f"--max-length {max_length}: this model has positions for {learned} tokens")
            return max_length
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
        tokens: list[Tokens] = []
        with _quiet():
            for start in range(0, len(texts), _TEXTS_AT_ONCE):
                chunk = list(texts[start : start + _TEXTS_AT_ONCE])
                coded = self.tokenizer(chunk, truncation=False, **settings)
                for i, ids in enumerate(coded["input_ids"]):
                    special, cut = coded["special_tokens_mask"][i], limit is not None and len(ids) > limit
                    if cut:
                        short = self.tokenizer(chunk[i], truncation=True, max_length=limit, **settings)
                        ids, special = short["input_ids"], short["special_tokens_mask"]
                    tokens.append(Tokens(np.asarray(ids, np.int32), np.asarray(special, bool), cut))
        largest = max((int(t.ids.max()) for t in tokens if len(t.ids)), default=0)
        rows = self.model.get_input_embeddings().num_embeddings
        if largest >= rows:
            raise UserError(f"--model: its tokenizer gives token {largest}, its weights have {rows} tokens")
        return tokens

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
        every_layer = layer != -1
        try:
            out = self.model(input_ids=ids, attention_mask=present.long(), output_hidden_states=every_layer)
        except torch.OutOfMemoryError:
            raise UserError(
                f"out of memory with {ids.shape[0]} texts of {ids.shape[1]} tokens; take a smaller --batch-size or "
                "--max-length"
            ) from None
        return out.hidden_states[layer] if every_layer else out.last_hidden_state


def _load(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model of a folder."""
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer

    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
        model, loaded = AutoModel.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **safe
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{folder}: transformers cannot load it as an encoder: {reason}") from error
    decoder = getattr(model.config, "is_encoder_decoder", False)
    missing = [
        name
        for name in sorted(loaded["missing_keys"])
        if not any(part in name for part in _UNUSED) and not (decoder and name.startswith("decoder."))
    ]
    if missing:
        raise UserError(f"{folder}: weights are missing: {listing(missing, 3)}; the vectors would be random")
    return tokenizer, model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what ``transformers`` logs about unused heads and long texts, and its progress bars."""
    from transformers.utils import logging as library

    verbosity, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if bars:
            library.enable_progress_bar()
