"""`Scores`: the table of methods and metrics that an evaluation gives, as a DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from perturbdiff.reporting.loading.metric_columns import key_columns, metric_columns, score_table
from perturbdiff.reporting.loading.results import POOLED, Run, read_runs
from perturbdiff.runtime.errors import UserError, listing, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ALL = "*"  # the perturbation of a metric that has one value for all of them


class Scores(pd.DataFrame):
    """Mean scores, a row per method and a column per metric: a DataFrame with figures and details.

    Rows are the model, the baselines and the ceiling (the score of one half of the real cells against the other).
    NaN stands for a score that is not defined. Whatever is taken from the table (``scores["PDCorr"]``,
    ``scores.loc["linear"]``) is plain pandas.

    Attributes
    ----------
    per_perturbation
        The scores of single perturbations: rows by (method, perturbation), a column per metric. Distances between
        populations are means over the conditions of a perturbation.
    details
        One row per (method, metric): ``mean``, ``low`` and ``high`` (95 % bootstrap interval over perturbations),
        ``chance`` (the same predictions given to other perturbations), ``n_defined`` and ``n`` (perturbations with a
        defined score, and all), ``direction`` (``higher`` or ``lower`` is better, ``one``: best at 1, ``none``).
    folders
        The folders of `perturbdiff evaluate` behind the table. ``perturbdiff.report(scores, "report.html")`` reads
        them. If no output was named they are temporary, and go when this object does.

    Examples
    --------
    >>> scores = model.evaluate(baselines=("control", "linear"))
    >>> list(scores.index)
    ['perturbdiff', 'control', 'linear', 'ceiling']
    >>> best = scores["energy_distance"].drop("ceiling").idxmin()
    >>> scores.plot().savefig(folder / "scores.png")
    """

    _metadata = ["per_perturbation", "details", "folders", "_runs", "_kept"]  # noqa: RUF012  pandas wants a list

    per_perturbation: pd.DataFrame
    details: pd.DataFrame
    folders: tuple[Path, ...]
    _runs: list[Run]
    _kept: Any

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        """What pandas makes of a part of the table."""
        return pd.DataFrame

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plain table, without its folders."""
        return pd.DataFrame, (self.to_numpy(), self.index, self.columns)

    @classmethod
    def read(cls, folders: Sequence[str | Path]) -> Scores:
        """Return the scores in folders that `perturbdiff evaluate` and `ceiling` wrote, on one data set.

        Raises
        ------
        UserError
            If a folder is none of `evaluate`'s, or they are of several data sets.

        Examples
        --------
        >>> again = perturbdiff.Scores.read(scores.folders)
        """
        runs = read_runs([Path(folder) for folder in folders])
        data_sets = dict.fromkeys(run.dataset for run in runs)
        if len(data_sets) > 1:
            raise UserError(
                f"scores of several data sets ({listing(data_sets)}) make no table; read each by itself"
            )
        columns = metric_columns(runs)
        table = cls(score_table(runs, columns).rename_axis(index="method", columns="metric"))
        table.per_perturbation = _per_perturbation(runs, [c.name for c in columns])
        table.details = _details(runs)
        table.folders = tuple(run.path for run in runs)
        table._runs = runs
        return table

    def keep(self, owner: Any) -> None:
        """Hold ``owner``, whose folder the scores lie in, as long as this table lives."""
        self._kept = owner

    def plot(self, metrics: Sequence[str] | None = None) -> Figure:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw the mean scores of all methods with their 95 % intervals, a panel per metric.

        The dashed line is chance, the solid line the ceiling.

        Parameters
        ----------
        metrics
            Names of columns. Default: the main metrics of each kind that are defined.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it. ``savefig`` writes it to a file.

        Raises
        ------
        UserError
            If there is no such metric.

        Examples
        --------
        >>> figure = scores.plot(["energy_distance", "PDCorr"])
        """
        from perturbdiff.api.score_figure import draw

        known = metric_columns(self._runs)
        if metrics is None:
            return draw(self._runs, [c for c in key_columns(known) if bool(np.isfinite(self[c.name]).any())])
        by_name = {column.name: column for column in known}
        if unknown := [name for name in metrics if name not in by_name]:
            raise UserError(
                f"no metric '{unknown[0]}'{nearest(unknown[0], by_name) or ';'} metrics: {listing(by_name, 60)}"
            )
        return draw(self._runs, [by_name[name] for name in metrics])


def _per_perturbation(runs: Sequence[Run], names: Sequence[str]) -> pd.DataFrame:
    """Return the scores of single perturbations over the whole pool [(method, perturbation) × metrics]."""
    frames = []
    for run in runs:
        table = run.metrics
        wanted = table["scope_kind"].isin([POOLED[0], "condition"]) & (table["perturbation"] != _ALL)
        rows = table.loc[wanted, ["scope_kind", "perturbation", "metric", "value"]].astype(
            {"scope_kind": str, "perturbation": str, "metric": str}
        )
        pooled = set(rows["metric"][rows["scope_kind"] == POOLED[0]])
        rows = rows[(rows["scope_kind"] == POOLED[0]) | ~rows["metric"].isin(pooled)]
        means = rows.groupby(["perturbation", "metric"])["value"].mean().unstack("metric")
        frames.append(pd.concat({run.method: means}, names=["method", "perturbation"]))
    joined = pd.concat(frames)
    return joined.reindex(columns=[name for name in names if name in joined]).rename_axis(columns="metric")


def _details(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the pooled rows of every run's table of means, indexed by method and metric."""
    wanted = ["nanmean", "low", "high", "chance", "n_defined", "n", "direction"]
    frames: dict[str, pd.DataFrame] = {}
    for run in runs:
        pooled = run.aggregate[run.aggregate["scope_kind"] == POOLED[0]]
        numbers: dict[str, Any] = {
            name: pooled[name]
            if name == "direction"
            else pd.to_numeric(pooled[name], errors="coerce")
            if name in pooled
            else np.nan
            for name in wanted
        }
        frames[run.method] = pd.DataFrame(numbers).set_index(pd.Index(pooled["metric"].astype(str)))
    return pd.concat(frames, names=["method", "metric"]).rename(columns={"nanmean": "mean"})
