"""The baselines of the package: copied cells, mean profiles, a linear model, and the table of all of them.

The linear model is that of Ahlmann-Eltze, Huber and Anders: change = gene embedding × W × perturbation embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task
from perturbdiff.baselines.training_changes import kernel_ridge, nearest_context
from perturbdiff.store.pseudobulk import group_means

NUM_COMPONENTS = 10
RIDGE = 0.1


def control_copy(task: Task) -> Predictor:
    """Predict no change: matched control cells that stand for all of them (`Task.matched`)."""
    return lambda condition, size: Recipe(rows=task.matched(condition, size))


def resample(task: Task) -> Predictor:
    """Predict real training cells of the same perturbation, drawn at random from all training contexts.

    Cells are repeated only if there are too few. A perturbation unseen in training gets matched controls.
    """
    labels = task.labels("perturbation")
    pools: dict[str, list[int]] = {}
    for condition in task.perturbed:
        pools.setdefault(str(labels[condition]), []).append(int(condition))
    task.report_unseen("resample", set(pools), "perturbation", "matched controls are used")

    def predict(condition: int, size: int) -> Recipe:
        pool, rng = pools.get(labels[condition]), task.rng(condition)
        if pool is None:
            return Recipe(rows=task.matched(condition, size))
        return Recipe(rows=task.rows.draw(np.array(pool), size, rng))

    return predict


def mean_of(task: Task, column: str | None) -> Predictor:
    """Predict the mean of all training cells, controls included, that share a label with the condition.

    Parameters
    ----------
    task
        What to learn from and to predict.
    column
        'perturbation', 'cell_type' or 'batch'; None for the mean of all training cells, which a label unseen in
        training gets too.
    """
    labels = task.labels(column or "perturbation")
    groups, names = task.groups(labels, task.train)
    means, cells = group_means(task.store, groups, len(names), label="training means")
    overall = cells @ means / cells.sum()
    if column is None:
        return lambda condition, size: Recipe(profile=overall)
    profile = dict(zip(names, means, strict=True))
    task.report_unseen(f"mean by {column}", set(names), column, "the mean of all training cells is used")
    return lambda condition, size: Recipe(profile=profile.get(labels[condition], overall))


def gene_embedding(profiles: np.ndarray, components: int = NUM_COMPONENTS) -> np.ndarray:
    """Return the leading principal component scores of genes, float64 [G, K].

    Genes are the observations and pseudobulks the variables, as in the reference implementation.

    Parameters
    ----------
    profiles
        float64 [n, G]: mean log1p profile of each pseudobulk.
    components
        K, which is at most n - 1 and G - 1.
    """
    centred = profiles - profiles.mean(axis=1, keepdims=True)
    keep = min(components, len(centred) - 1, centred.shape[1] - 1)
    if keep < 1:
        return np.zeros((centred.shape[1], 0))
    if len(centred) <= centred.shape[1]:  # the smaller of the two Gram matrices
        vectors = np.linalg.eigh(centred @ centred.T)[1][:, ::-1]
        return centred.T @ vectors[:, :keep]
    values, vectors = np.linalg.eigh(centred.T @ centred)
    return vectors[:, ::-1][:, :keep] * np.sqrt(np.maximum(values[::-1][:keep], 0))


def perturbation_embedding(
    labels: Sequence[str], genes: Sequence[str], embedding: np.ndarray, seen: Sequence[str]
) -> np.ndarray:
    """Return one row for each of ``labels``, float64 [n, d].

    If at least half of the perturbations seen are measured genes, those have their row of the gene embedding and
    the others a one-hot row; else all are one-hot. A label that is neither a measured gene nor seen is zero.
    """
    place = {gene: i for i, gene in enumerate(genes)}
    by_gene = 2 * sum(label in place for label in seen) >= max(len(seen), 1)
    named = [label for label in seen if not (by_gene and label in place)]
    width = embedding.shape[1] if by_gene else 0
    rows = np.zeros((len(labels), width + len(named)))
    column = {label: width + i for i, label in enumerate(named)}
    for i, label in enumerate(labels):
        if by_gene and label in place:
            rows[i, :width] = embedding[place[label]]
        elif label in column:
            rows[i, column[label]] = 1.0
    return rows


def solve(
    changes: np.ndarray,
    counts: np.ndarray,
    genes: np.ndarray,
    perturbations: np.ndarray,
    ridge: float = RIDGE,
) -> tuple[np.ndarray, np.ndarray]:
    """Return W [K, d] and b [G] of Y ≈ G W P + b, with Y's columns summed by perturbation.

    W = (GᵀG + λI)⁻¹ Gᵀ (Y - b) Pᵀ (PPᵀ + λI)⁻¹, b the row mean of Y. Conditions of one perturbation share a column
    of P, so sums over them give (Y - b) Pᵀ and PPᵀ exactly.

    Parameters
    ----------
    changes
        float64 [n, G]: sum of the changes over the conditions of each perturbation.
    counts
        int [n]: number of its conditions.
    genes
        G, float64 [G, K].
    perturbations
        Pᵀ by perturbation, float64 [n, d].
    ridge
        λ.
    """
    mean = changes.sum(axis=0) / counts.sum()
    centred = changes - counts[:, None] * mean
    left = np.linalg.solve(
        genes.T @ genes + ridge * np.eye(genes.shape[1]), genes.T @ centred.T @ perturbations
    )
    gram = perturbations.T @ (counts[:, None] * perturbations) + ridge * np.eye(perturbations.shape[1])
    return np.linalg.solve(gram, left.T).T, mean


def linear(task: Task) -> Predictor:
    """Predict matched control cells plus the change of the linear model, clipped at 0.

    Pseudobulks are (cell type, perturbation); changes are against the controls of the cell type (all controls if it
    has none). A perturbation without an embedding gets the mean change b.
    """
    cell_type, perturbation = task.labels("cell_type"), task.labels("perturbation")
    key = np.array([f"{c}\0{p}" for c, p in zip(cell_type, perturbation, strict=True)], dtype=object)
    groups, names = task.groups(key, task.train)
    profiles, cells = group_means(task.store, groups, len(names), label="training pseudobulks")
    control = np.zeros(len(names), dtype=bool)
    control[groups[task.train & task.is_control]] = True
    pairs = [name.split("\0") for name in names]
    base = {
        pair[0]: profile
        for pair, profile, is_control in zip(pairs, profiles, control, strict=True)
        if is_control
    }
    every = cells[control] @ profiles[control] / cells[control].sum()
    seen = sorted({pair[1] for pair, is_control in zip(pairs, control, strict=True) if not is_control})
    embedding = gene_embedding(profiles)
    number = {label: i for i, label in enumerate(seen)}
    changes, counts = np.zeros((len(seen), task.store.n_genes)), np.zeros(len(seen))
    for (kind, label), profile, is_control in zip(pairs, profiles, control, strict=True):
        if not is_control:
            changes[number[label]] += profile - base.get(kind, every)
            counts[number[label]] += 1
    genes = task.store.genes
    weights, mean = solve(changes, counts, embedding, perturbation_embedding(seen, genes, embedding, seen))
    wanted = sorted(set(perturbation[task.wanted]))
    embeddings = perturbation_embedding(wanted, genes, embedding, seen)
    known = {label for label, row in zip(wanted, embeddings, strict=True) if row.any()}
    task.report_unseen("linear", known, "perturbation", "the mean change is used")
    change = {
        label: embedding @ (weights @ row) + mean for label, row in zip(wanted, embeddings, strict=True)
    }

    def predict(condition: int, size: int) -> Recipe:
        rows = task.matched(condition, size)
        return Recipe(rows=rows, shift=change[perturbation[condition]])

    return predict


@dataclass(frozen=True)
class Baseline:
    """A built-in baseline. With equal seeds, its predictions are equal bit for bit.

    Attributes
    ----------
    learn
        Learns from a task and returns the predictor.
    cell
        What a predicted cell is.
    unseen
        What it is for a perturbation that does not occur in training.
    from_controls
        Whether predicted cells are made from matched control cells.
    trained
        Whether it uses the training cells. If so, predictions of training conditions count as seen.
    needs_vectors
        Whether it needs a table of perturbation vectors.
    """

    learn: Callable[[Task], Predictor]
    cell: str
    unseen: str
    from_controls: bool = False
    trained: bool = True
    needs_vectors: bool = False


BASELINES: Mapping[str, Baseline] = {
    "control": Baseline(
        control_copy,
        "a matched control cell, without any change",
        "the same",
        from_controls=True,
        trained=False,
    ),
    "mean-perturbation": Baseline(
        partial(mean_of, column="perturbation"),
        "the mean of all training cells with this perturbation",
        "mean of all training cells",
    ),
    "mean-celltype": Baseline(
        partial(mean_of, column="cell_type"), "the mean of all training cells of this cell type", "–"
    ),
    "mean-batch": Baseline(
        partial(mean_of, column="batch"), "the mean of all training cells of this batch", "–"
    ),
    "mean-overall": Baseline(partial(mean_of, column=None), "the mean of all training cells", "–"),
    "linear": Baseline(
        linear,
        "a matched control cell plus the change of a linear model, clipped at 0",
        "the model's change if perturbations are described by genes and this one is a measured gene (below). "
        "Otherwise the mean change of all conditions",
        from_controls=True,
    ),
    "nearest-context": Baseline(
        nearest_context,
        "a matched control cell plus the mean change in the nearest training contexts, clipped at 0",
        "sum of its agents' changes if it is a combination of agents seen alone, else mean change of all conditions",
        from_controls=True,
    ),
    "resample": Baseline(resample, "a real training cell with this perturbation", "a matched control cell"),
    "kernel-ridge": Baseline(
        kernel_ridge,
        "as `nearest-context`",
        "a matched control cell plus the change that kernel ridge regression predicts from the perturbation's vector "
        "(`--embedding`), clipped at 0. The sum of its agents' changes if it is a combination",
        from_controls=True,
        needs_vectors=True,
    ),
}
"""The built-in baselines by name. The command line, the report and the documentation read this table."""

NAMES = tuple(name for name, baseline in BASELINES.items() if not baseline.needs_vectors)
"""The baselines that need a store and a split only. What compares with all baselines uses these, and a test compares
the workflow's lists with them."""
