"""The stage: names with sequences, SMILES or texts → a semantic table."""

from __future__ import annotations

import csv
import gzip
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, cast

import numpy as np

from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.embeddings.encoder import DEFAULT_POOL, Encoder, Pool, Tokens, locate
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import track
from perturbdiff.runtime.provenance import stage
from perturbdiff.runtime.resources import resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".txt": "\t"}
_FASTA = (".fasta", ".fa", ".faa", ".fas")
_LONGEST_FIELD = 1 << 27  # the csv module's own limit is shorter than long proteins
_NUCLEOTIDES = re.compile(r"[ACGTUN]{30,}")
_LIBRARIES = ("tokenizers", "transformers")

TextKind = Literal["sequence", "smiles", "text"]
TEXT_KINDS: tuple[TextKind, ...] = ("sequence", "smiles", "text")


@dataclass(frozen=True)
class NamedTexts:
    """What is to be embedded: each name once, in the file's order, and no text empty."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    kind: TextKind


def read_named_texts(path: Path, kind: TextKind | None = None) -> NamedTexts:
    """Read FASTA (``.fasta``, ``.fa``, ``.faa``, ``.fas``), CSV or TSV; ``.gz`` of each too.

    A FASTA record's name is the first word of its header. A table has the columns ``name`` and ``sequence``,
    ``smiles`` or ``text`` in any order and case, or two columns without a header.

    Parameters
    ----------
    path
        The file.
    kind
        What the texts are; by default what the table's column says, and sequences for FASTA.

    Raises
    ------
    UserError
        If the file is of another kind, a name is missing or occurs twice, or a text is empty.
    """
    files.existing(path, "input")
    suffix = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    if suffix in _FASTA and kind not in (None, "sequence"):
        raise UserError(f"{path}: FASTA holds sequences, but --kind is {kind}; give a CSV or TSV for it")
    if suffix not in (*_FASTA, *_DELIMITERS):
        raise UserError(
            f"{path}: cannot tell its format from '{suffix}'; give {', '.join((*_FASTA, *_DELIMITERS))}"
        )
    try:
        with _opened(path) as lines:
            if suffix in _FASTA:
                pairs, found = list(_fasta(path, lines)), cast("TextKind", "sequence")
            else:
                pairs, found = _table(path, lines, _DELIMITERS[suffix], kind)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{path}: is not UTF-8 text, or the .gz is damaged ({error})") from None
    return _checked(path, pairs, found)


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _fasta(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield name and sequence of each record."""
    name: str | None = None
    parts: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.startswith(">"):
            if name is not None:
                yield name, "".join(parts)
            words = line[1:].split()
            if not words:
                raise UserError(f"{path}: line {number}: a header without a name; write '>NAME'")
            name, parts = words[0], []
        elif name is not None:
            parts.append("".join(line.split()))
        elif line.strip() and not line.startswith(";"):
            raise UserError(f"{path}: line {number}: a sequence before the first '>NAME'; is this FASTA?")
    if name is not None:
        yield name, "".join(parts)


