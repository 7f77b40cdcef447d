"""The stage `calibrate`: which metrics can tell good from bad predictions of a truth, and how predictable it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import Condition
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.calibration import predictability, separation, verdicts
from perturbdiff.evaluation.calibration.separation import Look, comparable, score_reference, thinned
from perturbdiff.evaluation.metrics.bounds import oriented
from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.metrics.differential import DEFINITIONS
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.readers import inputs
from perturbdiff.evaluation.readers.cells_by_condition import Cells
from perturbdiff.evaluation.readers.pairing import Pairing, held_out_conditions
from perturbdiff.evaluation.references import pair_reference
from perturbdiff.evaluation.scoring.aggregate import ALL_PERTURBATIONS
from perturbdiff.evaluation.scoring.intervals import bootstrap_mean
from perturbdiff.evaluation.scoring.scopes import Scope
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.files import existing

CONTROL, MEAN = "control", "perturbed_mean"
INTERPOLATED, DUPLICATE = "interpolated_duplicate", "technical_duplicate"
ORDER = (CONTROL, MEAN, INTERPOLATED, DUPLICATE)
"""References from worst to best."""
SPLITS = 3
"""How often the cells are halved anew: a single split moves the verdicts of metrics near a limit."""
SHARES = (0.5, 0.25)
"""Shares of the cells with which the first split is scored again."""
_DRAWS = 2000


def calibrate(
    truth: Path,
    out: Path,
    config: EvaluateConfig,
    *,
    split: Path | None = None,
    part: str = "test",
    dataset: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    force: bool = False,
) -> Path:
    """Score references of known order with every metric, and say which metrics tell them apart on this truth.

    Parameters
    ----------
    truth
        Store folder, or AnnData whose columns ``config`` names.
    out
        Folder to write: calibration.csv, predictability.csv and predictability.json. ``docs/calibration.md`` says what
        is in them.
    split, part
        Use the conditions of this part only; all of them without a split.
    dataset
        Name of the data set in the tables.
    seed
        Of the first halves (the next ones have the next seeds), of the cells drawn and of the intervals.
    threads
        As in `perturbdiff.evaluation.evaluate`.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a file is missing, the split has no condition of the truth in ``part``, or the definition is cell-eval2.
    """
    if config.definition not in DEFINITIONS:
        raise UserError(
            f"--definition {config.definition}: has anchors of its own; calibrate takes {listing(DEFINITIONS)}"
        )
    settings = inputs.settings_of(config, dataset=dataset, part=part)
    files = {"truth": Path(truth), **({"split": Path(split)} if split else {}), **inputs.files_of(config)}
    with provenance.stage(
        "calibrate", Path(out), config=settings, inputs=files, seed=seed, folder=True, force=force
    ) as stage:
        if not stage.skip:
            cells = inputs.open_truth(existing(files["truth"], "truth"), config)
            wanted = held_out_conditions(files["split"], part, cells) if split else list(cells.rows)
            work = _Calibration(cells, wanted, config, seed, threads)
            work.score()
            stage.results.update(_write(stage.path, work, dataset or cells.names["dataset"], config))
    return Path(out)


@dataclass
class _Calibration:
    """The references' scores, and what is read from them on the way."""

    cells: Cells
    wanted: list[Condition]
    config: EvaluateConfig
    seed: int
    threads: int | None

    @property
    def alone(self) -> bool:
        """Whether there is a single perturbation, so that there is no mean of the others."""
        return len({c.perturbation for c in self.cells.rows}) < 2

    def score(self) -> None:
        """Score all references with all cells, and those that have to be told apart with fewer."""
        self.scores: dict[tuple[str, float], list[pd.DataFrame]] = {}
        self.replicates: list[pd.DataFrame] = []
        self.with_mean: dict[str, float] = {}
        for split in range(SPLITS):
            for name in (CONTROL, DUPLICATE) if self.alone else ORDER:
                pairs = comparable(pair_reference(self.cells, self.wanted, name, seed=self.seed + split))
                look = {DUPLICATE: self._look_at_halves, MEAN: self._look_at_mean}.get(name)
                self._add(name, 1.0, pairs, None if split else look)
                for share in SHARES if not split else ():
                    self._add(name, share, thinned(pairs, share, seed=self.seed))
                if name == DUPLICATE and not split:
                    sizes = [len(pairs.real.rows[c]) + len(pairs.predicted.rows[c]) for c in pairs.conditions]
                    self.median_cells = float(np.median(sizes))

    def _add(self, name: str, share: float, pairs: Pairing, look: Look | None = None) -> None:
        table = score_reference(pairs, self.config, seed=self.seed, threads=self.threads, look=look)
        self.scores.setdefault((name, share), []).append(table)

    def _look_at_halves(self, scope: Scope, halves: Comparison) -> None:
        self.replicates.append(predictability.replication(scope, halves))

    def _look_at_mean(self, scope: Scope, comparison: Comparison) -> None:
        found = predictability.replication(scope, comparison)
        self.with_mean |= dict(zip(found["unit"], found["replicate_cosine"], strict=True))

    def values(self, metric: str, reference: str, share: float = 1.0) -> np.ndarray:
        """Return a metric's oriented values [splits, units], NaN where it has none."""
        known = METRICS[metric]
        units = sorted({unit for table in self.scores[DUPLICATE, 1.0] for unit in table.index})
        units = [unit for unit in units if (unit == ALL_PERTURBATIONS) != known.per_perturbation]
        if (tables := self.scores.get((reference, share))) is None:
            return np.full((len(self.scores[DUPLICATE, share]), len(units)), np.nan)
        rows = [
            table[metric].reindex(units) if metric in table else pd.Series(np.nan, units) for table in tables
        ]
        found = np.stack([row.to_numpy(np.float64) for row in rows])
        if known.low == -1.0 and reference != DUPLICATE:
            unchanged = np.isnan(found) & ~np.isnan(self.values(metric, DUPLICATE, share))
            found[unchanged] = 0.0  # a prediction without any change correlates with nothing
        return oriented(found, known.direction)

    def row(self, metric: str) -> dict[str, Any]:
        """Return what the table says of a metric."""
        values = {name: self.values(metric, name) for name in ORDER}
        negative = max((MEAN, CONTROL), key=lambda name: _level(values[name]))
        gains = separation.over_splits(values[DUPLICATE] - values[negative])
        low, high = (
            bootstrap_mean(gains, draws=_DRAWS, seed=self.seed) if len(gains) > 1 else (np.nan, np.nan)
        )
        against = {
            other: {s: self._effect(metric, other, s) for s in (1.0, *SHARES)}
            for other in (negative, INTERPOLATED)
        }
        evidence = verdicts.Evidence(
            metric,
            len(gains),
            separation.dynamic_range(values[DUPLICATE], values[negative], separation.perfect(metric)),
            separation.discrimination(values[DUPLICATE], values[CONTROL if self.alone else MEAN]),
            float(gains.mean()) if len(gains) else float("nan"),
            low,
            _WORDS[negative],
            _WORDS[CONTROL if self.alone else MEAN],
        )
        verdict, reason = verdicts.judge(evidence)
        pairs = zip(ORDER[1:], ORDER[:-1], strict=True)
        needed = {
            other: separation.cells_needed(effects, len(gains), self.median_cells)
            for other, effects in against.items()
        }
        return {
            "metric": metric,
            "dynamic_range": evidence.dynamic_range,
            "discrimination": evidence.discrimination,
            "cells_needed": needed[negative],
            "perturbations_needed": separation.perturbations_needed(against[negative][1.0]),
            "verdict": verdict,
            "reason": reason,
            "negative": negative,
            "units": evidence.units,
            "gain": evidence.gain,
            "gain_low": low,
            "gain_high": high,
            **{f"{a}_over_{b}": separation.discrimination(values[a], values[b]) for a, b in pairs},
            "cells_needed_interpolated": needed[INTERPOLATED],
            "perturbations_needed_interpolated": separation.perturbations_needed(against[INTERPOLATED][1.0]),
            **{name: self._mean(metric, name) for name in ORDER},
        }

    def _effect(self, metric: str, other: str, share: float) -> float:
        """Return the mean effect size of the splits."""
        gaps = self.values(metric, DUPLICATE, share) - self.values(metric, other, share)
        effects = [separation.effect_size(row[np.isfinite(row)]) for row in gaps]
        return float(np.mean(effects))

    def _mean(self, metric: str, reference: str) -> float:
        tables = self.scores.get((reference, 1.0), [])
        found = [float(table[metric].mean()) for table in tables if metric in table]
        return float(np.mean(found)) if found else float("nan")


