"""Integer counts of predicted cells, on all genes of the store that their control cells come from.

Each predicted cell starts from one control cell. It gets the depth of that cell, so that predicted cells are as deep as
the controls of their context, and its counts of the genes that the model does not predict. The model's log1p values
at that depth are the expected counts. They become whole numbers at random, upwards with a probability equal to the
fraction: the mean of a gene stays what the model says. Predicted cells vary as much as measured ones already, so they
are not drawn from a Poisson or multinomial distribution, which would add the noise of counting once more.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store


class CountDraws:
    """Draws whole counts.

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
        """Return counts of predicted cells, int32 CSR [n, G], and the depth of each, float32 [n].

        Parameters
        ----------
        log1p
            What the model predicts, float32 [n, genes of the model].
        rows
            The store row of the control cell that each cell starts from, int64 [n].
        controls
            The counts of these cells [n, G].
        rng
            Decides between the whole numbers below and above an expected count.
        """
        depth = self._store.n_counts[rows]
        expected = np.expm1(log1p[:, self._columns].astype(np.float64)).clip(min=0)
        expected *= depth[:, None].astype(np.float64) / self._store.target_sum
        counts = controls.toarray().astype(np.int32)
        counts[:, self.predicted] = np.floor(expected + rng.random(expected.shape))
        return sparse.csr_matrix(counts), depth
