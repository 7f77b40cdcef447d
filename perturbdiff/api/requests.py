"""What a Python user asks for, as the sampling stage reads it, and the own labels in which the answer is given."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.api.given_inputs import LOG1P, AnyData, cells_file, store_path
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.conditions.condition import LABELS, SET, agents, dose_label
from perturbdiff.config.settings import DataConfig
from perturbdiff.io.columns import Texts, as_text
from perturbdiff.io.counts import Inputs
from perturbdiff.predictions import DEPTH
from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

_DOSE = "dose"
_INDEX = "index of the user's var"


@dataclass(frozen=True)
class OwnLabels:
    """How the user's data name things.

    Attributes
    ----------
    columns
        The user's obs column of each of ``perturbation``, ``cell_type``, ``batch`` and ``dose`` that the data have.
    labels
        The user's columns themselves, one value of each label by its text: Series indexed by text.
    var
        The user's table of genes, indexed by the names that the model uses; None where it is not known.
    var_name
        Name of its index.
    """

    columns: Mapping[str, str]
    labels: Mapping[str, pd.Series] = field(default_factory=dict)
    var: pd.DataFrame | None = None
    var_name: Hashable = None

    @classmethod
    def of(cls, data: DataConfig, cells: anndata.AnnData | None = None) -> OwnLabels:
        """Return the names that a recipe gives, with the labels and genes of an AnnData if there is one."""
        keys = {name: getattr(data, f"{name}_key") for name in (*LABELS, _DOSE)}
        columns = {name: str(key) for name, key in keys.items() if key is not None}
        if cells is None:
            return cls(columns)
        labels = {
            n: _by_text(cells.obs[key]) for n, key in columns.items() if key in cells.obs and n != _DOSE
        }
        var = cells.raw.var if data.layer == "raw" and cells.raw is not None else cells.var
        names = var.index if data.gene_key is None else pd.Index(var[data.gene_key])
        genes = pd.DataFrame(var).assign(**{_INDEX: var.index}).set_index(names.map(as_text))
        return cls(columns, labels, genes, var.index.name)

    def rename(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a table of conditions with our names of its columns, and the dose in the label.

        Both names are accepted. Labels become text.
        """
        theirs = {column: name for name, column in self.columns.items() if name not in table}
        table = table.rename(columns=theirs)
        named = {name: table[name].map(as_text).astype(object) for name in LABELS if name in table}
        if _DOSE in table and "perturbation" in named:
            doses = pd.Series(pd.to_numeric(table[_DOSE], errors="coerce"), index=table.index)
            pairs = zip(named["perturbation"], doses, strict=True)
            named["perturbation"] = pd.Series(
                [dose_label(p, float(d)) if np.isfinite(d) else p for p, d in pairs], index=table.index
            )
            table = table.drop(columns=_DOSE)
        return table.assign(**named)

    def conditions(self, obs: Any, control: str) -> pd.DataFrame:
        """Return the perturbed conditions of some cells: our labels as text, and ``n_cells``.

        Raises
        ------
        UserError
            If the column with the perturbation is missing, or no cell is perturbed.
        """
        key = self.columns.get("perturbation", "perturbation")
        if key not in obs:
            hint = nearest(key, map(str, obs.columns)) or f"; columns: {listing(map(str, obs.columns))}"
            raise UserError(f"adata: no obs column '{key}' with the perturbations to predict{hint}")
        wanted = [column for column in self.columns.values() if column in obs]
        table = self.rename(pd.DataFrame(obs[wanted]))
        agent = obs[key].map(as_text).to_numpy(object)
        table = table[(agent != control) & (agent != "")]
        if not len(table):
            raise UserError(
                f"adata: obs column '{key}' has no perturbation besides '{control}'; nothing to predict"
            )
        labels = [name for name in LABELS if name in table]
        counted = pd.DataFrame(table[labels]).value_counts(sort=False)
        return pd.DataFrame(counted.rename("n_cells").reset_index())

    def apply(self, predicted: anndata.AnnData, *, counts: bool, control: str) -> anndata.AnnData:
        """Return predicted cells as the user's data would hold them.

        Parameters
        ----------
        predicted
            Cells as `perturbdiff.predictions.read_predictions` reads them.
        counts
            Whether the user's values are counts. ``X`` of log1p predictions then has counts at the depth ``target_sum``
            of uns, which are no whole numbers, and the layer ``log1p`` what the model made.
        control
            Label of the control.

        Returns
        -------
        AnnData
            Predicted cells alone. ``X`` is CSR, ``obs`` and ``var`` have the user's columns, and with whole counts
            the depths and what is predicted. ``obs`` also has ``set``, unless a column of the user's has this name.
        """
        cells = predicted[(predicted.obs["source"] == "predicted").to_numpy()]
        obs = pd.DataFrame(index=cells.obs_names)
        texts = {name: pd.Series(cells.obs[name].astype(str)) for name in LABELS}
        if _DOSE in self.columns:
            texts["perturbation"], obs[self.columns[_DOSE]] = _without_dose(texts["perturbation"], control)
        for name in LABELS:
            if name in self.columns:
                obs[self.columns[name]] = self._own(name, texts[name])
        if SET not in obs:
            obs[SET] = cells.obs[SET]
        facts = {**cells.uns["perturbdiff"], "columns": dict(self.columns)}
        values: Any = sparse.csr_matrix(cells.X)
        whole = facts["scale"] == "counts"
        if whole:
            obs[DEPTH] = cells.obs[DEPTH]
        genes = self._genes(cells.var_names)
        genes = genes.assign(predicted=cells.var["predicted"].to_numpy()) if whole else genes
        made = anndata.AnnData(values, obs, genes, uns={"perturbdiff": facts})
        if counts and not whole:
            made.layers[LOG1P] = values
            made.X = values.expm1()
            facts["scale"] = "counts"
        made.uns["perturbdiff"] = facts
        return made

    def _own(self, name: str, texts: pd.Series) -> pd.Series | pd.Categorical:
        """Return the user's values for labels as text, in the type of the user's column if it can hold them."""
        known = self.labels.get(name)
        if known is None:
            return pd.Categorical(texts)
        new = [text for text in dict.fromkeys(texts) if text not in known.index]
        if new:  # labels that the user's cells do not have stay text
            return pd.Categorical(texts)
        values = known.reindex(texts.to_numpy())
        values.index = texts.index
        if isinstance(known.dtype, pd.CategoricalDtype):
            return pd.Series(values.astype(known.dtype).cat.remove_unused_categories())
        return values.astype(known.dtype)

    def _genes(self, names: pd.Index) -> pd.DataFrame:
        if self.var is None or not self.var.index.is_unique or not names.isin(self.var.index).all():
            return pd.DataFrame(index=names)
        table = self.var.loc[list(names)]
        index = pd.Index(table[_INDEX].to_numpy(object), name=self.var_name)
        return pd.DataFrame(table.drop(columns=_INDEX).set_axis(index, axis=0))


def _by_text(column: Any) -> pd.Series:
    """Return one value of each label of a column, indexed by its text."""
    distinct = column.drop_duplicates().dropna()
    texts = [as_text(value) for value in distinct]
    found = distinct.set_axis(pd.Index(texts, dtype=object), axis=0)
    return pd.Series(found[~found.index.duplicated()])


def _without_dose(labels: pd.Series, control: str) -> tuple[pd.Series, pd.Series]:
    """Return the agents and the doses of labels such as 'imatinib@0.5'; NaN without a dose."""
    parts = {label: (agents(label, "", control=control) or ((label, None),))[0] for label in labels.unique()}
    dose = labels.map({label: np.nan if part[1] is None else part[1] for label, part in parts.items()})
    return labels.map({label: part[0] for label, part in parts.items()}), dose.astype(np.float64)


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
