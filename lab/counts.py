"""Which way of making whole counts leaves cells as they are? On real cells, and on predictions.

    python lab/counts.py STORE
    python lab/counts.py STORE --log1p PREDICTIONS --counts PREDICTIONS

The first line of numbers of each table is what the cells are, the others what they become. Real perturbed cells get
either their own depth or that of a random control cell of their context. Predictions are the same ones twice, as
``sample`` writes them with ``--values log1p`` and ``counts``: they keep the depths of the second file. Prints Markdown:
means over conditions of the ratio to the real cells, and the share of genes that differ from the controls (Mann-Whitney
test, Benjamini-Hochberg below .05).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy import stats

from perturbdiff.sampling.count_draws import whole_counts
from perturbdiff.store.store import Store

SET = 64  # cells that are rounded together
Way = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _multinomial(expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    sums = expected.sum(axis=1, keepdims=True)
    shares = expected / np.where(sums > 0, sums, 1)
    return np.array([rng.multinomial(round(float(s)), p) for s, p in zip(sums[:, 0], shares, strict=True)])


WAYS: dict[str, Way] = {
    "as `sample` does": whole_counts,
    "each value rounded at random": lambda expected, rng: np.floor(expected + rng.random(expected.shape)),
    "nearest whole number": lambda expected, rng: np.rint(expected),
    "Poisson": lambda expected, rng: rng.poisson(expected),
    "multinomial": _multinomial,
}


def by_set(way: Way, expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return whole counts, float64 [cells, genes], made set by set."""
    sets = [way(expected[k : k + SET], rng) for k in range(0, len(expected), SET)]
    return np.concatenate(sets).astype(np.float64)


class Condition:
    """Real cells of a condition and its controls."""

    def __init__(self, store: Store, row: pd.Series) -> None:
        table = store.conditions
        mine = (
            (table["cell_type"] == row["cell_type"]) & (table["batch"] == row["batch"]) & table["is_control"]
        )
        control = table[mine].iloc[0]
        self.rows = slice(int(row["start"]), int(row["stop"]))
        self.control_rows = slice(int(control["start"]), int(control["stop"]))
        self.real = store.expression(self.rows).toarray().astype(np.float64)
        self.controls = store.expression(self.control_rows).toarray()
        self.scale = store.target_sum

    def numbers(self, log1p: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """Return what cells are like, beside the real ones."""
        real, change = self.real, self.real.mean(axis=0) - self.controls.mean(axis=0)
        p = np.nan_to_num(stats.mannwhitneyu(log1p, self.controls, axis=0).pvalue, nan=1.0)
        return {
            "above zero": (log1p > 0).mean() / (real > 0).mean(),
            "mean of log1p": log1p.mean() / real.mean(),
            "mean of normalised counts": np.expm1(log1p).mean() / np.expm1(real).mean(),
            "variance of log1p": log1p.var(axis=0).sum() / real.var(axis=0).sum(),
            "MSE of the mean profile": float(np.mean((log1p.mean(axis=0) - real.mean(axis=0)) ** 2)),
            "correlation of changes": float(
                np.corrcoef(log1p.mean(axis=0) - self.controls.mean(axis=0), change)[0, 1]
            ),
            "genes that differ": float((stats.false_discovery_control(p) < 0.05).mean()),
            "median sum of counts": float(np.median(counts.sum(axis=1))),
        }

    def ways(self, log1p: np.ndarray, depth: np.ndarray) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield what cells become, given their log1p values and the depths that they get."""
        factor = depth[:, None].astype(np.float64) / self.scale
        expected = np.expm1(log1p) * factor
        yield "what they are", self.numbers(log1p, expected)
        for name, way in WAYS.items():
            counts = by_set(way, expected, np.random.default_rng(0))
            yield name, self.numbers(np.log1p(counts / factor), counts)


def real_cells(store: Store) -> pd.DataFrame:
    """Return the numbers of real cells at their own depth and at those of random controls."""
    lines, depths, rng = [], [], np.random.default_rng(1)
    for _, row in store.conditions[~store.conditions["is_control"]].iterrows():
        condition = Condition(store, row)
        own, pool = store.n_counts[condition.rows], store.n_counts[condition.control_rows]
        drawn = rng.permutation(np.resize(rng.permutation(pool), len(own)))
        depths.append((np.median(own) / np.median(pool), stats.ks_2samp(own, pool).statistic, *_fits(pool)))
        for what, depth in (("own depth", own), ("depth of a random control", drawn)):
            lines += [{"cells": what, "way": w, **n} for w, n in condition.ways(condition.real, depth)]
    ratio, distance, normal, log_normal = np.mean(depths, axis=0)
    print(
        f"median depth of perturbed cells beside controls {ratio:.3f}, distance of distributions (KS) {distance:.3f}; "
        f"controls from a fitted normal {normal:.3f}, from a log-normal {log_normal:.3f}\n"
    )
    return pd.DataFrame(lines)


def _fits(depth: np.ndarray) -> tuple[float, float]:
    """Return the largest distance of the depths from a fitted normal and log-normal distribution."""
    return tuple(
        float(stats.kstest((x - x.mean()) / x.std(), "norm").statistic) for x in (depth, np.log(depth))
    )  # type: ignore[return-value]


def predictions(store: Store, log1p: Path, counts: Path) -> pd.DataFrame:
    """Return the numbers of predicted cells, at the depths of the file of counts."""
    plain, whole = ad.read_h5ad(log1p), ad.read_h5ad(counts)
    labels, lines = ["cell_type", "batch", "perturbation"], []
    mine = (plain.obs["source"] == "predicted").to_numpy()
    groups = plain.obs[mine].astype(str).reset_index(drop=True).groupby(labels).groups
    values, depth = plain.X[mine].toarray().astype(np.float64), whole.obs["n_counts"].to_numpy()[mine]
    for _, row in store.conditions.iterrows():
        if (key := tuple(row[labels])) in groups:
            cells = np.asarray(groups[key])
            condition = Condition(store, row)
            real = store.counts(condition.rows).toarray().astype(np.float64)
            lines.append(
                {"cells": "predicted", "way": "real cells", **condition.numbers(condition.real, real)}
            )
            lines += [
                {"cells": "predicted", "way": w, **n} for w, n in condition.ways(values[cells], depth[cells])
            ]
    return pd.DataFrame(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("--log1p", type=Path, nargs="+", default=[])
    parser.add_argument("--counts", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    store = Store(given.store)
    pairs = zip(given.log1p, given.counts, strict=True)
    tables = [predictions(store, a, b) for a, b in pairs] if given.log1p else [real_cells(store)]
    means = pd.concat(tables).groupby(["cells", "way"], sort=False).mean()
    print(means.round(4).reset_index().to_csv(sep="|", index=False))


if __name__ == "__main__":
    main()