def _table(
    path: Path, lines: Iterable[str], delimiter: str, kind: TextKind | None
) -> tuple[list[tuple[str, str]], TextKind]:
    """Return name and text of each row, and what the texts are."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    pairs: list[tuple[str, str]] = []
    columns: tuple[int, int] | None = None
    width = 0
    try:
        for row in reader:
            if not any(field.strip() for field in row):
                continue
            if columns is None:
                columns, width, kind, is_header = _columns(path, row, kind)
                if is_header:
                    continue
            if len(row) != width:
                raise UserError(f"{path}: line {reader.line_num} has {len(row)} columns, the first {width}")
            pairs.append((row[columns[0]].strip(), row[columns[1]].strip()))
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}") from None
    return pairs, kind or "text"


def _columns(
    path: Path, first: list[str], kind: TextKind | None
) -> tuple[tuple[int, int], int, TextKind, bool]:
    """Return the columns of names and texts, how many there are, the kind, and whether ``first`` is a header."""
    header = [field.strip().lower() for field in first]
    known: list[TextKind] = [k for k in TEXT_KINDS if k in header]
    if not known and "name" not in header and len(header) == 2:
        if kind is None:
            raise UserError(f"{path}: two columns without a header: say what they hold with --kind")
        logger.info("%s: no header; names are the first column, of kind %s the second", path, kind)
        return (0, 1), 2, kind, False
    if kind is None and len(known) > 1:
        raise UserError(f"{path}: has the columns {listing(known)}; choose one with --kind")
    chosen: TextKind | None = kind or (known[0] if known else None)
    if chosen is None:
        raise UserError(f"{path}: needs a column sequence, smiles or text; it has {listing(first)}")
    if chosen not in known and not (len(header) == 2 and not known):
        raise UserError(f"{path}: lacks the column '{chosen}'; it has {listing(first)}")
    if "name" not in header and len(header) != 2:
        raise UserError(f"{path}: lacks the column 'name'; it has {listing(first)}")
    text = header.index(chosen) if chosen in known else 1 - header.index("name")
    name = header.index("name") if "name" in header else 1 - text
    return (name, text), len(header), chosen, True


def _checked(path: Path, pairs: list[tuple[str, str]], kind: TextKind) -> NamedTexts:
    if not pairs:
        raise UserError(f"{path}: holds no entries")
    seen: set[str] = set()
    twice = [name for name, _ in pairs if name in seen or seen.add(name)]
    if twice:
        raise UserError(f"{path}: names occur twice: {listing(dict.fromkeys(twice))}; give each one entry")
    if "" in seen:
        raise UserError(f"{path}: {sum(not name for name, _ in pairs)} entries have no name")
    empty = [name for name, text in pairs if not text]
    if empty:
        raise UserError(f"{path}: without {kind}: {listing(empty)}; fill or remove them")
    if kind == "sequence":
        pairs = [(name, _residues(path, name, text)) for name, text in pairs]
        if all(_NUCLEOTIDES.fullmatch(text) for _, text in pairs):
            logger.warning("%s: all sequences look like nucleotides; protein models expect amino acids", path)
    return NamedTexts(tuple(name for name, _ in pairs), tuple(text for _, text in pairs), kind)


def _residues(path: Path, name: str, text: str) -> str:
    """Return a protein's residues in capitals, without the stop sign at its end."""
    sequence = "".join(text.split()).upper().removesuffix("*")
    if re.fullmatch("[A-Z]+", sequence):
        return sequence
    strange = sorted(set(re.findall("[^A-Z]", sequence)))
    what = f"holds {listing(repr(sign) for sign in strange)}" if strange else "is empty"
    raise UserError(f"{path}: the sequence of '{name}' {what}; give amino acids in one-letter code")


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
        FASTA, CSV or TSV; see `perturbdiff.embeddings.embedding_stage.read_named_texts`.
    out
        ``.parquet`` or ``.npz``.
    model
        Folder, name on the Hugging Face hub, or one of `perturbdiff.embeddings.encoder.PRESETS`.
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
    where = resolve_device(device)
    entries = read_named_texts(source, kind)
    located = locate(model, revision=revision, local_only=local_only)
    chosen: Pool = pool or DEFAULT_POOL[entries.kind]
    config = {
        "kind": entries.kind,
        "pool": chosen,
        "layer": layer,
        "max_length": max_length,
        "model": located.identity(),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
    with stage("embed", out, config=config, inputs={"input": source}, force=force) as run:
        if run.skip:
            return out
        encoder = Encoder(located.folder, where)
        encoder.check_layer(layer)
        limit = encoder.limit(max_length)
        tokens = _tokens(encoder, entries, limit)
        vectors = _vectors(encoder, tokens, chosen, entries.kind, layer=layer, batch_size=batch_size)
        _write(EmbeddingTable(entries.names, vectors), run.path, out.suffix)
        run.results |= {"names": len(entries.names), "width": vectors.shape[1], "max_length": limit}
        run.results |= {"cut": sum(t.cut for t in tokens), "unknown": sum(map(encoder.unknown, tokens))}
        run.notes |= {"device": where, "batch_size": batch_size}
    return out


def _check(out: Path, batch_size: int, max_length: int | None) -> None:
    """Refuse what cannot be computed or written, before a model is looked for."""
    if out.suffix not in (".parquet", ".npz"):
        raise UserError(f"--out {out}: a semantic table is a .parquet or .npz file")
    if batch_size < 1 or (max_length is not None and max_length < 3):
        raise UserError("--batch-size must be at least 1 and --max-length at least 3")
    if importlib.util.find_spec("transformers") is None:
        raise UserError("embed needs the package transformers: pip install 'perturbdiff[embed]'")


def _write(table: EmbeddingTable, partial: Path, suffix: str) -> None:
    """Write a table to the stage's temporary path, whose name does not say the format."""
    complete = partial.with_name(partial.name + suffix)
    table.write(complete)
    complete.replace(partial)


def _tokens(encoder: Encoder, entries: NamedTexts, limit: int | None) -> list[Tokens]:
    """Return the tokens of all texts, and tell what the encoder will not see."""
    if encoder.kind == "esm" and entries.kind != "sequence":
        raise UserError(f"--model: this one reads protein sequences, the input holds {entries.kind}")
    tokens = encoder.tokenise(entries.texts, limit)
    empty = [name for name, t in zip(entries.names, tokens, strict=True) if t.special.all()]
    if empty:
        raise UserError(f"the model's tokenizer finds nothing in the {entries.kind} of {listing(empty)}")
    cut = [name for name, t in zip(entries.names, tokens, strict=True) if t.cut]
    if cut:
        logger.warning(
            "%d of %d are longer than %s tokens and were cut: %s", len(cut), len(tokens), limit, listing(cut)
        )
    unknown = [name for name, t in zip(entries.names, tokens, strict=True) if encoder.unknown(t)]
    if unknown:
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
    """Return vectors float32 [names, e] in the order of ``tokens``; texts of like length share a batch."""
    order = np.argsort([-len(t.ids) for t in tokens], kind="stable")  # longest first: memory fails early
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
