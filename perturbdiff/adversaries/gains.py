"""What each attack gains on each metric over the honest cells that it started from, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from perturbdiff.adversaries.attacks import ATTACKS, Attack
from perturbdiff.evaluation.cell_eval2.scores import SCORE
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.overview import verdict_of
from perturbdiff.reporting.sections.reference_sections import is_scaled, scores_of
from perturbdiff.reporting.sections.standing import oriented, standing
from perturbdiff.reporting.sections.verdict import FEWEST
from perturbdiff.runtime import provenance, tabular

SHARE = 0.05
"""Share of the way from the honest score to the ceiling below which a gain is nothing to speak of."""
GAINS = (
    "attack", "base", "metric", "direction", "honest", "attacked", "gain", "low", "high", "n", "share",
    "chance", "over_chance", "gains", "beats", "default",
)  # fmt: skip
VERDICTS = ("attack", "hope", "base", "level", "verdict", "gains", "beats", "findings")


def write(
    scores: Path, out: Path, refused: Mapping[str, str], *, references: Collection[str], force: bool = False
) -> Path:
    """Write the tables of all attacks: gains.csv, adversaries.csv and, to be read, adversaries.txt.

    Parameters
    ----------
    scores
        Folder with the folders of scores.
    out
        Folder to write.
    refused
        Attacks that `evaluate` refused to score, and what it said.
    references
        Names of the folders that every attack stands beside.
    """
    folders = {name: scores / name for name in (*references, *ATTACKS) if name not in refused}
    with provenance.stage(
        "adversaries", out, config={"refused": dict(refused)}, inputs=folders, folder=True, force=force
    ) as stage:
        if not stage.skip:
            runs = {run.method: run for run in read_runs(list(folders.values()))}
            beside = [runs[name] for name in references]
            scored = {
                name: ChapterData("adversaries", [runs[name], *beside], {}, runs[name], runs[attack.base])
                for name, attack in ATTACKS.items()
                if name in runs
            }
            gained = pd.concat(
                [_rows(ATTACKS[name], about) for name, about in scored.items()], ignore_index=True
            )
            rows = [
                _judged(attack, scored[name], gained)
                if name in scored
                else (name, attack.hope, attack.base, "refused", refused[name], "", "", "")
                for name, attack in ATTACKS.items()
            ]
            judged = pd.DataFrame(rows, columns=pd.Index(VERDICTS))
            tabular.write_csv(gained, stage.path / "gains.csv")
            tabular.write_csv(judged, stage.path / "adversaries.csv")
            default = default_of(next(iter(scored.values()))) if scored else []
            by_ends = any(is_scaled(about) for about in scored.values())
            text = as_text(judged, default, "the mean response" if by_ends else "chance")
            (stage.path / "adversaries.txt").write_text(text, encoding="utf-8")
            stage.results["good"] = sorted(judged.loc[judged["level"] == "good", "attack"])
            stage.results["default"] = default
            stage.results["beaten"] = sorted(_beaten(judged, default))
    return out


def default_of(about: ChapterData) -> list[str]:
    """Return the metrics that the calibration lets count for a verdict on these data; of cell-eval2 its score."""
    if is_scaled(about):
        return [SCORE] if scores_of(about.focus)["scaled"].notna().get(SCORE, False) else []
    return [str(name) for name in about.focus.calibration.get("default", [])]


def _beaten(judged: pd.DataFrame, default: Collection[str]) -> set[str]:
    """Return the metrics of the default score that any attack beats."""
    return {name for names in judged["beats"] for name in names.split()} & set(default)


def _rows(attack: Attack, about: ChapterData) -> pd.DataFrame:
    """Return a row per metric that has a better end."""
    rows = _scaled_gains(attack, about) if is_scaled(about) else _gains(attack, about)
    return pd.DataFrame(rows, columns=pd.Index(GAINS))


def _scaled_gains(attack: Attack, about: ChapterData) -> list[tuple[Any, ...]]:
    """Return what an attack gains between the mean response (0) and a replicate (1).

    The interval is that of the attack's scaled score. A metric is beaten if it lies above the mean response.
    """
    base = scores_of(next(r for r in about.runs if r.method == attack.base))["scaled"].to_dict()
    rows = []
    for name, row in scores_of(about.focus).dropna(subset="scaled").iterrows():
        honest, attacked, low = float(base[name]), float(row["scaled"]), float(row["scaled_low"])
        share = (attacked - honest) / (1 - honest) if honest < 1 else math.nan
        more, above = share >= SHARE, "better" if low > 0 else "level"
        ends = (low, float(row["scaled_high"]), about.focus.summary["num_perturbations"], share)
        judged = (0.0, above, more, more and low > 0, name == SCORE)
        rows.append(
            (attack.name, attack.base, name, "higher", honest, attacked, attacked - honest, *ends, *judged)
        )
    return rows


def _gains(attack: Attack, about: ChapterData) -> list[tuple[Any, ...]]:
    """Return what an attack gains over honest cells, paired by perturbation or condition."""
    rows = []
    for metric in about.every:
        stands = standing(about, metric)
        over = next((g for g in stands.gains if g.over == attack.base), None)
        if metric.direction == "none" or over is None:
            continue
        honest = next(r for r in about.runs if r.method == attack.base).score(metric.name)[0]
        share = _share(over.value, honest, stands.ceiling.value, metric)
        more = over.n >= FEWEST and over.low > 0 and (math.isnan(share) or share >= SHARE)
        knows = stands.over_chance
        scores = (honest, stands.ours.value, over.value, over.low, over.high, over.n, share)
        beats = more and knows in ("better", "unknown") and not stands.silent
        rows.append(
            (
                attack.name,
                attack.base,
                metric.name,
                metric.direction,
                *scores,
                stands.chance,
                knows,
                more,
                beats,
                metric.name in default_of(about),
            )
        )
    return rows


def _share(gained: float, honest: float, ceiling: float, metric: Column) -> float:
    """Return how much of the way from the honest score to the ceiling was gained, NaN where there is no way to go."""
    way = oriented(ceiling, metric.direction) - oriented(honest, metric.direction)
    return gained / way if way > 0 else math.nan


def _judged(attack: Attack, about: ChapterData, gained: pd.DataFrame) -> tuple[str, ...]:
    """Return the row of an attack in the table of verdicts."""
    found = verdict_of(about)
    own = gained[gained["attack"] == attack.name]
    names = (" ".join(own.loc[own[column], "metric"]) for column in ("gains", "beats"))
    kinds = dict.fromkeys(str(f.get("kind")) for f in about.focus.findings)
    return attack.name, attack.hope, attack.base, found.level, found.title, *names, " ".join(kinds)


def as_text(judged: pd.DataFrame, default: Collection[str], least: str) -> str:
    """Return the table of verdicts, and which metrics of the default score are beaten, as text for a terminal.

    ``least`` is what a metric has to be above to be beaten.
    """
    lines = []
    for row in judged.to_dict("records"):
        lines += [
            f"{row['attack']} (from {row['base'].replace('_', ' ')}): {row['hope']}",
            f"  verdict: {row['level']}. {row['verdict']}",
            f"  higher than honest: {row['gains'].replace(' ', ', ') or 'nothing'}",
            f"  and better than {least}: {row['beats'].replace(' ', ', ') or 'nothing'}",
            f"  findings: {row['findings'].replace(' ', ', ') or 'none'}",
        ]
    good = judged.loc[judged["level"] == "good", "attack"]
    beaten = sorted(_beaten(judged, default))
    if default:
        told = f"beaten: {', '.join(beaten)}" if beaten else f"none is beaten by more than {least}"
        lines.append(f"default score on these data: {', '.join(default)}; {told}.")
    else:
        lines.append("these data cannot tell, so that there is no default score.")
    said = f"{len(good)} of {len(judged)} attacks are called good"
    return "\n".join([*lines, f"{said}: {', '.join(good)}." if len(good) else f"{said}.", ""])
