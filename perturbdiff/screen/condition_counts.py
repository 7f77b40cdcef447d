"""How many cells each condition of a screen has, before there is a store."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import LABELS
from perturbdiff.conditions.condition_table import ALL, sort_conditions
from perturbdiff.io.columns import Numbering, Texts, row_ranges
from perturbdiff.screen.sources import Source


def count_conditions(
    source: Source, keys: Mapping[str, str | None], control: str
) -> tuple[pd.DataFrame, int]:
    """Count the cells of each condition, reading some rows of obs at a time.

    Parameters
    ----------
    source
        The screen.
    keys
        obs column of each of the three labels; None: all cells have the same.
    control
        Label of the control cells.

    Returns
    -------
    conditions
        Columns ``cell_type, batch, perturbation, n_cells, is_control`` in store order.
    without_label
        Number of cells that lack a label.
    """
    texts, contexts, conditions = {label: Texts() for label in LABELS}, Numbering(), Numbering()
    counts, without_label = np.zeros(0, np.int64), 0
    for start, stop in row_ranges(source.n_cells):
        codes = {
            label: np.full(stop - start, texts[label].number(ALL), np.int32)
            if key is None
            else source.codes(key, start, stop, texts[label])
            for label, key in keys.items()
        }
        number = conditions(contexts(codes["cell_type"], codes["batch"]), codes["perturbation"])
        without_label += int((number < 0).sum())
        here = np.bincount(number[number >= 0], minlength=len(counts))
        here[: len(counts)] += counts
        counts = here
    context, perturbation = conditions.pairs()
    cell_type, batch = contexts.pairs()
    columns = {
        "cell_type": [texts["cell_type"].names[k] for k in cell_type[context]],
        "batch": [texts["batch"].names[k] for k in batch[context]],
        "perturbation": [texts["perturbation"].names[k] for k in perturbation],
    }
    table = sort_conditions(pd.DataFrame(columns).assign(n_cells=counts), control)
    return table.assign(is_control=table["perturbation"] == control), without_label
