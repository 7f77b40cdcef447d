"""Names of genes: their kinds and spellings, other names from a table, and why two lists have no gene in common."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.runtime import files, tabular
from perturbdiff.runtime.errors import UserError, listing

KINDS = ("gene names", "gene ids", "gene ids with a version")

_ID = re.compile(r"(ENS[A-Z]{0,6}G\d{11}|FBgn\d{7}|WBGene\d{8})(\.\d+)?")
_SPECIES = {
    "ENSG": "human",
    "ENSMUSG": "mouse",
    "ENSRNOG": "rat",
    "ENSDARG": "zebrafish",
    "ENSMMUG": "macaque",
    "FBgn": "fruit fly",
    "WBGene": "worm",
}
_PREFIX = re.compile(r"[A-Za-z]+")
_ROW_NUMBER = re.compile(r"\d+")
_MOST_HINTS = 3
_EXAMPLES = 3


def kinds_of(names: Sequence[str]) -> np.ndarray:
    """Return for each name which of `KINDS` it is, int8."""
    matches = [_ID.fullmatch(name) for name in names]
    return np.array([0 if m is None else 1 if m.group(2) is None else 2 for m in matches], np.int8)


def main_kind(kinds: np.ndarray) -> int:
    """Return the kind that most of some names are."""
    return int(np.bincount(kinds, minlength=len(KINDS)).argmax())


def _version(name: str) -> str:
    return re.sub(r"\.\d+$", "", name)


def _punctuation(name: str) -> str:
    return re.sub(r"[._\s]", "-", name)


FORMS: dict[str, Callable[[str], str]] = {
    "case": str.lower,
    "version": _version,
    "punctuation": _punctuation,
    "spelling": lambda name: _punctuation(_version(name)).lower(),
}
"""Ways in which two spellings of a name differ, and what makes them equal; the last is all of them."""


def synonyms(missing: Sequence[str], extra: Sequence[str]) -> dict[str, str]:
    """Return for ``missing`` names those of ``extra`` that differ only in case, version or punctuation.

    Returns
    -------
    dict
        ``"TP53" → "tp53 (case)"``; several candidates are joined by ``" or "``.
    """
    hints: dict[str, str] = {}
    for difference, form in FORMS.items():
        spellings: dict[str, list[str]] = {}
        for name in extra:
            spellings.setdefault(form(name), []).append(name)
        for name in missing:
            if name not in hints and form(name) in spellings:
                hints[name] = f"{' or '.join(spellings[form(name)][:_MOST_HINTS])} ({difference})"
    return {name: hints[name] for name in missing if name in hints}


def unshared(here: Sequence[str], there: Sequence[str], here_name: str, there_name: str) -> str:
    """Return in one sentence why two lists have no gene in common, with three genes of each and what to do.

    Parameters
    ----------
    here, there
        The two lists.
    here_name, there_name
        What they belong to, e.g. "the predictions".
    """
    shown = f"{here_name}: {listing(here[:_EXAMPLES])}; {there_name}: {listing(there[:_EXAMPLES])}"
    return f"no gene in common ({shown}); {_why(here, there, here_name, there_name)}"


def _why(here: Sequence[str], there: Sequence[str], here_name: str, there_name: str) -> str:
    for names, name in ((here, here_name), (there, there_name)):
        if all(_ROW_NUMBER.fullmatch(gene) for gene in names):
            return (
                f"{name}: these are numbers, so the names were lost; put them back into var_names, or name the var "
                "column that has them (data.gene_key)"
            )
    a, b = (main_kind(kinds_of(names)) for names in (here, there))
    if a != b:
        return (
            f"{here_name}: {KINDS[a]}, {there_name}: {KINDS[b]}; set data.gene_key to the var column that has "
            f"{KINDS[b]}, or rename the genes of one side"
        )
    one, other = _species(here), _species(there)
    if a and one != other:
        return f"these are genes of {one} and of {other}; map one side to its orthologues first"
    if alike := synonyms(there, here):
        first = next(iter(alike))
        mice = ", as names of human and mouse genes do" if alike[first].endswith("(case)") else ""
        return (
            f"{len(alike)} differ in spelling only ('{first}' is {alike[first]}){mice}; rename the genes of one side, "
            "or map them to orthologues if the species differ"
        )
    return "use the same kind of gene names, of one species (data.gene_key names the var column to use)"


def _species(names: Sequence[str]) -> str:
    """Return the species of gene ids, or the letters that they begin with."""
    prefixes = [found[0] for name in names if (found := _PREFIX.match(name))]
    first = max(set(prefixes), key=prefixes.count) if prefixes else "another kind"
    return _SPECIES.get(first, first)


_REMEDY = "give a CSV file with the columns alias, symbol"
_SHOWN = 4


def read_aliases(path: Path) -> Mapping[str, str]:
    """Return the symbol of each alias in a CSV file with the columns ``alias, symbol``.

    Raises
    ------
    UserError
        If it is not such a table, a field is empty, or an alias has two symbols.
    """
    return _read(files.existing(path, "table of gene aliases"), files.signature(path))


@functools.lru_cache(maxsize=8)
def _read(path: Path, signature: tuple[int, int]) -> Mapping[str, str]:
    """Return the aliases; ``signature`` tells a changed file from the one that was read."""
    del signature
    table = tabular.read_csv(path, _REMEDY, dtype=str, keep_default_na=False)
    if not {"alias", "symbol"} <= set(table.columns):
        raise UserError(f"{path}: has the columns {listing(table.columns)}; {_REMEDY}")
    named = pd.DataFrame(table[["alias", "symbol"]]).drop_duplicates()
    empty = (named == "").any(axis=1)
    if empty.any():
        raise UserError(f"{path}, line {int(empty.idxmax()) + 2}: a name is empty; fill it in")
    twice = named.loc[named.duplicated("alias"), "alias"]
    if len(twice):
        raise UserError(f"{path}: aliases with two symbols ({listing(twice, _SHOWN)}); keep one line of each")
    return dict(zip(named["alias"], named["symbol"], strict=True))


def renamed(path: Path, names: Sequence[str], aliases: Mapping[str, str], *, may_join: bool) -> list[str]:
    """Return names of genes with each alias replaced by its symbol.

    Parameters
    ----------
    path
        The file of the genes, for messages.
    names
        Their names.
    aliases
        Symbol of each alias.
    may_join
        Whether several genes may get one name.

    Raises
    ------
    UserError
        If a renamed gene gets the name of another one.
    """
    new = [aliases.get(name, name) for name in names]
    if may_join:
        return new
    table = pd.DataFrame({"old": list(names), "new": new}).drop_duplicates()
    joined = table[table["new"].duplicated(keep=False)].groupby("new", sort=False)["old"]
    if len(joined):
        pairs = listing([f"{symbol}: {', '.join(old)}" for symbol, old in joined], _SHOWN)
        raise UserError(
            f"{path}: data.gene_aliases gives several genes one name ({pairs}); set data.duplicate_genes=sum (adds "
            "their counts) or first, or take lines out of the table"
        )
    return new
