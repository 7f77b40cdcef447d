"""The folder that an adapter of an external method is given, written from a few labels."""

import json

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp

from perturbdiff.baselines.external import known_tools

LABELS = ["perturbation", "cell_type", "batch"]


def write_task_folder(folder, tool, labels, values, queries, options=None, *, n_counts=100.0, **facts):
    """Write a task with the quick settings of a tool; the perturbation of the first cell is the control.

    ``labels`` and ``queries`` have a row for each cell, queries with the row of their control behind the labels.
    """
    obs = pd.DataFrame(labels, columns=pd.Index(LABELS)).astype("category")
    control = labels[0][0]
    obs["is_control"] = (obs["perturbation"] == control).to_numpy()
    obs["n_counts"] = np.float32(n_counts)
    obs.index = obs.index.astype(str)
    anndata.AnnData(sp.csr_matrix(values), obs=obs).write_h5ad(folder / "train.h5ad")
    table = pd.DataFrame(queries, columns=pd.Index([*LABELS, "control_row"]))
    table.to_csv(folder / "queries.csv", index=False)
    usual = {"contract": 1, "seed": 0, "target_sum": 1e4, "has_counts": True, "threads": 1, "device": "cpu"}
    settings = known_tools.load(tool).resolve("quick", options or {})
    task = (
        usual | {"method": tool, "control": control, "device_required": False, "settings": settings} | facts
    )
    (folder / "task.json").write_text(json.dumps(task))
    return folder
