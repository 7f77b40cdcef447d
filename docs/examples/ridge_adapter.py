"""Ridge regression of the mean change, as an adapter for `perturbdiff baseline script` (docs/adapters.md).

The change of a training population, its mean minus the mean of its controls, is regressed on one-hot columns of its
perturbation and of its cell type; a predicted cell is its matched control plus the predicted change. Needs numpy and
anndata.
"""

import numpy as np
from perturbdiff_adapter import Task, open_task

LABELS = ["perturbation", "cell_type", "batch"]


def populations(task: Task) -> dict:
    """Return the rows of every (perturbation, cell type, batch), by these labels."""
    return task.train.obs.groupby(LABELS, observed=True).indices


def mean(task: Task, rows: np.ndarray) -> np.ndarray:
    """Return the mean of training rows, float64 [G]."""
    return np.asarray(task.train.X[rows].mean(axis=0, dtype=np.float64)).ravel()


def one_hot(known: list, labels: list) -> np.ndarray:
    """Return a row for every label with a 1 in its column, none where it is unknown."""
    return np.array([[float(label == name) for name in known] for label in labels])


def changes(task: Task) -> tuple:
    """Return the perturbations, the cell types and the mean changes [n, G] of all training populations."""
    found = populations(task)
    mine, kinds, rows = [], [], []
    for (perturbation, cell_type, batch), members in found.items():
        controls = found.get((task.control, cell_type, batch))
        if perturbation != task.control and controls is not None:
            mine.append(perturbation)
            kinds.append(cell_type)
            rows.append(mean(task, members) - mean(task, controls))
    if not rows:
        task.refuse("no training population has controls of its own cell type and batch")
    return mine, kinds, np.array(rows)


def main() -> None:
    """Train, predict and write."""
    task = open_task()
    with task.phase("train"):
        perturbations, cell_types, y = changes(task)
        known, kinds = sorted(set(perturbations)), sorted(set(cell_types))
        centre = y.mean(axis=0)
        x = np.hstack([one_hot(known, perturbations), one_hot(kinds, cell_types)])
        penalty = task.settings.get("penalty", 1.0) * np.eye(x.shape[1])
        weights = np.linalg.solve(x.T @ x + penalty, x.T @ (y - centre))
        task.note(populations=len(y), residual=float(np.square(y - centre - x @ weights).mean()))
    with task.phase("predict"):
        values = task.dense(task.queries["control_row"].to_numpy())
        groups = task.queries.groupby(["perturbation", "cell_type"], sort=False).indices
        for done, ((perturbation, cell_type), rows) in enumerate(groups.items(), start=1):
            row = np.hstack([one_hot(known, [perturbation]), one_hot(kinds, [cell_type])])
            values[rows] += (centre + (row @ weights)[0]).astype(np.float32)
            task.progress(done, len(groups), "predicting")
    task.note(from_control_row=True)
    task.write(np.maximum(values, 0))


if __name__ == "__main__":
    main()
