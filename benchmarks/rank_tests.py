"""Rank tests of every perturbation of a file against its controls, by one engine: a part of `evaluators.py`.

    python benchmarks/rank_tests.py ours|numba-mwu|illico FILE [--log] [--most 30] [--save P.npy]

Run with the Python of an environment that has the engine. The file (h5ad, counts) is read into memory; with ``--log``
counts are scaled to a million per cell and log1p-ed in float64, as cell-eval2 tests them. Each engine is compiled on
a few cells first. Prints seconds of CPU and wall time of the tests (controls sorted or indexed among them), and for
a comparison of engines saves p, [perturbations, genes].
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CONTROL, COLUMN = "control", "perturbation"
Matrix = Any
Test = Callable[[Matrix, list[Matrix]], list[np.ndarray]]
"""From control cells and those of each perturbation to p of each."""


def ours() -> Test:
    from perturbdiff.evaluation.metrics.differential import DEFINITIONS, Controls

    def test(control: Matrix, groups: list[Matrix]) -> list[np.ndarray]:
        controls = Controls(control)
        return [controls.test(cells, definition=DEFINITIONS["cell-eval-0.8.2"])[0] for cells in groups]

    return test


def numba_mwu() -> Test:
    from numba_mwu import mannwhitneyu_sparse, sparse_column_index

    def test(control: Matrix, groups: list[Matrix]) -> list[np.ndarray]:
        index = sparse_column_index(control)
        return [np.clip(mannwhitneyu_sparse(cells, index).pvalue, 0, 1) for cells in groups]

    return test


def illico() -> Test:
    import anndata as ad
    import pandas as pd
    import scipy.sparse as sp
    from illico import asymptotic_wilcoxon

    def test(control: Matrix, groups: list[Matrix]) -> list[np.ndarray]:
        names = [CONTROL, *(f"p{k:05}" for k in range(len(groups)))]
        labels = np.repeat(names, [control.shape[0], *(cells.shape[0] for cells in groups)])
        obs = pd.DataFrame({COLUMN: labels}, index=pd.Index(np.arange(len(labels)).astype(str)))
        cells = ad.AnnData(sp.vstack([control, *groups], "csr"), obs)
        found = asymptotic_wilcoxon(cells, is_log1p=True, group_keys=COLUMN, reference=CONTROL, n_threads=1)
        return [found.loc[name, "p_value"].to_numpy() for name in names[1:]]

    return test


ENGINES = {"ours": ours, "numba-mwu": numba_mwu, "illico": illico}


def read(given: argparse.Namespace) -> tuple[Matrix, list[Matrix]]:
    """Return the control cells and those of each perturbation, CSR."""
    import anndata as ad

    cells: Any = ad.read_h5ad(given.file)
    values, labels = cells.X.tocsr(), cells.obs[COLUMN].astype(str).to_numpy()
    names = sorted(set(labels) - {CONTROL})[: given.most]
    found = [values[labels == name] for name in [CONTROL, *names]]
    del cells, values
    for group in found:
        if given.log:
            factor = np.asarray(group.sum(axis=1), np.float64).ravel() / 1e6
            group.data = np.log1p(group.data.astype(np.float64) / np.repeat(factor, np.diff(group.indptr)))
    return found[0], found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("file")
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--most", type=int)
    parser.add_argument("--save")
    given = parser.parse_args()
    test = ENGINES[given.engine]()
    control, groups = read(given)
    test(control[:40], [cells[:20] for cells in groups[:2]])
    wall, cpu = time.perf_counter(), time.process_time()
    found = test(control, groups)
    took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tests": len(found)}
    if given.save:
        np.save(given.save, np.array(found))
    print(json.dumps(took))


if __name__ == "__main__":
    main()
