"""Whether what a split holds out has cells: every label that has none, not the first alone."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.config.settings import Config
from perturbdiff.inspection.findings import Findings
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.splits.split_rules import Specification, by_rule, by_toml

_MOST = 1000
"""Labels that one line names."""
_COMPARED = 10
"""Labels for which the most similar one is looked for, which takes time; the others are only stripped of blanks."""


def check_split(
    table: pd.DataFrame, config: Config, toml: Specification | None, seed: int, found: Findings
) -> np.ndarray | None:
    """Tell what a split would fail on. Return the part of each condition (object [n]) if it would not.

    Parameters
    ----------
    table
        Conditions, with the column ``context``.
    config
        Its section ``split`` is used where there is no ``toml``.
    toml
        Split in the format of STATE, or None.
    seed
        Seed of the split.
    found
        Receives all that is wrong.
    """
    before = len(found.problems)
    if toml is None:
        _check_rule(table, config, found)
    else:
        _check_toml(table, toml, found)
    if len(found.problems) > before:
        return None
    if (
        toml is None
        and config.split.num_held_out
        and config.split.choose == "pca"
        and not config.split.held_out
    ):
        found.fact("the contexts to hold out are chosen by PCA when there is a store")
        return None
    try:
        return by_toml(table, toml) if toml else by_rule(table, config.split, seed, _no_profiles)[0]
    except UserError as error:
        found.problem(str(error))
        return None


def _no_profiles(_: object) -> np.ndarray:
    raise UserError("split.choose=pca needs a store")


def _check_toml(table: pd.DataFrame, toml: Specification, found: Findings) -> None:
    held = {*toml.zeroshot, *toml.fewshot}
    _check_contexts(table, toml.contexts(), held, str(toml.path), found)
    for context, lists in toml.fewshot.items():
        here = pd.DataFrame(table[table["context"] == context])
        if not len(here):
            continue
        known = sorted(set(here["perturbation"][~here["is_control"]]))
        controls = set(here["perturbation"][here["is_control"]])
        wanted = [label for labels in lists.values() for label in labels]
        for label in (label for label in wanted if label in controls):
            found.problem(
                f"{toml.path}: context '{context}': '{label}' is the control, which is never held out"
            )
        _tell_absent(f"{toml.path}: context '{context}'", wanted, [*known, *controls], found)


def _check_rule(table: pd.DataFrame, config: Config, found: Findings) -> None:
    rule = config.split
    _check_contexts(
        table,
        [*rule.held_out, *rule.valid_contexts],
        {*rule.held_out, *rule.valid_contexts},
        "split.held_out",
        found,
    )
    known = sorted(set(table["perturbation"][~table["is_control"]]))
    _tell_absent("split.perturbations", list(rule.perturbations), known, found)


def _check_contexts(
    table: pd.DataFrame, named: list[str], held: set[str], where: str, found: Findings
) -> None:
    present = sorted(set(table["context"]))
    with_controls = set(table["context"][table["is_control"]])
    others = {label for name in ("cell_type", "batch") for label in table[name]} - set(present)
    for context in dict.fromkeys(named):
        if context not in present:
            elsewhere = (
                " (it is a label of another column: set split.context_column)" if context in others else ""
            )
            hint = nearest(context, present) or f"; contexts are {listing(present)}"
            found.problem(f"{where}: no cells of context '{context}'{elsewhere}{hint}")
        elif context in held and context not in with_controls:
            found.problem(f"{where}: held-out context '{context}' has no control cells; leave it out")


def _tell_absent(where: str, wanted: list[str], known: list[str], found: Findings) -> None:
    present = set(known)
    absent = [label for label in dict.fromkeys(wanted) if label not in present]
    if absent:
        stripped = {_plain(label): label for label in known}
        meant = [stripped.get(_plain(label)) for label in absent]
        names = [
            f"'{label}' (did you mean '{other}')"
            if other
            else f"'{label}'{_alike(label, known) if k < _COMPARED else ''}"
            for k, (label, other) in enumerate(zip(absent, meant, strict=True))
        ]
        found.problem(
            f"{where}: {len(absent)} of {len(set(wanted))} held-out perturbations have no cells: "
            f"{listing(names, _MOST)}; correct them in a copy of the list, or take them out"
        )


def _plain(label: str) -> str:
    """Return a label without blanks, in lower case."""
    return "".join(label.split()).lower()


def _alike(label: str, known: list[str]) -> str:
    """Return the most similar label in brackets, or an empty text."""
    hint = nearest(label, known)
    return f" ({hint.removeprefix(', ').removesuffix('?')})" if hint else ""
