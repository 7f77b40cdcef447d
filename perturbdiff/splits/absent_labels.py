"""What a split names although the data lack it, and what cannot be held out: all of it, not the first alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pandas as pd

from perturbdiff.runtime.errors import UserError, listing, nearest

if TYPE_CHECKING:
    from perturbdiff.config.settings import SplitConfig
    from perturbdiff.splits.split_rules import Specification

logger = logging.getLogger(__name__)

Missing = Literal["error", "warn"]

_MOST = 1000
"""Labels that one line names."""
_COMPARED = 10
"""Labels for which the most similar one is looked for, which takes time; the others are only stripped of blanks."""


@dataclass(frozen=True)
class Faults:
    """What is wrong with a split, a sentence each.

    Attributes
    ----------
    wrong
        What has to be mended.
    absent
        What the data lack; ``split.missing=warn`` leaves it out.
    """

    wrong: tuple[str, ...]
    absent: tuple[str, ...]

    def refuse(self, missing: Missing) -> None:
        """Raise one `UserError` with everything; what is absent is only logged if ``missing`` is ``warn``."""
        if missing == "warn" and not self.wrong:
            for text in self.absent:
                logger.warning("%s; left out (split.missing=warn)", text)
            return
        remedy = "correct these labels, or leave them out with split.missing=warn"
        several = [*self.wrong, *self.absent]
        if len(several) == 1:
            raise UserError(f"{several[0]}; {remedy}" if self.absent else several[0])
        if several:
            more = f"; {remedy}" if self.absent else ""
            raise UserError(f"the split does not fit the data in {len(several)} places{more}:", several)


def faults_of_toml(table: pd.DataFrame, spec: Specification) -> Faults:
    """Compare a split in the format of STATE with the conditions.

    Parameters
    ----------
    table
        Conditions, with the columns ``context``, ``perturbation``, ``is_control``, ``cell_type`` and ``batch``.
    spec
        The file.
    """
    where, wrong, absent = str(spec.path), [], _absent_contexts(table, spec.contexts(), str(spec.path))
    present, with_controls = _contexts(table)
    held = list(spec.zeroshot)
    for context, lists in spec.fewshot.items():
        here = pd.DataFrame(table[table["context"] == context])
        if not len(here):
            continue
        known = sorted(set(here["perturbation"][~here["is_control"]]))
        controls = set(here["perturbation"][here["is_control"]])
        wanted = [label for labels in lists.values() for label in labels]
        wrong += [
            f"{where}: context '{context}': '{label}' is the control, which is never held out"
            for label in wanted
            if label in controls
        ]
        absent += absent_perturbations(f"{where}: context '{context}'", wanted, [*known, *controls])
        held += [context] if set(wanted) & set(known) else []
    wrong += [
        f"{where}: held-out context '{context}' has no control cells; leave it out"
        for context in held
        if context in present and context not in with_controls
    ]
    return Faults(tuple(wrong), tuple(absent))


def faults_of_rule(table: pd.DataFrame, rule: SplitConfig) -> Faults:
    """Compare the names in a rule with the conditions; see `faults_of_toml`."""
    present, with_controls = _contexts(table)
    wrong, absent = [], []
    for key in ("held_out", "valid_contexts"):
        names = list(dict.fromkeys(getattr(rule, key)))
        absent += _absent_contexts(table, names, f"split.{key}", rule.context_column)
        wrong += [
            f"split.{key}: context '{name}' has no control cells, so nothing can be predicted there; hold out another"
            for name in names
            if name in present and name not in with_controls
        ]
        wrong += _none_left(f"split.{key}", names, present, rule.missing)
    known = sorted(set(table["perturbation"][~table["is_control"]]))
    absent += absent_perturbations("split.perturbations", rule.perturbations, known)
    wrong += _none_left("split.perturbations", rule.perturbations, known, rule.missing)
    return Faults(tuple(wrong), tuple(absent))


def _none_left(where: str, names: Sequence[str], known: Iterable[str], missing: Missing) -> list[str]:
    """Tell that leaving out what the data lack would leave nothing, which stands for another rule."""
    if missing == "error" or not names or set(names) & set(known):
        return []
    return [f"{where}: none of {listing(names)} has cells, so nothing would be left of it; correct the names"]


def _contexts(table: pd.DataFrame) -> tuple[list[str], set[str]]:
    """Return the contexts, and those with control cells."""
    return sorted(set(table["context"])), set(table["context"][table["is_control"].to_numpy(bool)])


def _absent_contexts(table: pd.DataFrame, named: Iterable[str], where: str, column: str = "") -> list[str]:
    present = sorted(set(table["context"]))
    others = {label for name in ("cell_type", "batch") if name in table for label in table[name]} - set(
        present
    )
    found = []
    for context in dict.fromkeys(named):
        if context in present:
            continue
        elsewhere = (
            " (it is a value of another column: set split.context_column)" if context in others else ""
        )
        hint = nearest(context, present) or f"; contexts are {listing(present)}"
        inside = f" in '{column}'" if column else ""
        found.append(f"{where}: no cells of context '{context}'{inside}{elsewhere}{hint}")
    return found


def absent_perturbations(where: str, wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return a sentence with all perturbations of ``wanted`` that are not ``known``, or nothing.

    A label that differs from a known one only by blanks or capitals is told together with it.
    """
    present = set(known)
    absent = [label for label in dict.fromkeys(wanted) if label not in present]
    if not absent:
        return []
    stripped = {_plain(label): label for label in known}
    meant = [stripped.get(_plain(label)) for label in absent]
    names = [
        f"'{label}' (did you mean '{other}')"
        if other
        else f"'{label}'{_alike(label, known) if k < _COMPARED else ''}"
        for k, (label, other) in enumerate(zip(absent, meant, strict=True))
    ]
    number = f"{len(absent)} of {len(set(wanted))} held-out perturbations"
    return [f"{where}: {number} have no cells: {listing(names, _MOST)}"]


def _plain(label: str) -> str:
    """Return a label without blanks, in lower case."""
    return "".join(label.split()).lower()


def _alike(label: str, known: Sequence[str]) -> str:
    """Return the most similar label in brackets, or an empty text."""
    hint = nearest(label, known)
    return f" ({hint.removeprefix(', ').removesuffix('?')})" if hint else ""
