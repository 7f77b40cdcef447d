"""Figures of a bundle's training: a panel for each term of training.csv."""

from __future__ import annotations

from pathlib import Path

from perturbdiff.reporting.figures import condition_plots
from perturbdiff.reporting.figures.svg import Plot, slug
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError

_PLAIN = {
    "total": "loss",
    "loss": "loss at fixed noise levels",
    "mmd": "loss between cell sets (MMD)",
    "mse": "loss of single cells (squared error)",
    "energy": "energy distance of sampled cells",
    "r2": "R² of sampled mean profiles",
    "pdcorr": "PDCorr of sampled mean changes",
    "learning_rate": "learning rate",
    "grad_norm": "length of the gradient",
}


def curves(index: int, name: str, bundle: Path) -> list[Plot]:
    """Return a figure per numeric column of a bundle's training.csv. Empty without that file.

    Parameters
    ----------
    index, name
        The bundle's place among those of the page, from 1 on, and what it is called there.

    Raises
    ------
    UserError
        If the file is damaged, or not that of a bundle.
    """
    path = bundle / "training.csv"
    if not path.is_file():
        return []
    table = tabular.read_csv(path, "train again or leave this bundle out")
    if not {"step", "split"} <= set(table.columns):
        raise UserError(f"{path}: no column step or split; is {bundle} a bundle of this version?")
    terms = [c for c in table.select_dtypes("number") if c != "step" and len(table[[c]].dropna())]
    return [
        condition_plots.curves(
            f"training-{index}-{slug(str(term))}",
            f"{plain(str(term))} while training {name}",
            table,
            str(term),
            label=plain(str(term)),
        )
        for term in terms
    ]


def plain(name: str) -> str:
    """Return a column's name in words: known ones as a reader would say them, others without underscores."""
    return _PLAIN.get(name, name.replace("_", " "))