def _level(values: np.ndarray) -> float:
    """Return the mean over splits and perturbations, the lowest of all if there is no value."""
    known = separation.over_splits(values)
    return float(known.mean()) if len(known) else -np.inf


_WORDS = {MEAN: "the mean", CONTROL: "the controls"}


def _write(folder: Path, work: _Calibration, dataset: str, config: EvaluateConfig) -> dict[str, Any]:
    """Write all files; return the summary."""
    scored = {m for tables in work.scores.values() for table in tables for m in table.columns}
    names = [n for n, m in METRICS.items() if n in scored and m.direction != "none"]
    table = pd.DataFrame([work.row(name) for name in names]).assign(definition=config.definition)
    tabular.write_csv(table, folder / verdicts.TABLE)
    across = predictability.cross_context(work.cells, work.wanted)
    units = predictability.joined(
        pd.concat(work.replicates, ignore_index=True), across, pd.Series(work.with_mean)
    )
    tabular.write_csv(units, folder / predictability.TABLE)
    found = predictability.summary(units) | {"best": _best(table), "cells": work.median_cells}
    record = json.loads(json.dumps(found, default=float), parse_constant=lambda _: None)
    (folder / verdicts.PREDICTABILITY).write_text(provenance.as_json(record))
    counts = {level: int((table["verdict"] == level).sum()) for level in ("keep", "weak", "useless")}
    return {"dataset": dataset, "definition": config.definition, "verdicts": counts}


def _best(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return for each metric the best mean score of a reference: what any method can be expected to reach."""
    best = {}
    for row in table.to_dict("records"):
        direction = METRICS[row["metric"]].direction
        known = {name: oriented(float(row[name]), direction) for name in ORDER if np.isfinite(row[name])}
        if known:
            name = max(known, key=lambda one: known[one])
            best[row["metric"]] = {"reference": name, "score": row[name]}
    return best
