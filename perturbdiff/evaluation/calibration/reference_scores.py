"""The scores of a reference: one number for each metric and perturbation, with all cells or with fewer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import Condition
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.calibration.verdicts import FEWEST
from perturbdiff.evaluation.metrics import catalogue
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.readers.known_sets import KnownSets, Sets
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.aggregate import ALL_PERTURBATIONS
from perturbdiff.evaluation.scoring.condition_pass import Scored, score_cells
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope

_LEAST = 2  # cells of a condition that are kept

Look = Callable[[Scope, Comparison], None]


def comparable(pairs: Pairing) -> Pairing:
    """Return the pairing whose pool alone is scored, if that holds enough perturbations.

    With fewer than `FEWEST` of them, each context counts for itself.
    """
    several = len({(pairs.contexts[c], c.perturbation) for c in pairs.conditions if c in pairs.contexts})
    num = len(pairs.perturbations)
    return pairs if num < FEWEST and several > num else replace(pairs, contexts={})


def thinned(pairs: Pairing, share: float, *, seed: int) -> Pairing:
    """Return a pairing with a share of the cells and of the sets of each condition, drawn at random; controls stay.

    The cells and sets of a smaller share are among those of a larger one.
    """
    sides = {
        "real": replace(pairs.real, rows=_drawn(pairs.real.rows, share, seed)),
        "predicted": replace(pairs.predicted, rows=_drawn(pairs.predicted.rows, share, seed + 1)),
    }
    sets = pairs.sets
    if sets is not None:
        sets = KnownSets(_drawn_sets(sets.real, share, seed), _drawn_sets(sets.predicted, share, seed + 1))
    return replace(pairs, **sides, sets=sets)


def _drawn_sets(sets: Sets, share: float, seed: int) -> dict[Condition, list[np.ndarray]]:
    numbers = {condition: np.arange(len(all_sets)) for condition, all_sets in sets.items()}
    return {c: [sets[c][k] for k in kept] for c, kept in _drawn(numbers, share, seed).items()}


def _drawn(rows: Mapping[Condition, np.ndarray], share: float, seed: int) -> dict[Condition, np.ndarray]:
    drawn = {}
    for condition, all_rows in rows.items():
        number = max(min(_LEAST, len(all_rows)), round(share * len(all_rows)))
        order = np.random.default_rng((seed, zlib.crc32(str(condition).encode()))).permutation(len(all_rows))
        drawn[condition] = np.sort(all_rows[order[:number]])
    return drawn


def score_reference(
    pairs: Pairing,
    config: EvaluateConfig,
    *,
    seed: int = 0,
    threads: int | None = None,
    look: Look | None = None,
) -> pd.DataFrame:
    """Score the cells of a pairing.

    Parameters
    ----------
    pairs
        As `comparable` returns it.
    look
        Called with each comparison, from which more may be read.

    Returns
    -------
    DataFrame
        A row per perturbation (or "context|perturbation", see `comparable`), a column per metric, float64. A number
        for all perturbations stands in the row ``*``. Metrics of a condition's cells are means over the conditions of
        a row.
    """
    scored = score_cells(pairs, config, seed=seed, threads=threads)
    by_context = any(kind != POOLED for unit in scored.units for kind, _ in unit.scopes)
    tables = [_of_cells(scored, by_context=by_context)]
    for tested in scored.tested:
        comparison = tested.comparison(config)
        for scope in tested.unit.scopes:
            if (scope[0] != POOLED) == by_context:
                tables.append(_of_profiles(scope, comparison, scored.wanted.table))
                if look is not None:
                    look(scope, comparison)
    together = pd.concat(tables).groupby(level=0).first()  # of each metric one table has a value
    return pd.DataFrame(together, columns=pd.Index([m for m in catalogue.METRICS if m in together.columns]))


def _label(scope: Scope, perturbation: str) -> str:
    return perturbation if scope[0] == POOLED else f"{scope[1]}|{perturbation}"


def _of_profiles(scope: Scope, comparison: Comparison, metrics: tuple[str, ...]) -> pd.DataFrame:
    values = catalogue.score(comparison, metrics)
    rows = pd.Index([_label(scope, p) for p in comparison.perturbations], name="unit")
    table = pd.DataFrame(
        {n: v for n, v in values.items() if catalogue.METRICS[n].per_perturbation}, index=rows
    )
    single = {n: float(v[0]) for n, v in values.items() if not catalogue.METRICS[n].per_perturbation}
    if single and scope[0] == POOLED:
        table = pd.concat([table, pd.DataFrame(single, index=pd.Index([ALL_PERTURBATIONS], name="unit"))])
    return table.astype(np.float64)


def _of_cells(scored: Scored, *, by_context: bool) -> pd.DataFrame:
    names = [*scored.wanted.distribution, *scored.wanted.sets]
    own = pd.DataFrame(scored.conditions[scored.conditions["own"]])
    unit = own["perturbation"].astype(str)
    if by_context:
        unit = own["context"].astype(str) + "|" + unit
    return pd.DataFrame(own.assign(unit=unit).groupby("unit")[names].mean().astype(np.float64))
