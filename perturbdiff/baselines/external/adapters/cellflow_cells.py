"""What CellFlow is trained on: principal components, control populations and embeddings of the conditions.

Needs numpy, pandas and scipy only, so that the core package's tests read it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.linalg
import scipy.sparse as sp

_ROWS_PER_BLOCK = 4096
_BORROWED_CONTROLS = (
    10_000  # a context without controls borrows at most so many: enough to sample batches from
)
_GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
_COST_OF_A_CALL = 32  # what one call of the solver costs beyond its cells, in cells

Context = tuple[str, str]
"""Cell type and batch."""


@dataclass(frozen=True)
class Components:
    """Principal components of log1p expression.

    Attributes
    ----------
    mean
        float32 [G]: mean of the training cells.
    loadings
        float32 [G, K]: orthonormal columns, by falling variance.
    share
        Share of the training cells' variance that they hold, 0 to 1.
    """

    mean: np.ndarray
    loadings: np.ndarray
    share: float

    def project(self, values: sp.csr_matrix) -> np.ndarray:
        """Return the coordinates, float32 [n, K], of log1p cells, CSR [n, G]."""
        return np.asarray(values @ self.loadings - self.mean @ self.loadings, dtype=np.float32)

    def decode(self, coordinates: np.ndarray) -> np.ndarray:
        """Return log1p expression, float32 [n, G], of coordinates [n, K]; below 0 there is none, so it is cut there."""
        values = coordinates @ self.loadings.T
        values += self.mean
        return np.maximum(values, 0, out=values)


def components(values: sp.csr_matrix, count: int) -> Components:
    """Return the leading principal components of cells; memory is G² and a block of cells.

    Exact, from the genes' covariance: CellFlow's own ``centered_pca`` finds the same subspace, but holds all cells
    densely, twice.

    Parameters
    ----------
    values
        CSR float32 [n, G] log1p, n ≥ 2.
    count
        Components wanted; fewer if there are not so many cells or genes.
    """
    n_cells, n_genes = values.shape
    count = max(1, min(count, n_genes, n_cells - 1))
    mean = np.asarray(values.mean(axis=0, dtype=np.float64)).reshape(-1)
    scatter = np.zeros((n_genes, n_genes))
    for first in range(0, n_cells, _ROWS_PER_BLOCK):
        block = values[first : first + _ROWS_PER_BLOCK].toarray().astype(np.float64) - mean
        scatter += block.T @ block
    variances, vectors = scipy.linalg.eigh(scatter, subset_by_index=[n_genes - count, n_genes - 1])
    vectors = vectors[:, ::-1]
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(count)]
    vectors = vectors * np.where(largest < 0, -1.0, 1.0)  # an eigenvector's sign is arbitrary: fix it
    share = float(variances.sum() / max(np.trace(scatter), np.finfo(np.float64).tiny))
    return Components(mean.astype(np.float32), np.ascontiguousarray(vectors, dtype=np.float32), share)


class Controls:
    """The control cells of every context (cell type, batch), and which it borrows if it has none.

    Parameters
    ----------
    cell_type, batch
        Labels of the training cells, object [n].
    is_control
        bool [n].
    """

    def __init__(self, cell_type: np.ndarray, batch: np.ndarray, is_control: np.ndarray) -> None:
        rows = np.flatnonzero(is_control)
        self._all = rows
        pairs = pd.Series(list(zip(cell_type[rows], batch[rows], strict=True)))
        self._context = _rows_by(rows, pairs)
        self._cell_type = _rows_by(rows, pd.Series(cell_type[rows]))
        self._batch = _rows_by(rows, pd.Series(batch[rows]))

    def has(self, context: Context) -> bool:
        """Whether the context has controls of its own."""
        return context in self._context

    def rows(self, context: Context, rng: np.random.Generator) -> np.ndarray:
        """Return training rows, int64 ascending, of its controls, else of its cell type's, its batch's or of all."""
        found = self._context.get(context)
        if found is not None:
            return found
        found = self._cell_type.get(context[0], self._batch.get(context[1], self._all))
        if len(found) > _BORROWED_CONTROLS:
            found = np.sort(rng.choice(found, _BORROWED_CONTROLS, replace=False))
        return found


def _rows_by(rows: np.ndarray, labels: pd.Series) -> dict:
    return {key: rows[at] for key, at in labels.groupby(labels, sort=False).indices.items()}


@dataclass(frozen=True)
class Table:
    """The cells of the training, a line each; a control that several contexts share occurs several times.

    Attributes
    ----------
    rows
        int64 [m]: rows of the training cells.
    contexts
        The contexts that have perturbed cells, sorted.
    context
        int64 [m]: which of them.
    borrowing
        Those of them that have no controls of their own.
    """

    rows: np.ndarray
    contexts: list[Context]
    context: np.ndarray
    borrowing: list[Context]


def training_table(
    cell_type: np.ndarray,
    batch: np.ndarray,
    is_control: np.ndarray,
    controls: Controls,
    rng: np.random.Generator,
) -> Table:
    """Return the perturbed cells of every context, each context with its controls.

    CellFlow wants both in every population: contexts with controls only are left out of training.
    """
    perturbed = np.flatnonzero(~is_control)
    pairs = pd.Series(list(zip(cell_type[perturbed], batch[perturbed], strict=True)))
    found = _rows_by(perturbed, pairs)
    contexts = sorted(found)
    rows, codes = [], []
    for code, context in enumerate(contexts):
        members = np.concatenate([controls.rows(context, rng), found[context]])
        rows.append(members)
        codes.append(np.full(len(members), code, dtype=np.int64))
    borrowing = [context for context in contexts if not controls.has(context)]
    return Table(np.concatenate(rows), contexts, np.concatenate(codes), borrowing)


def context_embeddings(
    kind: str,
    contexts: Sequence[Context],
    means: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return what the model is told of each context: covariates by name, each float32 [n_contexts, width].

    Parameters
    ----------
    kind
        'controls': one covariate, the mean of the context's control cells in principal components, centred and brought
        to unit size, which says something of contexts never seen with a perturbation too; 'one-hot': cell type and
        batch, each one-hot.
    contexts
        Contexts of training and prediction.
    means
        float32 [n_contexts, K]: mean coordinates of their controls.

    Returns
    -------
    dict
        Without covariates that are the same for all contexts.
    """
    if kind == "one-hot":
        columns = dict(zip(("cell_type", "batch"), zip(*contexts, strict=True), strict=True))
        return {name: one_hot(column) for name, column in columns.items() if len(set(column)) > 1}
    if len(contexts) < 2:
        return {}
    centred = means - means.mean(axis=0)
    size = np.sqrt(np.mean(np.square(centred))) or 1.0
    return {"context": (centred / size).astype(np.float32)}


def one_hot(labels: Iterable[str]) -> np.ndarray:
    """Return float32 [n, number of labels] with a one in each line; labels count in sorted order."""
    codes = pd.factorize(np.asarray(list(labels), dtype=object), sort=True)[0]
    return np.eye(codes.max() + 1, dtype=np.float32)[codes]


def group_size(sizes: Sequence[int]) -> int:
    """Return the number of cells per call that makes predicting groups of these sizes cheapest.

    The solver is compiled anew for every number of cells, so all calls are given the same, filled up with repeats.
    """

    def cost(size: int) -> int:
        calls = sum(-(-n // size) for n in sizes)
        return calls * (size + _COST_OF_A_CALL)

    return min(_GROUP_SIZES, key=cost)


def filled_chunks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut rows into pieces of exactly ``size``, the last filled up with repeats of its own first row."""
    pieces = [rows[first : first + size] for first in range(0, len(rows), size)]
    last = pieces[-1]
    pieces[-1] = np.concatenate([last, np.repeat(last[:1], size - len(last))])
    return pieces
