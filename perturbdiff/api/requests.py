"""What is to be predicted, and from which control cells, as the sampling stage reads it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import anndata
import pandas as pd

from perturbdiff.api.given_inputs import AnyData, cells_file, store_path
from perturbdiff.api.own_labels import OwnLabels
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.conditions.condition import LABELS
from perturbdiff.config.settings import DataConfig
from perturbdiff.io.columns import Texts
from perturbdiff.io.counts import Inputs
from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

Conditions = str | Path | Sequence[str] | pd.DataFrame | anndata.AnnData
"""Perturbations by name, a table of conditions (or its CSV), or cells that have the conditions to predict."""

_GROUP = ["cell_type", "batch"]


def condition_file(conditions: Conditions, store: Store, labels: OwnLabels, folder: Path) -> Path:
    """Return a CSV of conditions as `perturbdiff.sampling.read_requests` reads it.

    Raises
    ------
    UserError
        If the table has no column with the perturbation, or a label without control cells.
    """
    if isinstance(conditions, Path) or (isinstance(conditions, str) and conditions.endswith(".csv")):
        return Path(conditions)
    if isinstance(conditions, anndata.AnnData):
        table = labels.conditions(conditions.obs, store.control)
    elif isinstance(conditions, pd.DataFrame):
        table = labels.rename(conditions)
    else:
        names = [conditions] if isinstance(conditions, str) else list(conditions)
        table = pd.DataFrame({"perturbation": list(dict.fromkeys(map(str, names)))})
    if "perturbation" not in table or not len(table):
        what = "has no rows" if "perturbation" in table else "has no column with the perturbation"
        raise UserError(
            f"conditions: the table {what}; it has the columns {listing(map(str, table.columns))}"
        )
    table = _in_all_groups(table, store)
    if isinstance(conditions, anndata.AnnData):
        table = _shared_out(table)
    columns = [name for name in (*LABELS, "n_cells", "guidance") if name in table]
    path = folder / "conditions.csv"
    table[columns].to_csv(path, index=False)
    return path


def _in_all_groups(table: pd.DataFrame, store: Store) -> pd.DataFrame:
    """Return conditions with cell type and batch; one that is not given stands for all that have control cells.

    ``row`` is the row of ``table`` that each comes from.
    """
    table = table.assign(row=range(len(table)))
    known = [name for name in _GROUP if name in table]
    if len(known) == len(_GROUP):
        return table
    groups = pd.DataFrame(store.conditions.loc[store.conditions["is_control"], _GROUP])
    if not known:
        return table.merge(groups, how="cross")
    label = known[0]
    have = set(groups[label])
    for wanted in table[label]:
        if wanted not in have:
            raise UserError(
                f"conditions: no control cells of {label} '{wanted}'{nearest(wanted, have)} they have: {listing(have)}"
            )
    return table.merge(groups, on=label)


def _shared_out(table: pd.DataFrame) -> pd.DataFrame:
    """Divide the cells of a condition over the groups that it stands for, so that there are no more than it has."""
    number = table.groupby("row").cumcount().to_numpy()
    groups = table.groupby("row")["row"].transform("size").to_numpy()
    cells = table["n_cells"].to_numpy()
    table = table.assign(n_cells=cells // groups + (number < cells % groups))
    return pd.DataFrame(table[table["n_cells"] > 0])


def control_store(controls: AnyData, bundle: Bundle, data: DataConfig, folder: Path) -> Store:
    """Return a store of control cells with a model's genes and depth: the one given, or one made of cells.

    Parameters
    ----------
    controls
        Store or cells. In cells without the column of the perturbation, all are controls.
    bundle
        The model.
    data
        Names of the columns, and where the values are.
    folder
        Temporary folder of what is written.

    Raises
    ------
    UserError
        If the cells have none of the model's genes, or a column is missing.
    """
    if path := store_path(controls):
        return Store(path)
    file = cells_file(controls, folder)
    data = data.model_copy(update=_unlabelled(file, data, folder))
    depth = {} if bundle.target_sum is None else {"target_sum": bundle.target_sum}
    data = data.model_copy(
        update={
            "num_hvgs": None, "hvg_cells": "all", "knockdown": False, "extra_obs": (), **depth,
        }
    )  # fmt: skip
    genes = folder / "genes.txt"
    genes.write_text("".join(f"{gene}\n" for gene in bundle.genes), encoding="utf-8")
    preprocess([file], folder / "controls", data, genes=genes, machine=Machine(jobs=1))
    return Store(folder / "controls")


def _unlabelled(file: Path, data: DataConfig, folder: Path) -> dict[str, None]:
    """Return the columns to do without: those that are missing, and that of the perturbation if all are controls."""
    with Inputs([file], data, folder) as opened:
        (cells,) = opened.files
        missing = [
            k for k in ("perturbation_key", "dose_key") if getattr(data, k) not in (None, *cells.columns)
        ]
        if "perturbation_key" in missing:
            logger.info(
                "control cells: no column '%s', so that all cells are controls", data.perturbation_key
            )
        elif data.perturbation_key is not None:
            texts = Texts()
            cells.open_column(data.perturbation_key).codes(0, cells.n_cells, texts)
            if texts.names == [data.control]:
                missing.append("perturbation_key")
    return dict.fromkeys(missing)
