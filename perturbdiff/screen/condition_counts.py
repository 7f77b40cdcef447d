"""How many cells each condition of a screen has, before there is a store."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import LABELS
from perturbdiff.conditions.condition_table import ALL, sort_conditions
from perturbdiff.io.cell_filter import CellFilter, KeptCells, unknown_values
from perturbdiff.io.columns import MISSING, Numbering, Texts, row_ranges
from perturbdiff.runtime.errors import UserError
from perturbdiff.screen.sources import Source


def count_conditions(
    source: Source, keys: Mapping[str, str | None], control: str, keep: str | None = None
) -> tuple[pd.DataFrame, int, int]:
    """Count the cells of each condition, reading some rows of obs at a time.

    Parameters
    ----------
    source
        The screen.
    keys
        obs column of each of the three labels; None: all cells have the same.
    control
        Label of the control cells.
    keep
        Expression over obs columns (``data.keep``); only cells for which it holds are counted.

    Returns
    -------
    conditions
        Columns ``cell_type, batch, perturbation, n_cells, is_control`` in store order.
    without_label
        Number of cells that lack a label.
    left_out
        Number of cells that are not kept.

    Raises
    ------
    UserError
        If ``keep`` does not fit the columns.
    """
    texts, contexts, conditions = {label: Texts() for label in LABELS}, Numbering(), Numbering()
    counts, without_label, left_out = np.zeros(0, np.int64), 0, 0
    chosen = (
        None if keep is None else KeptCells(CellFilter(keep), source.shown, source.columns(), source.codes)
    )
    for start, stop in row_ranges(source.n_cells):
        codes = {
            label: np.full(stop - start, texts[label].number(ALL), np.int32)
            if key is None
            else source.codes(key, start, stop, texts[label])
            for label, key in keys.items()
        }
        kept = np.ones(stop - start, bool) if chosen is None else chosen.read(start, stop)
        agent = np.where(kept, codes["perturbation"], np.int32(MISSING))
        number = conditions(contexts(codes["cell_type"], codes["batch"]), agent)
        left_out += int((~kept).sum())
        without_label += int(((number < 0) & kept).sum())
        here = np.bincount(number[number >= 0], minlength=len(counts))
        here[: len(counts)] += counts
        counts = here
    if chosen is not None and (unknown := unknown_values([chosen])):
        raise UserError(f"{source.shown}: {'; '.join(unknown)}")
    context, perturbation = conditions.pairs()
    cell_type, batch = contexts.pairs()
    columns = {
        "cell_type": [texts["cell_type"].names[k] for k in cell_type[context]],
        "batch": [texts["batch"].names[k] for k in batch[context]],
        "perturbation": [texts["perturbation"].names[k] for k in perturbation],
    }
    table = sort_conditions(pd.DataFrame(columns).assign(n_cells=counts), control)
    return table.assign(is_control=table["perturbation"] == control), without_label, left_out
