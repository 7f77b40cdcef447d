"""A data set against the paper's tables (Tab. data_summary, Tab. shared_genes), number by number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from perturbdiff.datasets.registry import PaperCounts, lookup, registered
from perturbdiff.runtime.errors import UserError

WORDS = {
    "train": "training cells",
    "valid": "validation cells",
    "test": "test cells",
    "control": "control cells",
    "perturbations": "perturbations",
    "cell_types": "cell types",
    "batches": "batches",
    "shared_genes": "genes of the prior's list",
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


def counted(name: str) -> PaperCounts:
    """Return what the paper counts in a registered data set.

    Raises
    ------
    UserError
        If the name is unknown, or the paper does not use the data set.
    """
    found = lookup(name).paper
    if found is None:
        known = ", ".join(one.name for one in registered().values() if one.paper)
        raise UserError(f"the paper counts nothing in data set '{name}'; it does in {known}")
    return found


def beside(numbers: Mapping[str, int], paper: PaperCounts) -> pd.DataFrame:
    """Return ``number, paper, here, difference, agrees``: a row for each number that both know.

    ``difference`` is relative to the paper's number. They agree if they are equal.
    """
    rows = [(WORDS[name], wanted, here) for name, here in numbers.items() if (wanted := getattr(paper, name))]
    table = pd.DataFrame(rows, columns=pd.Index(["number", "paper", "here"]))
    return table.assign(difference=table["here"] / table["paper"] - 1, agrees=table["here"] == table["paper"])
