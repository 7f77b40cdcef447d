"""True and sampled sets of some conditions in two dimensions, for a figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from perturbdiff.conditions.condition import Condition
from perturbdiff.evaluation.metrics.set_metrics import set_places
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.condition_sets import read_sets


def place_sets(pairing: Pairing, conditions: Sequence[Condition], *, seed: int) -> pd.DataFrame:
    """Return a row for each set of the conditions.

    Returns
    -------
    DataFrame
        condition ("cell type|batch|perturbation"), source (real, predicted), x, y (roots of energy distances along the
        two directions in which the true sets differ most), explained_x, explained_y (shares of the scatter of the true
        sets). Empty if it is not known which cells were a set.
    """
    tables = [pd.DataFrame()]
    for condition in conditions if pairing.sets is not None else ():
        predicted, real, _ = read_sets(pairing, condition, None, seed=seed).dense()
        with threadpool_limits(1, "blas"):  # sums keep their order
            found = set_places(predicted, real)
        if found is None:
            continue
        *places, shares = found
        for source, xy in zip(("predicted", "real"), places, strict=True):
            table = pd.DataFrame(xy.astype(np.float32), columns=pd.Index(["x", "y"]))
            table = table.assign(explained_x=np.float32(shares[0]), explained_y=np.float32(shares[1]))
            tables.append(table.assign(condition=str(condition), source=source))
    return pd.concat(tables, ignore_index=True)
