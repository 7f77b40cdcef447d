"""Predictions made of real cells: what no effect, the mean effect and the right effect score on these data.

A reference is judged like any predictions file. Each condition's real cells are halved. One half is the truth for all
references; the other serves those that may know it. The controls are halved too, and each side's changes are measured
from its own half: with the same controls on both sides, their noise would be in both changes and correlate them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perturbdiff.conditions.condition import Condition, Group
from perturbdiff.evaluation.readers.cell_sources import KnownSets, dealt, grouped
from perturbdiff.evaluation.readers.cells_by_condition import Cells, ExpressionView, median_depth
from perturbdiff.evaluation.readers.pairing import Pairing, controls_of
from perturbdiff.evaluation.readers.remarks import Findings
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.large_arrays import PackedRows
from perturbdiff.runtime.seeds import generator, words

DUPLICATE = "technical_duplicate"
_HALVES, _DRAWN, _SETS = 0, 1, 2  # numbers of a condition's generators


@dataclass(frozen=True)
class Halves:
    """Two halves of the real cells and of the controls.

    Attributes
    ----------
    truth
        Rows of each wanted condition that predictions are judged by.
    known
        Rows of each condition, wanted or not, that references are made of.
    controls, known_controls
        Rows of each group's controls, for the changes of the truth and for those of the references.
    """

    truth: Mapping[Condition, np.ndarray]
    known: Mapping[Condition, np.ndarray]
    controls: Mapping[Group, np.ndarray]
    known_controls: Mapping[Group, np.ndarray]


class _Neighbours:
    """The known cells of all perturbations of one place: a group, a context or everything."""

    def __init__(self, rows: Mapping[str, Sequence[np.ndarray]]) -> None:
        self._place = {name: i for i, name in enumerate(rows)}
        self._rows = list(rows.values())
        self._sizes = np.array([sum(map(len, parts)) for parts in self._rows])

    def without(self, perturbation: str, number: int, rng: np.random.Generator) -> np.ndarray:
        """Return at most ``number`` rows, each once, of the others as equally as their sizes allow."""
        sizes = self._sizes.copy()
        if perturbation in self._place:
            sizes[self._place[perturbation]] = 0
        order = rng.permutation(len(sizes))
        shares = np.zeros_like(sizes)
        shares[order] = _equal_shares(sizes[order], number)
        taken = [_some(self._rows[k], int(shares[k]), rng) for k in np.flatnonzero(shares)]
        return np.concatenate(taken) if taken else np.empty(0, np.int64)


class _Maker:
    """Draws the rows of references: as many cells as the known half of a condition has."""

    def __init__(self, halves: Halves, contexts: Mapping[Condition, str], seed: int) -> None:
        self._halves, self._contexts, self._seed = halves, contexts, seed
        near: dict[object, dict[str, list[np.ndarray]]] = {}
        for condition in sorted(halves.known):
            for place in self._places(condition):
                rows = near.setdefault(place, {}).setdefault(condition.perturbation, [])
                rows.append(halves.known[condition])
        self._near = {place: _Neighbours(rows) for place, rows in near.items()}

    def own(self, condition: Condition) -> np.ndarray:
        """Return the known half."""
        return self._halves.known[condition]

    def controls(self, condition: Condition) -> np.ndarray:
        """Return control cells of the same group, else of all groups."""
        found = self._halves.known_controls
        rows = [found[condition.group]] if condition.group in found else list(found.values())
        return _some(rows, len(self.own(condition)), self._rng(condition))

    def others(self, condition: Condition) -> np.ndarray:
        """Return cells of the other perturbations of the same group, else of the same context, else of all."""
        return self._others(condition, len(self.own(condition)), self._rng(condition))

    def half_others(self, condition: Condition) -> np.ndarray:
        """Return half of the known half, filled up with cells of the other perturbations."""
        own, rng = self.own(condition), self._rng(condition)
        kept = _some([own], len(own) // 2, rng)
        return np.concatenate([kept, self._others(condition, len(own) - len(kept), rng)])

    def _others(self, condition: Condition, number: int, rng: np.random.Generator) -> np.ndarray:
        for place in self._places(condition):
            if len(rows := self._near[place].without(condition.perturbation, number, rng)):
                return rows
        raise UserError(
            f"'{condition.perturbation}' is the only perturbation, so that there is no mean of the others"
        )

    def _places(self, condition: Condition) -> list[object]:
        """Return the group, the context if there is one, and all."""
        return list(dict.fromkeys([condition.group, self._contexts.get(condition, ""), ""]))

    def _rng(self, condition: Condition) -> np.random.Generator:
        return generator(*words(self._seed, tuple(condition), _DRAWN))


@dataclass(frozen=True)
class Reference:
    """What a reference is.

    Attributes
    ----------
    name
        Its name in tables.
    sentence
        What its cells are.
    draw
        Returns the rows of a condition.
    """

    name: str
    sentence: str
    draw: Callable[[_Maker, Condition], np.ndarray]


REFERENCES: dict[str, Reference] = {
    reference.name: reference
    for reference in (
        Reference(
            DUPLICATE,
            "the other half of the condition's own cells: as good as an experiment that is done again",
            _Maker.own,
        ),
        Reference(
            "interpolated_duplicate",
            "half technical duplicate, half cells of the other perturbations: half of what is specific is known",
            _Maker.half_others,
        ),
        Reference(
            "perturbed_mean",
            "cells of all other perturbations of the same context in equal shares: only what all share is known",
            _Maker.others,
        ),
        Reference("control", "control cells: nothing is known of the perturbation", _Maker.controls),
    )
}


def pair_reference(
    truth: Cells, wanted: Iterable[Condition], name: str, *, seed: int, quiet: bool = False
) -> Pairing:
    """Set the cells of a reference beside the other half of the real cells.

    The halves depend on the seed alone, so that all references are judged by the same cells. Every reference has as
    many cells as the known half of the condition. Conditions with a single cell are left out and counted, and so are
    the controls of groups (cell type, batch) with a single control.

    Where the sets of cells are known, half of a condition's sets, whole, are the true ones. The other half are the sets
    of the technical duplicate; cells of the other references are dealt into sets at random.

    Parameters
    ----------
    truth
        The real cells.
    wanted
        The conditions to score. References may be made of cells of the other conditions, too.
    name
        One of `REFERENCES`.
    seed
        Of the halves, and of the cells that a reference draws.
    quiet
        Do not log what is left out, as for the second of several splits.

    Raises
    ------
    UserError
        If no condition has two cells, no group two controls, or there are no other perturbations to take cells of.
    """
    notes, reference = Findings(quiet=quiet), REFERENCES[name]
    wanted = sorted(wanted)
    halves = halve(truth, wanted, notes, seed=seed)
    maker = _Maker(halves, truth.contexts, seed)
    try:
        most = sum(len(halves.known[c]) for c in halves.truth)
        rows = PackedRows(most, ((c, np.sort(reference.draw(maker, c))) for c in halves.truth))
    except UserError as error:
        raise UserError(f"{truth.reader.path}: {error}; leave out the reference {name}") from None
    depth = median_depth(truth.reader) if truth.scale == "counts" else None
    return Pairing(
        tuple(truth.reader.genes),
        truth.control or "control",
        list(halves.truth),
        {c: truth.contexts[c] for c in halves.truth if c in truth.contexts},
        ExpressionView(truth.reader, halves.truth, depth=depth),
        ExpressionView(truth.reader, rows, depth=depth),
        halves.controls,
        {"conditions_too_small": len(wanted) - len(halves.truth), "controls": "half"},
        halves.known_controls,
        notes.entries,
        truth.target_sum if depth is None else depth,
        None
        if truth.sets is None
        else _known_sets(truth, truth.sets, halves, rows, seed, known=name == DUPLICATE),
    )


def _known_sets(
    truth: Cells,
    numbers: np.ndarray,
    halves: Halves,
    rows: Mapping[Condition, np.ndarray],
    seed: int,
    *,
    known: bool,
) -> KnownSets:
    """Return half of the true sets, and as the prediction the other half, or sets dealt of a reference's ``rows``."""
    judged: dict[Condition, list[np.ndarray]] = {}
    guessed: dict[Condition, list[np.ndarray]] = {}
    for condition, sets in grouped({c: truth.rows[c] for c in halves.truth}, numbers).items():
        rng = generator(*words(seed, tuple(condition), _SETS))
        order, middle = rng.permutation(len(sets)), len(sets) // 2
        judged[condition] = [sets[k] for k in np.sort(order[middle:])]
        if known:
            guessed[condition] = [sets[k] for k in np.sort(order[:middle])]
        else:
            size = int(np.median([len(one) for one in sets])) if sets else 0
            guessed[condition] = dealt(rows[condition], size, rng)
    return KnownSets(judged, guessed)


