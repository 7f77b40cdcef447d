"""The genes of several inputs together: those that all have, or those that any has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)


def join_genes(files: Sequence[tuple[str, list[str]]], how: Literal["intersection", "union"]) -> list[str]:
    """Return the genes to read from several files.

    Parameters
    ----------
    files
        Name and genes of each file, without repeats.
    how
        ``intersection``: genes that every file has, in the order of the first. ``union``: genes that any has,
        those of the first file first, then what each next one adds, in its order.

    Raises
    ------
    UserError
        If a file has no gene in common with those before it.
    """
    first = files[0][1]
    known = dict.fromkeys(first)
    common = set(first)
    for name, genes in files[1:]:
        own = set(genes)
        common &= own
        if own.isdisjoint(known) or (how == "intersection" and not common):
            raise UserError(
                f"{listing([n for n, _ in files], 3)}: have no gene in common ({files[0][0]}: {listing(first, 2)}; "
                f"{name}: {listing(genes, 2)}); give files with the same kind of gene names, or name the genes of all "
                "by a var column that all have (data.gene_key)"
            )
        known |= dict.fromkeys(genes)
    if how == "union":
        _warn_lacking(files, list(known))
        return list(known)
    if len(known) > len(common):
        logger.warning(
            "the files differ in their genes: the %d that all have are used, %d are left out (%s)",
            len(common),
            len(known) - len(common),
            listing(sorted(set(known) - common), 4),
        )
    return [gene for gene in first if gene in common]


def _warn_lacking(files: Sequence[tuple[str, list[str]]], every: Sequence[str]) -> None:
    for name, genes in files:
        own = set(genes)
        lacking = [gene for gene in every if gene not in own]
        if lacking:
            logger.warning(
                "%s: lacks %d of the %d genes of all files (%s); they count as 0 in its cells",
                name,
                len(lacking),
                len(every),
                listing(lacking, 4),
            )
