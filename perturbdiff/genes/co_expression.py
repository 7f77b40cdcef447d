"""Vectors of genes from the cells of a store: which genes vary together in its control cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perturbdiff.embeddings.embedding_tables import EmbeddingTable, write_as
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.provenance import stage
from perturbdiff.store.store import Store

CO_EXPRESSION = "co-expression"
"""The name of this source among the models of `embed`."""
WIDTH = 32
CELLS = 4000


def co_expression(store: Store, *, width: int = WIDTH, cells: int = CELLS) -> EmbeddingTable:
    """Return vectors of a store's genes, whose products are the leading part of the correlations between genes.

    These are the loadings of the principal components of log1p values of control cells, each gene scaled to SD 1, times
    the components' SD. A gene that does not vary has a vector of zeros.

    Parameters
    ----------
    store
        Its control cells are read, in all contexts.
    width
        Number of components, at most the number of cells or genes less one.
    cells
        More control cells than these are thinned out evenly.

    Raises
    ------
    UserError
        If there are fewer than three control cells.
    """
    from sklearn.utils.extmath import randomized_svd  # slow to import

    table = store.conditions[store.conditions["is_control"].to_numpy(bool)]
    rows = np.concatenate(
        [np.arange(a, b) for a, b in zip(table["start"], table["stop"], strict=True)]
        or [np.empty(0, np.int64)]
    )
    if len(rows) < 3:
        raise UserError(f"{store.path}: has {len(rows)} control cells; co-expression needs at least 3")
    rows = rows[np.linspace(0, len(rows) - 1, min(cells, len(rows))).astype(np.int64)]
    values = store.dense(rows).astype(np.float64)
    values -= values.mean(axis=0)
    spread = values.std(axis=0)
    values /= np.where(spread > 0, spread, 1.0)
    kept = min(width, *(size - 1 for size in values.shape))
    _, sizes, axes = randomized_svd(values, kept, random_state=0)
    return EmbeddingTable(tuple(store.genes), axes.T * sizes / np.sqrt(len(rows)))


def embed_genes(source: Path, out: Path, *, force: bool = False) -> Path:
    """Write the `co_expression` of a store's genes as a semantic table.

    Parameters
    ----------
    source
        The store.
    out
        ``.parquet`` or ``.npz``.
    force
        Run even if an equal output is there.

    Raises
    ------
    UserError
        If the store cannot be read or has fewer than three control cells, or ``out`` has another suffix.
    """
    config = {"model": CO_EXPRESSION, "width": WIDTH, "cells": CELLS}
    with stage("embed", out, config=config, inputs={"store": source}, force=force) as run:
        if not run.skip:
            vectors = co_expression(Store(source))
            write_as(vectors, run.path, out.suffix)
            run.results |= {"names": len(vectors.names), "width": vectors.width}
    return out
