"""Whether what a split holds out has cells: every label that has none, not the first alone."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.config.settings import Config
from perturbdiff.inspection.findings import Findings
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.absent_labels import faults_of_rule, faults_of_toml
from perturbdiff.splits.split_rules import Specification, by_rule, by_toml


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
    faults = faults_of_rule(table, config.split) if toml is None else faults_of_toml(table, toml)
    for text in faults.wrong:
        found.problem(text)
    for text in faults.absent:
        if config.split.missing == "warn":
            found.warning(f"{text}; they are left out (split.missing=warn)")
        else:
            found.problem(f"{text}; correct them in a copy of the list, or set split.missing=warn")
    if faults.wrong or (faults.absent and config.split.missing == "error"):
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
        if toml:
            return by_toml(table, toml, config.split.missing)
        return by_rule(table, config.split, seed, _no_profiles)[0]
    except UserError as error:
        found.problem(str(error))
        return None


def _no_profiles(_: object) -> np.ndarray:
    raise UserError("split.choose=pca needs a store")
