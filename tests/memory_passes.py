"""Passes over a matrix in memory, cut into pieces and blocks, for tests of what runs in a pass."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import scipy.sparse as sp

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_sums import GeneSums, gene_groups
from perturbdiff.genes.selection import choose_genes, sums_stored_values
from perturbdiff.io.matrices import Block
from perturbdiff.preprocessing.gene_passes import SumsRequest, gene_sums, second_pass


@dataclass
class MemoryReader:
    """A `PieceReader` of some rows of a CSR matrix."""

    matrix: sp.csr_matrix
    codes: np.ndarray
    start: int
    columns: np.ndarray
    block_rows: int
    depth: np.ndarray

    @property
    def num_genes(self):
        return int(self.columns.max()) + 1

    @property
    def num_cells(self):
        return len(self.codes)

    @property
    def piece(self):
        return SimpleNamespace(start=self.start, stop=self.start + len(self.codes))

    def blocks(self):
        for a in range(self.start, self.start + len(self.codes), self.block_rows):
            b = min(a + self.block_rows, self.start + len(self.codes))
            part = self.matrix[a:b]
            yield Block(a, b, part.indptr.astype(np.int64), part.indices.astype(np.int32), part.data)

    def saved(self, name):
        assert name == "scan"
        return {"depth": self.depth}


def readers(matrix, codes, *, pieces=3, block_rows=97, log=False):
    """Return the readers of all pieces of a matrix."""
    matrix = sp.csr_matrix(matrix)
    values = matrix.copy()
    if log:
        values.data = np.expm1(values.data.astype(np.float64))
    depth = np.asarray(values.sum(axis=1, dtype=np.float64)).ravel()
    edges = np.linspace(0, matrix.shape[0], pieces + 1).astype(int)
    columns = np.arange(matrix.shape[1], dtype=np.int32)
    return [
        MemoryReader(matrix, codes[a:b], a, columns, block_rows, depth[a:b])
        for a, b in itertools.pairwise(edges.tolist())
        if b > a
    ]


def choose(matrix, genes, batch, config: DataConfig, scratch: Path, *, hidden=None, target_sum=None, **cut):
    """Choose genes as preprocess does: the first pass, the target depth, the second pass, the ranking.

    ``hidden`` cells are those that the choice must not look at.
    """
    batch = np.zeros(matrix.shape[0], int) if batch is None else np.asarray(batch)
    hidden = np.zeros(matrix.shape[0], bool) if hidden is None else hidden
    names = np.unique(batch)
    conditions = pd.DataFrame({"batch": np.repeat(names, 2)})
    codes = (2 * np.searchsorted(names, batch) + hidden).astype(np.int32)
    look = np.tile([True, False], len(names))
    log = config.input_scale == "log1p"
    pieces = readers(matrix, codes, log=log, **cut)
    group, num = gene_groups(conditions, look, by_batch=config.hvg_by_batch)
    stored = sums_stored_values(config)
    request = SumsRequest(group, num, stored=stored, log=log)
    sums = GeneSums.from_arrays(gene_sums(piece, request) for piece in pieces)
    depth = np.concatenate([piece.depth for piece in pieces])[~hidden]
    target = float(np.median(depth[depth > 0])) if target_sum is None else target_sum
    further = second_pass(config, sums, group, target, scratch)
    found = None if further is None else (further.body(piece, further.request) for piece in pieces)
    return choose_genes(
        sums, genes, 1.0 if log or stored else target, config.num_hvgs,
        by_batch=config.hvg_by_batch, flavor=config.hvg_flavor, second=found,
    )  # fmt: skip
