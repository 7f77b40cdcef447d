"""Other names of genes, from a table of aliases and symbols."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from perturbdiff.runtime import files, tabular
from perturbdiff.runtime.errors import UserError, listing

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
