"""Scores of the same rows in several random splits: their mean, and how much it varies with the split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

_PREFIX = "split"
_KEYS = ["scope_kind", "scope", "metric"]


def joined(
    splits: Sequence[pd.DataFrame], values: Sequence[str], *, keep: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the first table with the means over all splits, and the values of each split beside them.

    Parameters
    ----------
    splits
        Tables with the same rows in the same order.
    values
        Columns to average over the splits where they are defined.
    keep
        Those of ``values`` whose numbers of each split become columns of their own, for `taken_apart`. A row that
        is ``ok`` in any split is so in the result.
    """
    table, beside = splits[0].copy(), dict[str, np.ndarray]()
    for name in values:
        numbers = np.stack([split[name].to_numpy(np.float64) for split in splits])
        count = (~np.isnan(numbers)).sum(axis=0)
        total = np.nansum(numbers, axis=0)
        table[name] = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
        if name in keep:
            beside |= {f"{_PREFIX} {k} {name}": of_split for k, of_split in enumerate(numbers)}
    if "status" in table:
        fine = np.any([split["status"].to_numpy() == "ok" for split in splits], axis=0)
        table["status"] = np.where(fine, "ok", table["status"].to_numpy(object))
    return pd.concat([table, pd.DataFrame(beside, index=table.index)], axis=1) if beside else table


def taken_apart(table: pd.DataFrame) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """Return a table of `joined` without the numbers of single splits, and that of each split; none: no list.

    Where a value is not defined in a split, that split has the mean of the others, so that the means of the splits
    are over the same rows, and their mean is that of the table.
    """
    extra = [c for c in table.columns if str(c).startswith(f"{_PREFIX} ")]
    plain = pd.DataFrame(table.drop(columns=extra))
    found: dict[str, dict[str, pd.Series]] = {}
    for column in extra:
        _, number, name = str(column).split(" ", 2)
        found.setdefault(number, {})[name] = pd.Series(table[column]).fillna(table[name])
    return plain, [plain.assign(**columns) for columns in found.values()]


def deviation(means: pd.DataFrame, of_splits: Sequence[pd.DataFrame]) -> np.ndarray:
    """Return the SD over splits (n − 1) of the mean of each scope and metric, NaN with a single split.

    Parameters
    ----------
    means
        What `aggregate.aggregate` made of the joined tables: the result follows its rows.
    of_splits
        What it made of each split.
    """
    index = pd.MultiIndex.from_frame(pd.DataFrame(means[_KEYS]))
    each = [split.set_index(_KEYS)["nanmean"].reindex(index).to_numpy(np.float64) for split in of_splits]
    if len(each) < 2:
        return np.full(len(means), np.nan)
    return np.std(np.stack(each), axis=0, ddof=1)
