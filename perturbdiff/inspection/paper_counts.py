"""A data set against the paper's tables (Tab. data_summary, Tab. shared_genes): every difference is listed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.datasets.registry import PaperCounts
from perturbdiff.inspection.findings import Findings

WORDS = {
    "train": "training cells",
    "valid": "validation cells",
    "test": "test cells",
    "control": "control cells",
    "perturbations": "perturbations",
    "cell_types": "cell types",
    "batches": "batches",
}


def count(table: pd.DataFrame, part: np.ndarray | None) -> dict[str, int]:
    """Return the numbers of the paper's table: of cells by part if the parts are known, and of labels.

    Parameters
    ----------
    table
        Conditions with ``n_cells`` and ``is_control``.
    part
        Part of each condition (object [n]), or None.
    """
    control, cells = table["is_control"].to_numpy(bool), table["n_cells"].to_numpy(np.int64)
    labels = {"cell_types": len(set(table["cell_type"])), "batches": len(set(table["batch"]))}
    if control.all():  # data for pretraining
        return {"train": int(cells.sum()), **labels}
    numbers = {"control": int(cells[control].sum())}
    if part is not None:
        numbers |= {name: int(cells[~control & (part == name)].sum()) for name in ("train", "valid", "test")}
    numbers["perturbations"] = len(set(table["perturbation"][~control]))
    return numbers | labels


def compare(numbers: dict[str, int], paper: PaperCounts, found: Findings) -> None:
    """Tell where a data set differs from the paper's table."""
    unlike = []
    for name, number in numbers.items():
        wanted = int(getattr(paper, name))
        if wanted and number != wanted:
            unlike.append(f"{number:,} {WORDS[name]} instead of {wanted:,} ({number / wanted - 1:+.1%})")
    if unlike:
        found.warning(f"the paper's table counts otherwise: {'; '.join(unlike)}")
    else:
        found.fact(
            f"cells and labels are those of the paper's table ({', '.join(WORDS[name] for name in numbers)})"
        )
