"""The verdict on each metric of a data set: keep, weak or useless, by fixed rules. docs/calibration.md states them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.runtime import provenance, tabular, untrusted
from perturbdiff.runtime.errors import UserError

Level = Literal["keep", "weak", "useless"]

TABLE, PREDICTABILITY = "calibration.csv", "predictability.json"
FEWEST = 5
"""Perturbations below which nothing is called good or bad."""
RANGE = 0.1
"""A replicate gets at least so far from the uninformed reference to a perfect score in a metric that is kept."""
ORDER = 0.75
"""A metric that is kept puts the replicate above the mean for at least so many of the perturbations."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "populations": ("energy_distance",),
    "changes": ("PDCorr", "PDCorr_perturbed", "R2_weighted"),
    "discrimination": ("PDS_cos", "PDS_L1", "centroid_accuracy"),
    "de_genes": ("DEOver_10", "DEOver"),
    "de_ranking": ("AUPRC",),
    "direction": ("DirAgr", "DirPrec"),
}
"""What a good prediction gets right, and the metrics that ask for it in order of preference."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a metric before the verdict.

    Attributes
    ----------
    metric
        Name in the catalogue.
    units
        On how many perturbations the duplicate and the negative reference both have a value.
    dynamic_range
        See `separation.dynamic_range`.
    discrimination
        Share of the perturbations on which the technical duplicate scores above the mean of the others.
    gain, low
        Mean advantage of the duplicate over the negative reference, and the lower end of its 95 % interval.
    negative, mean
        Short names of the stronger uninformed reference and of the mean, for the sentence.
    """

    metric: str
    units: int
    dynamic_range: float
    discrimination: float
    gain: float
    low: float
    negative: str = "the controls"
    mean: str = "the mean"


def judge(found: Evidence) -> tuple[Level, str]:
    """Return the verdict and its reason, a short sentence without a full stop; the first rule that applies names it."""
    metric = METRICS[found.metric]
    if not metric.per_perturbation:
        return "weak", "one number for all, so that its noise is unknown"
    if found.units == 0:
        return "useless", "no perturbation has a value for both references"
    if found.units < FEWEST:
        return "weak", f"only {found.units} of {FEWEST} needed perturbations have a value"
    if metric.direction == "one":
        return "useless", "asks whether cells look real, which cells of any perturbation do"
    if not found.gain > 0:
        return "useless", f"a replicate scores no better than {found.negative}"
    if not found.low > 0:
        return "useless", f"a replicate beats {found.negative} only within the noise"
    return _strength(found)


def _strength(found: Evidence) -> tuple[Level, str]:
    """Return whether a metric that tells a replicate from the mean does so clearly enough."""
    share = f"{100 * found.discrimination:.0f} %"
    if found.discrimination < ORDER:
        return "weak", f"a replicate beats {found.mean} on only {share}"
    if found.dynamic_range < RANGE:
        used = f"{100 * found.dynamic_range:.0f} %"
        return "weak", f"a replicate is only {used} of the way from {found.negative} to perfect"
    return "keep", f"a replicate beats {found.mean} on {share} of the perturbations"


@dataclass(frozen=True)
class Calibration:
    """A table that `calibrate` wrote.

    Attributes
    ----------
    table
        A row per metric: at least metric, verdict and reason.
    """

    table: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> Calibration:
        """Read the table in a folder of `calibrate`.

        Raises
        ------
        UserError
            If there is none, or it is none of ours.
        """
        path = Path(folder) / TABLE
        if not path.is_file():
            raise UserError(f"{folder}: holds no {TABLE}; give a folder that perturbdiff calibrate wrote")
        table = tabular.read_csv(path, "make it again with perturbdiff calibrate")
        if missing := sorted({"metric", "verdict", "reason"} - set(table.columns)):
            raise UserError(f"{path}: has no column '{missing[0]}'; make it again with perturbdiff calibrate")
        return cls(table)

    @property
    def verdicts(self) -> dict[str, tuple[str, str]]:
        """Return verdict and reason of each metric."""
        rows = zip(*(self.table[c].astype(str) for c in ("metric", "verdict", "reason")), strict=True)
        return {name: (verdict, reason) for name, verdict, reason in rows}


def facts(folder: Path, truth: str, definition: str) -> dict[str, Any]:
    """Return what an evaluation keeps of a calibration.

    Parameters
    ----------
    folder
        As `Calibration.read` takes it.
    truth
        SHA-256 of the truth of the evaluation.
    definition
        Definition of its metrics.

    Returns
    -------
    dict
        ``metrics`` (verdict and reason of each), ``default`` (see `default_metrics`) and ``predictability``.

    Raises
    ------
    UserError
        If the folder is none of ours, or of another truth or definition.
    """
    calibration = Calibration.read(folder)
    manifest = provenance.read_manifest(folder) or {}
    if manifest.get("inputs", {}).get("truth", {}).get("sha256") != truth:
        raise UserError(f"{folder}: is the calibration of another truth; make one of this truth")
    if (theirs := manifest.get("results", {}).get("definition")) != definition:
        raise UserError(
            f"{folder}: is a calibration of the metrics of {theirs}, not of {definition}; make one of these"
        )
    predictability = untrusted.read(Path(folder) / PREDICTABILITY, "JSON")
    return {
        "metrics": {name: {"verdict": v, "reason": r} for name, (v, r) in calibration.verdicts.items()},
        "default": default_metrics(calibration),
        "predictability": predictability,
    }


def columns(known: Mapping[str, Mapping[str, str]], metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return what stands beside metrics in ``aggregate.csv``; empty for one that was not calibrated.

    Parameters
    ----------
    known
        ``metrics`` of `facts`.
    metrics
        Names, as they stand in the table.
    """
    found = [known.get(name, {}) for name in metrics]
    return {
        "calibration": [one.get("verdict", "") for one in found],
        "calibration_reason": [one.get("reason", "") for one in found],
    }


def default_metrics(calibration: Calibration | Mapping[str, Any] | pd.DataFrame) -> list[str]:
    """Return the metrics that count for a verdict on this data set.

    For each of the `QUESTIONS` it is the first metric that is to be kept. A question that no metric can tell here
    is left out.

    Parameters
    ----------
    calibration
        A `Calibration`, its table, or a mapping of metric to verdict.
    """
    if isinstance(calibration, pd.DataFrame):
        calibration = Calibration(calibration)
    verdicts = (
        {name: verdict for name, (verdict, _) in calibration.verdicts.items()}
        if isinstance(calibration, Calibration)
        else dict(calibration)
    )
    kept = (next((n for n in names if verdicts.get(n) == "keep"), None) for names in QUESTIONS.values())
    return [name for name in kept if name is not None]
