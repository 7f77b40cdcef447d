"""What each attack gains on each metric over the honest cells that it started from, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from perturbdiff.adversaries.attacks import ATTACKS, HONEST, Attack
from perturbdiff.evaluation.evaluation_stage import CEILING
from perturbdiff.report.loading.metric_columns import Column, metric_columns
from perturbdiff.report.loading.results import Run, read_runs
from perturbdiff.report.sections.chapter_data import ChapterData
from perturbdiff.report.sections.focus_scores import values
from perturbdiff.report.sections.overview import verdict_of
from perturbdiff.report.sections.standing import gain, oriented
from perturbdiff.runtime import provenance, tabular

SHARE = 0.05
"""Share of the way from the honest score to the ceiling below which a gain is nothing to speak of."""
GAINS = (
    "attack", "base", "metric", "direction", "honest", "attacked", "gain", "low", "high", "n", "share", "wins",
)  # fmt: skip
VERDICTS = ("attack", "hope", "base", "level", "verdict", "wins", "findings")


def write(scores: Path, out: Path, refused: Mapping[str, str], *, force: bool = False) -> Path:
    """Write the tables of all attacks: gains.csv, adversaries.csv and, to be read, adversaries.txt.

    Parameters
    ----------
    scores
        Folder with the folders of scores.
    out
        Folder to write.
    refused
        Attacks that `evaluate` refused to score, and what it said.
    """
    folders = {name: scores / name for name in (CEILING, *HONEST, *ATTACKS) if name not in refused}
    with provenance.stage(
        "adversaries", out, config={"refused": dict(refused)}, inputs=folders, folder=True, force=force
    ) as stage:
        if not stage.skip:
            runs = {run.method: run for run in read_runs(list(folders.values()))}
            gained = pd.concat([_gains(attack, runs) for name, attack in ATTACKS.items() if name in runs])
            judged = pd.DataFrame(
                [_judged(attack, runs, gained, refused.get(name, "")) for name, attack in ATTACKS.items()],
                columns=pd.Index(VERDICTS),
            )
            tabular.write_csv(gained, stage.path / "gains.csv")
            tabular.write_csv(judged, stage.path / "adversaries.csv")
            (stage.path / "adversaries.txt").write_text(as_text(judged, gained), encoding="utf-8")
            stage.results["good"] = sorted(judged.loc[judged["level"] == "good", "attack"])
    return out


def _gains(attack: Attack, runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return a row per metric that has a better end."""
    run, base, ceiling = runs[attack.name], runs[attack.base], runs[CEILING]
    rows = []
    for metric in metric_columns([base]):
        if metric.direction == "none":
            continue
        found = gain(values(run, metric.name), values(base, metric.name), base.method, metric.direction)
        share = _share(found.value, base.score(metric.name)[0], ceiling.score(metric.name)[0], metric)
        wins = found.low > 0 and (math.isnan(share) or share >= SHARE)
        scores = (base.score(metric.name)[0], run.score(metric.name)[0])
        numbers = (*scores, found.value, found.low, found.high, found.n, share)
        rows.append((attack.name, attack.base, metric.name, metric.direction, *numbers, wins))
    return pd.DataFrame(rows, columns=pd.Index(GAINS))


def _share(gained: float, honest: float, ceiling: float, metric: Column) -> float:
    """Return how much of the way from the honest score to the ceiling was gained, NaN where there is no way to go."""
    way = oriented(ceiling, metric.direction) - oriented(honest, metric.direction)
    return gained / way if way > 0 else math.nan


def _judged(
    attack: Attack, runs: Mapping[str, Run], gained: pd.DataFrame, refused: str
) -> tuple[str, str, str, str, str, str, str]:
    """Return the row of an attack in the table of verdicts."""
    if refused:
        return attack.name, attack.hope, attack.base, "refused", refused, "", ""
    run = runs[attack.name]
    about = ChapterData("adversaries", [run, *(runs[n] for n in (*HONEST, CEILING))], {}, run, runs[attack.base])
    found = verdict_of(about)
    own = gained[(gained["attack"] == attack.name) & gained["wins"]]
    kinds = dict.fromkeys(str(f.get("kind")) for f in run.findings)
    return attack.name, attack.hope, attack.base, found.level, found.title, " ".join(own["metric"]), " ".join(kinds)


def as_text(judged: pd.DataFrame, gained: pd.DataFrame) -> str:
    """Return the tables as text for a terminal."""
    lines = []
    for row in judged.to_dict("records"):
        lines += [
            f"{row['attack']} (from {row['base'].replace('_', ' ')}): {row['hope']}",
            f"  verdict: {row['level']}. {row['verdict']}.",
            f"  gains on: {row['wins'].replace(' ', ', ') or 'nothing'}",
            f"  findings: {row['findings'].replace(' ', ', ') or 'none'}",
        ]
    good = judged.loc[judged["level"] == "good", "attack"]
    said = f"{len(good)} of {len(judged)} attacks are called good"
    return "\n".join([*lines, f"{said}: {', '.join(good)}." if len(good) else f"{said}.", ""])
