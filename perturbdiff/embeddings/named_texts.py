"""What is to be embedded: names with sequences, SMILES or texts, read from FASTA, CSV or TSV."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.untrusted import open_bytes

logger = logging.getLogger(__name__)

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".txt": "\t"}
_FASTA = (".fasta", ".fa", ".faa", ".fas")
_LONGEST_FIELD = 1 << 27  # the csv module's own limit is shorter than long proteins
_NUCLEOTIDES = re.compile(r"[ACGTUN]{30,}")

TextKind = Literal["sequence", "smiles", "text"]
TEXT_KINDS: tuple[TextKind, ...] = ("sequence", "smiles", "text")


@dataclass(frozen=True)
class NamedTexts:
    """Each name once, in the file's order, with its text, which is not empty."""

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
                pairs, kind = list(_fasta(path, lines)), "sequence"
            else:
                pairs, kind = _table(path, lines, _DELIMITERS[suffix], kind)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{path}: is not UTF-8 text, or the .gz is damaged ({error})") from None
    return _checked(path, pairs, kind)


def _opened(path: Path) -> IO[str]:
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


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
    columns: _Columns | None = None
    try:
        for row in reader:
            if not any(field.strip() for field in row):
                continue
            if columns is None:
                columns = _columns(path, row, kind)
                if columns.in_header:
                    continue
            if len(row) != columns.count:
                raise UserError(
                    f"{path}: line {reader.line_num} has {len(row)} columns, the first {columns.count}"
                )
            pairs.append((row[columns.name].strip(), row[columns.text].strip()))
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}") from None
    return pairs, "text" if columns is None else columns.kind


class _Columns(NamedTuple):
    """Places of names and texts in a table, what the texts are, how many columns it has, whether a header says so."""

    name: int
    text: int
    kind: TextKind
    count: int
    in_header: bool


def _columns(path: Path, first: list[str], kind: TextKind | None) -> _Columns:
    """Return what the first row of a table, its header if it has one, says of its columns."""
    header = [field.strip().lower() for field in first]
    kinds: list[TextKind] = [k for k in TEXT_KINDS if k in header]
    named, two = "name" in header, len(header) == 2
    if two and not kinds and not named:
        if kind is None:
            raise UserError(f"{path}: two columns without a header: say what they hold with --kind")
        logger.info("%s: no header; names are the first column, of kind %s the second", path, kind)
        return _Columns(0, 1, kind, 2, in_header=False)
    if kind is None:
        if len(kinds) > 1:
            raise UserError(f"{path}: has the columns {listing(kinds)}; choose one with --kind")
        if not kinds:
            raise UserError(f"{path}: needs a column sequence, smiles or text; it has {listing(first)}")
        kind = kinds[0]
    if kind not in kinds and (kinds or not two):
        raise UserError(f"{path}: lacks the column '{kind}'; it has {listing(first)}")
    if not named and not two:
        raise UserError(f"{path}: lacks the column 'name'; it has {listing(first)}")
    text = header.index(kind) if kind in kinds else 1 - header.index("name")
    name = header.index("name") if named else 1 - text
    return _Columns(name, text, kind, len(header), in_header=True)


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
    """Return a protein's residues in capitals, without the ``*`` of the stop codon at its end."""
    sequence = "".join(text.split()).upper().removesuffix("*")
    if re.fullmatch("[A-Z]+", sequence):
        return sequence
    others = sorted(set(re.findall("[^A-Z]", sequence)))
    problem = f"holds {listing(repr(sign) for sign in others)}" if others else "is empty"
    raise UserError(f"{path}: the sequence of '{name}' {problem}; give amino acids in one-letter code")
