"""Both ends of the scale as a table, so that the next method on the same real cells need not make them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.evaluation.cell_eval2.anchors import Ends
from perturbdiff.evaluation.cell_eval2.scores import Scores
from perturbdiff.evaluation.scoring.scopes import Scope
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError

TABLE = "ends.parquet"
_BASELINE = -1


@dataclass(frozen=True)
class ScopeEnds:
    """The ends of one context.

    Attributes
    ----------
    scope
        The context.
    key
        Digest of what the ends depend on.
    perturbations
        Names of the M perturbations, sorted.
    ends
        Values of both ends.
    """

    scope: Scope
    key: str
    perturbations: tuple[str, ...]
    ends: Ends


def write_ends(folder: Path, made: Sequence[ScopeEnds]) -> None:
    """Write the ends of each context and the digest of what they depend on: a row per end, metric and perturbation."""
    frames = []
    for one in made:
        for number, values in enumerate([one.ends.baseline, *one.ends.replicates], _BASELINE):
            table = pd.DataFrame(values, index=pd.Index(one.perturbations, name="perturbation"))
            long = table.reset_index().melt("perturbation", var_name="metric", value_name="value")
            kind, scope = one.scope
            frames.append(long.assign(scope_kind=kind, scope=scope, key=one.key, halving=number))
    pd.concat(frames, ignore_index=True).to_parquet(folder / TABLE, index=False)


class KeptEnds:
    """The ends that an earlier evaluation, or `ceiling`, wrote.

    Parameters
    ----------
    folder
        Its folder.

    Raises
    ------
    UserError
        If it has no such table, or was changed since.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / TABLE).is_file():
            raise UserError(
                f"{folder}: has no {TABLE}; name a folder that evaluate or ceiling --definition cell-eval2 wrote"
            )
        provenance.verify(folder)
        self._table = tabular.read_parquet(folder / TABLE, "evaluate again")
        wanted = {"scope_kind", "scope", "key", "halving", "metric", "perturbation", "value"}
        if not wanted <= set(self._table):
            raise UserError(f"{folder / TABLE}: is no table of ends; evaluate again")

    def of(self, scope: Scope, key: str, perturbations: Sequence[str]) -> Ends:
        """Return the ends of a scope.

        Raises
        ------
        UserError
            If they are of other real cells, rules or target genes, or of another release of this package.
        """
        rows = self._table[(self._table["scope_kind"] == scope[0]) & (self._table["scope"] == scope[1])]
        if set(rows["key"]) != {key}:
            raise UserError(
                f"{self._folder}: its ends are of other real cells, rules or target genes, or of another release; "
                "leave --ends out to make them"
            )
        found = [_scores(pd.DataFrame(part), perturbations) for _, part in rows.groupby("halving")]
        return Ends(found[0], found[1:])


def _scores(rows: pd.DataFrame, perturbations: Sequence[str]) -> Scores:
    wide = rows.pivot(index="perturbation", columns="metric", values="value").reindex(list(perturbations))
    return {str(name): wide[name].to_numpy(np.float64) for name in dict.fromkeys(rows["metric"])}
