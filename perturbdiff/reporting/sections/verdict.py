"""The answer on the first screen: whether a model is good, by fixed rules on the numbers of a few metrics.

Nothing here reads files. docs/report.md states the rules for readers of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perturbdiff.reporting.loading.metric_columns import CORE, ENERGY, Column, skill
from perturbdiff.reporting.sections.standing import Relation, Standing

Level = Literal["good", "mixed", "level", "poor", "unknown"]

FEWEST = 5  # perturbations below which no verdict is given
ENOUGH = 10  # perturbations below which intervals are too narrow
_BROKEN = {
    "no change predicted": "Predicts no change at all",
    "hardly any change predicted": "Predicts hardly any change",
    "collapsed: nearly one answer for all": "Collapsed: nearly the same answer for every perturbation",
}
_LISTED = 3  # skills named in a sentence, more are counted


@dataclass(frozen=True)
class Verdict:
    """What the rules say.

    Attributes
    ----------
    level, title
        How good, and the same in a few words.
    sentence
        The key metrics counted.
    better, near, tells
        Answers to the three questions: is it better than a baseline, is it near a replicate, can this data set tell.
    """

    level: Level
    title: str
    sentence: str = ""
    better: str = ""
    near: str = ""
    tells: str = ""

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """Return the three questions with their answers."""
        return (
            ("Better than a baseline?", self.better),
            ("Near a replicate?", self.near),
            ("Can this data set tell?", self.tells),
        )


def judge(standings: Iterable[Standing], perturbations: int, collapse: str = "") -> Verdict:
    """Return the verdict. The first rule that applies names it.

    Parameters
    ----------
    standings
        Standings in the key metrics. The rules use those of `CORE`, and the sentences use all.
    perturbations
        How many perturbations were scored.
    collapse
        What the collapse check says, if it was made.
    """
    every = [s for s in standings if not math.isnan(s.ours.value)]
    core = [s for s in every if s.metric.name in CORE]
    level, title = _ruled(core, perturbations, collapse)
    heard = [s for s in every if not s.silent and s.metric.direction in ("higher", "lower")]
    return Verdict(
        level,
        title,
        tally(every),
        _better(heard, collapse),
        _near(heard),
        _tells(every, perturbations),
    )


def _ruled(core: Sequence[Standing], perturbations: int, collapse: str) -> tuple[Level, str]:
    if not core:
        return "unknown", "Cannot be judged: no metric of whole populations or mean changes is defined"
    if perturbations < FEWEST:
        count = f"{perturbations} perturbation{'s' * (perturbations != 1)}"
        return "unknown", f"Cannot be judged: {count}, and at least {FEWEST} are needed"
    if collapse in _BROKEN:
        return "poor", _BROKEN[collapse]
    heard = [s for s in core if not s.silent]
    if not heard:
        return (
            "unknown",
            f"This test set cannot tell: {_names(core)} {'is' if len(core) == 1 else 'are'} not reliable here",
        )
    if chance := [s for s in heard if s.over_chance in ("level", "worse")]:
        return "poor", f"No better than chance in {_names(chance)}"
    if not any(s.gains for s in heard):
        return "unknown", "Not compared: the report holds no baseline"
    return _against_baselines(heard)


def incomplete(judged: Verdict, left_out: int, every: int) -> Verdict:
    """Take praise back from a method that leaves conditions out: it may have chosen those it is good at.

    Parameters
    ----------
    left_out, every
        Conditions that the method leaves out, of all that its rivals are scored on.
    """
    if not left_out or judged.level not in ("good", "mixed"):
        return judged
    title = f"Cannot be judged: {left_out} of the {every} conditions that others are scored on are left out"
    return replace(judged, level="unknown", title=title)


def _against_baselines(core: Sequence[Standing]) -> tuple[Level, str]:
    by = {r: [s for s in core if s.relation == r] for r in ("better", "level", "worse", "unknown")}
    if len(by["better"]) == len(core):
        if len(core) == 1:
            return (
                "mixed",
                f"Better than every baseline in {_names(core)}, the only one of two metrics that tells",
            )
        return "good", f"Better than every baseline in {_names(core)}"
    parts = []
    if by["better"]:
        parts.append(f"better than every baseline in {_names(by['better'])}")
    if by["worse"]:
        parts.append(f"worse than {_rivals(by['worse'])} in {_names(by['worse'])}")
    if by["level"]:
        parts.append(f"no clear difference from {_rivals(by['level'])} in {_names(by['level'])}")
    if by["unknown"]:
        parts.append(f"no interval for {_names(by['unknown'])}")
    level: Level = (
        "mixed" if by["better"] else "poor" if by["worse"] else "level" if by["level"] else "unknown"
    )
    return level, capital(", ".join(parts))


def _better(heard: Sequence[Standing], collapse: str) -> str:
    """Say at what the model beats every baseline, and at what it is no better than chance or than a baseline."""
    better = [s for s in heard if s.relation == "better"]
    chance = [s for s in heard if s.over_chance in ("level", "worse")]
    rest = [s for s in heard if s not in chance]
    said = [f"{_BROKEN[collapse]}."] if collapse in _BROKEN else []
    if chance:
        said.append(f"No better than chance at {_skills(chance)}.")
    if worse := [s for s in rest if s.relation == "worse"]:
        said.append(f"Worse than {_rivals(worse)} at {_skills(worse)}.")
    if level := [s for s in rest if s.relation == "level"]:
        said.append(f"No clear difference from {_rivals(level)} at {_skills(level)}.")
    if better:
        where = f"{'Partly' if said else 'Yes'}: better than every baseline at {_skills(better)}."
        return " ".join([where, *said])
    if any(s.gains for s in heard):
        return " ".join(["No.", *said])
    if above := [s for s in heard if s.over_chance == "better"]:
        said.append(f"It is better than chance at {_skills(above)}.")
    return " ".join(["Unknown: no baseline stands beside it." if heard else "Unknown.", *said])


def _near(heard: Sequence[Standing]) -> str:
    """Say where the model is as good as half of the real cells, and how far it is from them elsewhere."""
    known = [s for s in heard if s.beside_replicate != "unknown"]
    if not known:
        return "Unknown, because there is no ceiling." if heard else "Unknown."
    near = [s for s in known if s.beside_replicate == "level"]
    far = [s for s in known if s.beside_replicate == "worse"]
    if not far:
        return f"Yes: no clear gap to a replicate at {_skills(near)}."
    shares = [f"{_percent(s.position)} at {skill(s.metric)}" for s in far if not math.isnan(s.position)]
    way = f"Of the way from chance to a replicate it goes {_listed(shares[:_LISTED])}." if shares else ""
    if near:
        return f"Partly: at {_skills(near)}, not at {_skills(far)}. {way}".strip()
    return f"No: clearly below a replicate at {_skills(far)}. {way}".strip()


def _percent(share: float) -> str:
    return f"{round(100 * share)} %".replace("-", "−")


def _tells(every: Sequence[Standing], perturbations: int) -> str:
    """Say which metrics mean something on this data set, and what weakens the rest."""
    ranked = [s for s in every if s.metric.direction in ("higher", "lower")]
    kept, silent = [s for s in ranked if s.worth == "keep"], [s for s in ranked if s.silent]
    if kept:
        lead = "Partly" if silent else "Yes"
        parts = [f"{lead}: a replicate is clearly above the mean response at {_skills(kept)}"]
    else:
        parts = ["No: no key metric puts a replicate clearly above the mean response"] if silent else []
    if kept and silent:
        parts.append(f"It cannot tell at {_skills(silent)}")
    if not kept and not silent:
        parts.append("Unknown, because the data were not calibrated (perturbdiff calibrate)")
    if perturbations < ENOUGH:
        parts.append(
            f"Intervals over {perturbations} perturbation{'s' * (perturbations != 1)} are too narrow"
        )
    return f"{'. '.join(parts)}."


def _skills(standings: Sequence[Standing]) -> str:
    """Name what the metrics test: three of them, of more the first two and the number of the others."""
    names = [skill(s.metric) for s in standings]
    if len(names) <= _LISTED:
        return _listed(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} other key metrics"


def _names(standings: Sequence[Standing]) -> str:
    return _listed([spoken(s.metric) for s in standings])


def spoken(metric: Column) -> str:
    """Return a metric's name within a sentence."""
    return "energy distance" if metric.name == ENERGY else metric.label


def _rivals(standings: Sequence[Standing]) -> str:
    """Name the strongest rival of each metric, two at most. The table has the others."""
    return _listed(list(dict.fromkeys(s.rivals[0] for s in standings))[:2])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def tally(standings: Sequence[Standing]) -> str:
    """Count the key metrics that this test set can tell by relation, in a sentence. Empty without a baseline."""
    ranked = [s for s in standings if s.metric.direction in ("higher", "lower") and not s.silent]
    known = [s for s in ranked if s.gains and s.relation != "unknown"]
    if not known:
        return ""
    words: dict[Relation, str] = {
        "better": "better than every baseline on",
        "level": "no clear difference from the strongest on",
        "worse": "worse than one on",
    }
    counts = [(word, sum(s.relation == relation for s in known)) for relation, word in words.items()]
    said = ", ".join(f"{word} {'all' if n == len(known) else n}" for word, n in counts if n)
    return f"Of {len(known)} key metrics: {said}."


def capital(text: str) -> str:
    """Return a text with its first letter as a capital."""
    return text[:1].upper() + text[1:]