def halve(truth: Cells, wanted: Sequence[Condition], notes: Findings, *, seed: int) -> Halves:
    """Draw half of each condition's cells and of each group's controls.

    What is drawn for a condition depends on the seed and its labels only. Of an odd number of cells the truth gets
    one more.

    Raises
    ------
    UserError
        If no wanted condition has two cells, or no group two controls.
    """
    path = truth.reader.path
    sizes = {condition: len(rows) for condition, rows in truth.rows.items()}
    both = PackedRows(
        sum(sizes.values()),
        (
            ((condition, side), half)
            for condition, size in sizes.items()
            if size >= 2
            for side, half in enumerate(_halves(truth.rows[condition], seed, tuple(condition)))
        ),
    )
    known, judged = ({c: both[c, side] for c in sizes if (c, side) in both} for side in (0, 1))
    scored = {c: judged[c] for c in wanted if c in judged}
    if not scored:
        raise UserError(
            f"{path}: no test condition with at least two cells to halve; give conditions with more cells"
        )
    if small := len(wanted) - len(scored):
        notes.add("few_cells", f"{path}: {small} conditions of one cell cannot be halved, left out", small)
    groups = controls_of(truth, scored, notes)
    controls = {g: _halves(rows, seed, ("", *g)) for g, rows in groups.items() if len(rows) >= 2}
    if single := [g for g in groups if g not in controls]:
        named = listing("|".join(g) for g in single)
        if not controls:
            raise UserError(f"{path}: no two control cells to halve in {named}; give more controls")
        text = f"{path}: a single control cell cannot be halved, left out in {named} (cell type|batch)"
        notes.add("controls", text, len(single))
    first, second = ({g: both[side] for g, both in controls.items()} for side in (0, 1))
    return Halves(scored, known, second, first)


