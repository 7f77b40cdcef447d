"""One pass over predictions: which cells a submission would have, and what would be rejected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.io.columns import Texts
from perturbdiff.io.input_file import InputFile
from perturbdiff.method import SOURCES
from perturbdiff.runtime.errors import listing
from perturbdiff.submission.requirements import NUMBER, Panel, Rules

VALUES = 1 << 22  # read at once
_SHOWN = 5  # labels that a line names
_GUIDE = re.compile(r"-\d$")  # what a construct has behind its gene


@dataclass
class CellSurvey:
    """The cells of a submission and what is wrong with them.

    Attributes
    ----------
    table
        ``perturbation, context`` (categories) and ``row`` (of the predictions) of each cell.
    genes
        Brings the predictions' genes into the panel's order.
    num_values
        Stored values of these cells in the panel's genes.
    largest
        Largest sum of a cell's counts.
    problems
        A sentence for each thing that would be rejected.
    """

    table: pd.DataFrame
    genes: GeneMap
    num_values: int = 0
    largest: float = 0.0
    problems: list[str] = field(default_factory=list)


def survey(file: InputFile, rules: Rules, panel: Panel, context_column: str) -> CellSurvey:
    """Look at every label and value of a predictions file. Memory holds some bytes per cell, and a block.

    Parameters
    ----------
    file
        Predictions.
    rules, panel
        What is accepted.
    context_column
        Column of obs that names the context.
    """
    found = CellSurvey(
        _cells(file, rules, context_column), GeneMap(file.genes, panel.genes, name=str(file.path))
    )
    if found.genes.missing:
        found.problems.append(
            f"{len(found.genes.missing)} of the panel's {len(panel.genes)} genes are missing: "
            f"{listing(found.genes.missing, _SHOWN)}; sample from a store that preprocess made with all of them "
            "(--genes LIST)"
        )
    found.problems += _label_problems(found.table, rules, panel)
    _look_at_values(file, found, rules)
    return found


def _cells(file: InputFile, rules: Rules, context_column: str) -> pd.DataFrame:
    """Return the labels of the cells that belong into a submission, those of the rules for controls."""
    labels = {}
    for name in ("perturbation", context_column, "source"):
        texts, column = Texts(), file.open_column(name)
        codes = column.codes(0, file.n_cells, texts)
        labels[name] = pd.Categorical.from_codes(codes, list(texts.names))
    control = np.asarray(labels["source"] == SOURCES[1])
    names = labels["perturbation"]
    if rules.controls:
        names = names if rules.control in names.categories else names.add_categories([rules.control])
        names[control] = rules.control
    table = pd.DataFrame({"perturbation": names, "context": labels[context_column]})
    table["row"] = np.arange(len(table))
    kept = pd.DataFrame(table[np.full(len(table), True) if rules.controls else ~control])
    for name in ("perturbation", "context"):
        kept[name] = kept[name].cat.remove_unused_categories()
    return kept.reset_index(drop=True)


def blocks(file: InputFile, found: CellSurvey) -> Iterator[tuple[np.ndarray, sparse.csr_matrix]]:
    """Yield the numbers of cells in the survey's table and their values in the panel's genes, no zero stored."""
    rows = found.table["row"].to_numpy()
    for block in file.blocks(limit=VALUES):
        cells = np.arange(*np.searchsorted(rows, (block.start, block.stop)))
        if len(cells):
            values = block.as_csr(len(file.genes))[rows[cells] - block.start]
            values.sum_duplicates()
            values.eliminate_zeros()
            yield cells, found.genes.apply(values)


def _label_problems(table: pd.DataFrame, rules: Rules, panel: Panel) -> Iterator[str]:
    if not len(table):
        yield "there is no predicted cell"
        return
    if rules.most_cells is not None and len(table) > rules.most_cells:
        yield f"{len(table):,} cells are more than the {rules.most_cells:,} that are accepted"
    controls = int((table["perturbation"] == rules.control).sum())
    if rules.controls and not controls:
        yield f"there is no control cell ('{rules.control}'), which the scorer asks for"
    if not rules.controls and controls:
        yield f"{controls} predicted cells are labelled '{rules.control}'; control cells must not be submitted"
    if not rules.panel:
        return
    there = list(map(str, table["context"].cat.categories))
    contexts = panel.contexts or ()
    for what, labels in (
        ("is no context of this panel", [c for c in there if c not in contexts]),
        ("is a context without any cell", [c for c in contexts if c not in there]),
    ):
        for label in labels:
            yield f"'{label}' {what}; contexts are {listing(contexts)}"
    for context in contexts:
        if context in there:
            mine = pd.Series(table["perturbation"][table["context"] == context])
            numbers = {str(name): int(number) for name, number in mine.value_counts().items() if number}
            yield from _panel_problems(context, numbers, rules, panel)


def _panel_problems(context: str, cells: dict[str, int], rules: Rules, panel: Panel) -> Iterator[str]:
    """Yield what is wrong with the perturbations of a context, which have these numbers of cells."""
    wanted = panel.wanted(context)
    if missing := [name for name in wanted if name not in cells]:
        yield f"context '{context}': {len(missing)} perturbations are not predicted: {listing(missing, _SHOWN)}"
    if others := [name for name in cells if name not in wanted and name != rules.control]:
        hint = ""
        if any(_GUIDE.search(name) and _GUIDE.sub("", name) in wanted for name in others):
            hint = "; give the gene's name without the number of the guide"
        yield f"context '{context}': {len(others)} perturbations are not asked for: {listing(others, _SHOWN)}{hint}"
    each = {name: number or rules.cells for name, number in wanted.items()}
    wrong = [
        f"{name} has {cells[name]}, not {number}"
        for name, number in each.items()
        if name in cells and number is not None and cells[name] != number
    ]
    if wrong:
        yield (
            f"context '{context}': {len(wrong)} perturbations have another number of cells than is asked for: "
            f"{listing(wrong, _SHOWN)}; sample with a table of conditions that has {NUMBER} (--conditions)"
        )


def _look_at_values(file: InputFile, found: CellSurvey, rules: Rules) -> None:
    """Check every value, and note the number of values and the largest sum."""
    labels = found.table["perturbation"].cat.codes.to_numpy()
    names = found.table["perturbation"].cat.categories
    expressed = np.zeros(len(names), bool)
    odd = {"not finite": 0, "negative": 0, "no whole number": 0}
    over = 0
    for cells, values in blocks(file, found):
        data = values.data
        finite = np.isfinite(data)
        odd["not finite"] += int((~finite).sum())
        odd["negative"] += int((data < 0).sum())
        odd["no whole number"] += int((np.rint(data[finite]) != data[finite]).sum())
        data[~finite] = 0  # they are told, and no sums
        sums = np.asarray(values.sum(axis=1, dtype=np.float64)).ravel()
        over += int((sums > rules.most_counts).sum())
        found.largest = max(found.largest, float(sums.max()))
        found.num_values += values.nnz
        expressed[labels[cells[sums > 0]]] = True
    for what, number in odd.items():
        if number:
            advice = "; sample with --values counts" if what == "no whole number" else ""
            found.problems.append(f"{number:,} values are {what}{advice}")
    if over:
        found.problems.append(
            f"{over:,} cells have more than {rules.most_counts:,} counts, the largest {found.largest:,.0f}"
        )
    if rules.most_values is not None and found.num_values > rules.most_values:
        found.problems.append(
            f"{found.num_values:,} values are not zero, more than the {rules.most_values:,} that are accepted"
        )
    if len(empty := list(names[~expressed])):
        found.problems.append(
            f"{len(empty)} perturbations have no count in any cell: {listing(empty, _SHOWN)}"
        )
