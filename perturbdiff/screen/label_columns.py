"""Which obs columns hold the perturbation, the cell type and the batch, and which label means control."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from perturbdiff.io.columns import MISSING, Texts, row_ranges
from perturbdiff.runtime.errors import listing, nearest
from perturbdiff.screen.sources import Labels, Source
from perturbdiff.screen.values import plain

# Usual names, without signs and in lower case, the most telling first.
_PERTURBATION_NAMES = (
    "perturbation", "perturbations", "perturb", "pert", "perturbationname", "perturbationlabel", "targetgene",
    "genetarget", "target", "treatment", "cytokine", "drug", "compound", "ligand", "stimulation", "stimulus", "stim",
    "knockout", "knockdown", "ko", "condition", "gene", "guideidentity", "guide", "guideid", "sgrna", "grna",
    "treated", "perturbed", "stimulated", "label", "group",
)  # fmt: skip
_PERTURBATION_PARTS = ("perturb", "treatment", "stim", "guide", "sgrna", "drug", "cytokine")
_CELL_TYPE_NAMES = (
    "celltype", "celltypes", "cellline", "celllines", "celltypename", "celllinename", "cellontologyclass",
    "celllabel", "celltypeannotation", "annotation", "cell",
)  # fmt: skip
_CELL_TYPE_PARTS = ("celltype", "cellline", "annotation")
_BATCH_NAMES = (
    "donor", "donorid", "patient", "patientid", "subject", "subjectid", "individual", "ind", "batch", "batchid",
    "replicate", "rep", "biorep", "mouse", "plate", "plateid", "gemgroup", "lane", "channel", "library", "libraryid",
    "pool", "run", "experiment", "sample", "sampleid", "origident",
)  # fmt: skip
_BATCH_PARTS = ("donor", "patient", "batch", "replicate", "plate")
_CONTROLS = frozenset(
    {
        "control", "controls", "ctrl", "ctl", "nontargeting", "nontarget", "nontargetingcontrol", "nt", "ntc",
        "negctrl", "negcontrol", "negativecontrol", "dmso", "dmsotf", "vehicle", "vehiclecontrol", "untreated",
        "unperturbed", "unstimulated", "unstim", "notreatment", "pbs", "mock", "wt", "wildtype", "scramble",
        "scrambled", "safeharbor", "safetargeting", "none", "media", "medium",
    }
)  # fmt: skip
_CONTROL_PARTS = re.compile(
    r"non.?target|control|ctrl|dmso|untreated|unstim|unperturbed|vehicle|scramble|mock", re.I
)
_OFF = frozenset({"0", "false", "no"})

EXACT, PARTIAL, OFF = 3, 2, 1
"""How surely a label means control: a usual word, a label that contains one, or the 'no' of yes and no."""
_SURE = 55  # of the scores below
_NAME_SCORE, _PART_SCORE, _CONTROL_SCORES = 100, 40, {EXACT: 60, PARTIAL: 30, OFF: 10, 0: 0}
_FEWEST_CELLS = 10  # per label, on average
_SHOWN_COLUMNS = 6


@dataclass(frozen=True)
class Choice:
    """A column (or label) that was chosen, with the reason; ``name`` is None if there is none."""

    name: str | None
    why: str
    problem: str = ""


def control_likeness(label: str) -> int:
    """Return how surely a label means control: `EXACT`, `PARTIAL`, `OFF` or 0."""
    if plain(label) in _CONTROLS:
        return EXACT
    if _CONTROL_PARTS.search(label):
        return PARTIAL
    return OFF if label.casefold() in _OFF else 0


def _likely_control(labels: Labels) -> tuple[int, str]:
    """Return the likeness and the name of the label that means control most surely, the most frequent of equals."""
    ranked = sorted(
        (
            (control_likeness(name), int(count), name)
            for name, count in zip(labels.names, labels.counts, strict=True)
        ),
        key=lambda one: (-one[0], -one[1]),
    )
    return (ranked[0][0], ranked[0][2]) if ranked else (0, "")


def _name_score(name: str, names: tuple[str, ...], parts: tuple[str, ...]) -> int:
    simple = plain(name)
    if simple in names:
        return _NAME_SCORE - 2 * names.index(simple)
    return _PART_SCORE if any(part in simple for part in parts) else 0


def choose_perturbation(labels: Mapping[str, Labels], control: str | None) -> Choice:
    """Choose the column of perturbations by its name and by a label that means control.

    Parameters
    ----------
    labels
        Labels of each column that has any.
    control
        Label of the control cells, if it is known.
    """
    scores: dict[str, int] = {}
    for name, found in labels.items():
        if control is not None and control not in found.names:
            continue
        likeness = EXACT if control is not None else _likely_control(found)[0]
        score = _name_score(name, _PERTURBATION_NAMES, _PERTURBATION_PARTS) + _CONTROL_SCORES[likeness]
        if len(found.names) > 1 and score >= _SURE:
            scores[name] = score
    if not scores:
        return Choice(None, "", _no_perturbation(labels, control))
    ranked = sorted(scores, key=lambda name: -scores[name])
    best = labels[ranked[0]]
    reasons = []
    if _name_score(best.name, _PERTURBATION_NAMES, _PERTURBATION_PARTS):
        reasons.append("its name is a usual one")
    marker = control if control is not None else _likely_control(best)[1]
    if control is not None or _likely_control(best)[0] >= PARTIAL:
        reasons.append(f"it has the label '{marker}'")
    others = f"; also possible: {listing(ranked[1:], 3)}" if len(ranked) > 1 else ""
    return Choice(best.name, f"{' and '.join(reasons) or 'it fits best'}{others}")


def _no_perturbation(labels: Mapping[str, Labels], control: str | None) -> str:
    named = [
        one for one in labels.values() if _name_score(one.name, _PERTURBATION_NAMES, _PERTURBATION_PARTS)
    ]
    alone = next((one for one in named if len(one.names) == 1), None)
    shown = "; ".join(f"'{one.name}': {one.shown()}" for one in list(labels.values())[:_SHOWN_COLUMNS])
    if not labels:
        return "no obs column holds labels, so there are no perturbations"
    if control is not None:
        every = [name for one in labels.values() for name in one.names]
        hint = nearest(control, every) or ";"
        return f"no obs column has the label '{control}'{hint} the columns with labels are {shown}"
    single = f" (every cell is '{alone.names[0]}' in '{alone.name}')" if alone else ""
    return f"no obs column looks like the perturbation{single}; the columns with labels are {shown}"


def choose_control(labels: Labels) -> Choice:
    """Choose the label of the control cells."""
    likeness, name = _likely_control(labels)
    if likeness == OFF and len(labels.names) != 2:
        likeness = 0
    if not likeness:
        return Choice(
            None,
            "",
            f"no label of '{labels.name}' is a usual word for control; its labels are {labels.shown()}",
        )
    count = labels.counts[labels.names.index(name)]
    others = [other for other in labels.names if other != name and control_likeness(other) == EXACT]
    more = f"; {listing(others, 3)} may be controls too and count as perturbations" if others else ""
    word = {EXACT: "a usual word for control", PARTIAL: "it contains a usual word for control"}
    return Choice(name, f"{word.get(likeness, 'it means no')}, {count} cells{more}")


def choose_context(
    source: Source,
    labels: Mapping[str, Labels],
    perturbation: str,
    control: str,
    *,
    kind: str,
    taken: Iterable[str],
) -> Choice:
    """Choose the column of cell types or batches: a usual name, and labels that controls and perturbed cells share.

    Parameters
    ----------
    kind
        ``cell_type`` or ``batch``.
    taken
        Columns that have another meaning.
    """
    batch = kind == "batch"
    names, parts = (_BATCH_NAMES, _BATCH_PARTS) if batch else (_CELL_TYPE_NAMES, _CELL_TYPE_PARTS)
    scores = {name: _name_score(name, names, parts) for name in labels if name not in set(taken)}
    refused = []
    # a column with one label says nothing, so it comes last
    named = [name for name, score in scores.items() if score]
    for name in sorted(named, key=lambda name: (len(labels[name].names) == 1, -scores[name])):
        found = labels[name]
        if found.counts.sum() < _FEWEST_CELLS * len(found.names):
            refused.append(f"'{name}' has {len(found.names)} labels for {found.counts.sum()} cells")
            continue
        share = crossed(source, found, perturbation, control)
        if share < 0.5:
            refused.append(f"under the labels of '{name}', controls and perturbed cells do not meet")
            continue
        number = f"{len(found.names)} label{'s' * (len(found.names) != 1)}"
        usual = f"its name is a usual one; {number}: {listing(found.names, 3)}"
        return Choice(name, f"{usual}{f'; {refused[0]}' if refused else ''}")
    what = "batch or donor" if batch else "cell type"
    return Choice(None, f"no column looks like the {what}{f' ({refused[0]})' if refused else ''}")


def crossed(source: Source, found: Labels, perturbation: str, control: str) -> float:
    """Return the share of perturbed cells whose label in a column also has control cells."""
    texts, others = Texts(found.names), Texts([control])
    counts = np.zeros((len(found.names), 2), np.int64)
    for start, stop in row_ranges(source.n_cells):
        label = source.codes(found.name, start, stop, texts)
        treated = source.codes(perturbation, start, stop, others)
        known = (label != MISSING) & (treated != MISSING)
        np.add.at(counts, (label[known], (treated[known] > 0).astype(np.int64)), 1)
    perturbed = counts[:, 1].sum()
    return float(counts[counts[:, 0] > 0, 1].sum() / perturbed) if perturbed else 0.0
