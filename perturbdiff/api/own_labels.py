"""The user's own columns, labels, genes and units, so that predictions look like the data they were made for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anndata
import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.api.given_inputs import LOG1P
from perturbdiff.conditions.condition import LABELS, SET, agents, dose_label
from perturbdiff.config.settings import DataConfig
from perturbdiff.io.columns import as_text
from perturbdiff.predictions import DEPTH
from perturbdiff.runtime.errors import UserError, listing, nearest

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
