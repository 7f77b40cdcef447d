"""Which genes a perturbation acts on directly: told by a table, else read from the perturbation's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import agents
from perturbdiff.conditions.gene_names import unshared
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.files import existing

COLUMNS = ("perturbation", "gene")
_TABS = (".tsv", ".tab", ".txt")


@dataclass(frozen=True)
class Targets:
    """The target genes of some perturbations, and what did not match.

    Attributes
    ----------
    genes
        The measured target genes of each perturbation, in the order of the genes; empty where there are none.
    measured
        Names of all measured genes.
    source
        Name of the table; empty if names alone were read.
    without
        Perturbations without a target gene in the table, or whose name is not a measured gene.
    unmeasured
        Target genes that are not among the measured genes.
    unknown
        Perturbations of the table that are not scored.
    """

    genes: Mapping[str, tuple[str, ...]]
    measured: tuple[str, ...]
    source: str = ""
    without: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        perturbations: Sequence[str],
        genes: Sequence[str],
        told: Mapping[str, Sequence[str]] | None = None,
    ) -> Targets:
        """Return the target genes that a table tells, else those that the perturbations are named after.

        A combination (``"GATA1+KLF1"``) and a label with a dose (``"GATA1@2"``) are named after their agents. What
        the table says of a perturbation is all that counts for it.

        Parameters
        ----------
        perturbations
            Those that are scored.
        genes
            The measured genes.
        told
            Target genes of perturbations; none: an empty sequence.
        """
        told, place = told or {}, {gene: i for i, gene in enumerate(genes)}
        named = {name: told.get(name) for name in perturbations}
        wanted = {
            name: tuple(agent for agent, _ in agents(name, names=place)) if of_table is None else of_table
            for name, of_table in named.items()
        }
        found = {
            name: tuple(sorted({g for g in some if g in place}, key=place.__getitem__))
            for name, some in wanted.items()
        }
        unmeasured = {g for name, some in named.items() for g in some or () if g not in place}
        return cls(
            found,
            tuple(genes),
            without=tuple(name for name, some in found.items() if not some),
            unmeasured=tuple(sorted(unmeasured)),
            unknown=tuple(sorted(set(told) - set(found))),
        )

    @classmethod
    def read(cls, path: str | Path | None, perturbations: Sequence[str], genes: Sequence[str]) -> Targets:
        """Read a table of target genes; without one, take the genes that the perturbations are named after.

        Parameters
        ----------
        path
            CSV, or a table with tabs (.tsv, .tab, .txt), with the columns ``perturbation`` and ``gene``. A
            perturbation with several targets has a row for each. An empty gene says that there is none.
        perturbations, genes
            As in `Targets.of`.

        Raises
        ------
        UserError
            If the table cannot be read, lacks a column or rows, or has no perturbation or no gene of the data.
        """
        if path is None:
            return cls.of(perturbations, genes)
        path = Path(path)
        told = _told(path)
        here = [name for name in told if name in set(perturbations)]
        if not here:
            hint = nearest(next(iter(told)), perturbations)
            raise UserError(
                f"{path}: has none of the {len(perturbations)} scored perturbations ({listing(perturbations, 3)}); its "
                f"first ones are {listing(told, 3)}{hint}"
            )
        named = sorted({g for name in here for g in told[name]})
        if named and not set(named) & set(genes):
            raise UserError(f"{path}: {unshared(named, list(genes), 'the target genes', 'the data')}")
        found = cls.of(perturbations, genes, told)
        return cls(found.genes, found.measured, path.name, found.without, found.unmeasured, found.unknown)

    @property
    def panel(self) -> tuple[str, ...]:
        """Return the measured target genes of all perturbations, in the order of the genes."""
        every = {gene for some in self.genes.values() for gene in some}
        return tuple(gene for gene in self.measured if gene in every)

    def panel_columns(self) -> np.ndarray:
        """Return which measured genes are in the panel, bool [G]."""
        every = {gene for some in self.genes.values() for gene in some}
        return np.array([gene in every for gene in self.measured], bool)

    def own_columns(self, perturbations: Sequence[str]) -> np.ndarray:
        """Return which measured genes each perturbation acts on, bool [len(perturbations), G]."""
        place = {gene: i for i, gene in enumerate(self.measured)}
        found = np.zeros((len(perturbations), len(place)), bool)
        for row, name in zip(found, perturbations, strict=True):
            row[[place[gene] for gene in self.genes[name]]] = True
        return found

    def remarks(self) -> list[tuple[str, int, bool]]:
        """Return a sentence, a number, and whether it needs attention, for each kind of what did not match."""
        where, found = self.source or "perturbations' names", []
        if self.unmeasured:
            text = (
                f"{where}: {len(self.unmeasured)} target genes are not measured: {listing(self.unmeasured)}"
            )
            found.append((text, len(self.unmeasured), True))
        if self.without:
            text = (
                f"{where}: {len(self.without)} of {len(self.genes)} perturbations have no measured target gene "
                f"({listing(self.without)}), so that none is left out for them"
            )
            found.append((text, len(self.without), bool(self.source)))
        if self.unknown:
            text = f"{where}: {len(self.unknown)} perturbations are not scored and not used ({listing(self.unknown)})"
            found.append((text, len(self.unknown), False))
        return found


def _told(path: Path) -> dict[str, list[str]]:
    """Return the genes of each perturbation of a table, in its order."""
    remedy = f"give a CSV or TSV with the columns {' and '.join(COLUMNS)}"
    name = path.name.lower().removesuffix(".gz")
    options = {"sep": "\t"} if name.endswith(_TABS) else {}
    table: pd.DataFrame = tabular.read_csv(
        existing(path, "table of target genes"), remedy, dtype=str, keep_default_na=False, **options
    )
    table.columns = pd.Index([str(column).strip().lower() for column in table.columns])
    if missing := [column for column in COLUMNS if column not in table]:
        raise UserError(f"{path}: no column {listing(missing)}; {remedy}")
    if table.empty:
        raise UserError(f"{path}: has no rows; {remedy}")
    told: dict[str, list[str]] = {}
    for perturbation, gene in zip(*(table[c].str.strip() for c in COLUMNS), strict=True):
        genes = told.setdefault(perturbation, [])
        if gene and gene not in genes:
            genes.append(gene)
    return told
