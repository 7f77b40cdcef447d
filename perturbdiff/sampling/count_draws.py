"""Integer counts of predicted cells, on all genes of the store that their control cells come from.

Each predicted cell starts from one control cell. It gets the depth of that cell, so that predicted cells are as deep as
the controls of their context, and its counts of the genes that the model does not predict. The model's log1p values
at that depth are the expected counts, which `whole_counts` makes whole. Predicted cells vary as much as measured ones
already, so they are not drawn from a Poisson or multinomial distribution, which would add the noise of counting once
more.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store


def whole_counts(expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return whole numbers whose sum over the cells of a set is, for each gene, on average the expected one.

    As many cells of the set express a gene as are expected to. A measured cell that expresses a gene has at least one
    count of it, so each of them gets one, and the rest of the sum is shared out in proportion to what they have above
    one count, rounded at random: upwards with a probability equal to the fraction. Where the sum is less than one
    count for each, a cell gets its count with a probability that rises with its expected count, up to one.

    Parameters
    ----------
    expected
        Expected counts of a set, ≥ 0, float64 [cells, genes].
    rng
        Source of the random numbers.

    Returns
    -------
    np.ndarray
        Whole numbers as float64 [cells, genes]; 0 where 0 is expected.
    """
    expressed = expected > 0
    number, total = expressed.sum(axis=0), expected.sum(axis=0)
    one = np.minimum(expected, 1.0)
    above = expected - one
    enough = total >= number
    chance = np.where(
        enough, 1.0, one + (1.0 - one) * _share(total - one.sum(axis=0), number - one.sum(axis=0))
    )
    more = above * np.where(enough, _share(total - number, above.sum(axis=0)), 0.0)
    counted = (rng.random(expected.shape) < chance) + np.floor(more + rng.random(expected.shape))
    return np.where(expressed, counted, 0.0)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole between 0 and 1; 0 where nothing is whole."""
    return np.divide(part, whole, out=np.zeros_like(whole, np.float64), where=whole > 0).clip(0.0, 1.0)


class CountDraws:
    """Draws whole counts of sets of predicted cells.

    Parameters
    ----------
    store
        The store of the control cells.
    gene_map
        Brings the store's genes into the model's order.

    Attributes
    ----------
    predicted
        Which of the store's genes the model predicts, bool [G].

    Raises
    ------
    UserError
        If the store has no counts.
    """

    def __init__(self, store: Store, gene_map: GeneMap) -> None:
        if store.input_scale == "log1p":
            raise UserError(
                f"{store.path}: holds log1p values, so it has no depths to draw counts at; leave out --values counts, "
                "or preprocess raw counts"
            )
        self._store = store
        self.predicted = gene_map.columns >= 0
        self._columns = gene_map.columns[self.predicted]

    def __call__(
        self, log1p: np.ndarray, rows: np.ndarray, controls: sparse.csr_matrix, rng: np.random.Generator
    ) -> tuple[sparse.csr_matrix, np.ndarray]:
        """Return counts of the cells of a set, int32 CSR [n, G], and the depth of each, float32 [n].

        Parameters
        ----------
        log1p
            What the model predicts, float32 [n, genes of the model].
        rows
            The store row of the control cell that each cell starts from, int64 [n].
        controls
            The counts of these cells [n, G].
        rng
            Source of the random numbers.
        """
        depth = self._store.depths(rows)
        expected = np.expm1(log1p[:, self._columns].astype(np.float64)).clip(min=0)
        expected *= depth[:, None].astype(np.float64) / self._store.target_sum
        counts = controls.toarray().astype(np.int32)
        counts[:, self.predicted] = whole_counts(expected, rng)
        return sparse.csr_matrix(counts), depth