def _halves(rows: np.ndarray, seed: int, labels: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    order = generator(*words(seed, labels, _HALVES)).permutation(len(rows))
    middle = len(rows) // 2
    return np.sort(rows[order[:middle]]), np.sort(rows[order[middle:]])


def _some(parts: Sequence[np.ndarray], number: int, rng: np.random.Generator) -> np.ndarray:
    """Return at most so many of the rows of all parts, each once."""
    ends = np.cumsum([len(part) for part in parts])
    if ends[-1] <= number:
        return np.concatenate(parts)
    places = rng.choice(ends[-1], number, replace=False)
    part = np.searchsorted(ends, places, side="right")
    inside = places - np.where(part > 0, ends[part - 1], 0)
    return np.array(
        [parts[k][place] for k, place in zip(part.tolist(), inside.tolist(), strict=True)], np.int64
    )


def _equal_shares(sizes: np.ndarray, number: int) -> np.ndarray:
    """Return how many of each part to take, for at most ``number`` in all; the first ones get one more."""
    shares = np.zeros_like(sizes)
    left = min(number, int(sizes.sum()))
    while left:
        unfinished = np.flatnonzero(shares < sizes)
        step = min(left // len(unfinished), int((sizes - shares)[unfinished].min()))
        if step == 0:
            shares[unfinished[:left]] += 1
            break
        shares[unfinished] += step
        left -= step * len(unfinished)
    return shares
