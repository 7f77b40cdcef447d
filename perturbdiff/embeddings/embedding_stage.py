"""The stage that turns names with sequences, SMILES or texts into a semantic table."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perturbdiff.embeddings.embedding_tables import EmbeddingTable, write_as
from perturbdiff.embeddings.encoder import DEFAULT_POOL, Encoder, Pool, Tokens
from perturbdiff.embeddings.model_folder import locate
from perturbdiff.embeddings.named_texts import NamedTexts, TextKind, read_named_texts
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import track
from perturbdiff.runtime.provenance import stage
from perturbdiff.runtime.resources import resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

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
        Folder, name on the Hugging Face hub, or one of `model_folder.PRESETS`.
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
