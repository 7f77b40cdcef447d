"""Every number of cell-eval 0.6.6 and 0.8.2 for the cells in tests/data/metrics, against ours.

What cell-eval itself leaves undefined is told by rule from the data, never by name:

* a prediction equal to the control mean (no gene changes by more than rounding to float32, 1e-6 of the mean): what
  depends on the direction or order of such changes differs between float32 and float64 means. Left out.
* genes tied in |log2 fold change| at the k-th place: cell-eval orders them at random. Both numbers must lie between
  the least and the greatest overlap that an order of the tied genes can give.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation import DEFINITIONS, METRICS, Comparison, compare, evaluate, tabulate
from perturbdiff.evaluation.metrics.catalogue import columns
from perturbdiff.evaluation.metrics.differential import Differential, is_rounding

DATA = Path(__file__).parents[1] / "data" / "metrics"
RELEASES = [name for name in DEFINITIONS if name.startswith("cell-eval-0.")]
CASES = [
    (fixture, definition, scope)
    for definition in RELEASES
    for fixture, scope in [("a", "all"), ("b", "all"), ("b", "ct0"), ("b", "ct1"), ("b", "ct2"), ("c", "all")]
]
OVERLAPS = [name for name, m in METRICS.items() if m.column.startswith(("overlap_at_", "precision_at_"))]
NOISY = {"PDCorr", "PDS_cos", "DirAgr", "LFCSpear", *OVERLAPS}  # depend on the direction or order of changes
each_case = pytest.mark.parametrize(("fixture", "definition", "scope"), CASES)


@dataclass(frozen=True)
class Case:
    """Our comparison and table of metrics, cell-eval's table in our names, and its summary."""

    comparison: Comparison
    ours: pd.DataFrame
    theirs: pd.DataFrame
    summary: pd.DataFrame
    few: list[str]  # perturbations with so few cells that 0.6.6 may use the exact distribution
    noise: list[str]  # perturbations whose predicted change is rounding noise

    def is_defined(self, metric: str, perturbation: str) -> bool:
        return not (metric in NOISY and perturbation in self.noise)


@cache
def cells(fixture: str, side: str) -> ad.AnnData:
    return ad.read_h5ad(DATA / fixture / f"{side}.h5ad")


@cache
def case(fixture: str, definition: str, scope: str) -> Case:
    sides = [cells(fixture, side) for side in ("real", "pred")]
    real, predicted = [s if scope == "all" else s[(s.obs["cell_type"] == scope).to_numpy()] for s in sides]
    comparison = compare(
        real.X,
        predicted.X,
        *(s.obs["perturbation"].to_numpy(str) for s in (real, predicted)),
        control="control",
        genes=list(real.var_names),
        definition=definition,
        own_controls=True,  # as cell-eval does; they are the same here
    )
    folder = DATA / fixture / definition / scope
    theirs = pd.read_csv(folder / "results.csv", index_col="perturbation")
    summary = pd.read_csv(folder / "agg_results.csv", index_col="statistic")
    assert set(theirs.columns) == set(columns()), (
        "a column of cell-eval has no metric, or the other way round"
    )
    side = comparison.predicted
    noise = np.flatnonzero(is_rounding(side.mean, side.control).all(axis=1))
    return Case(
        comparison,
        tabulate(comparison, list(columns().values())),
        theirs.rename(columns=columns()),
        summary.rename(columns=columns()),
        [str(name) for name, n in real.obs["perturbation"].value_counts().items() if n <= 8],
        [comparison.perturbations[i] for i in noise],
    )


def bounds(comparison: Comparison, i: int, metric: str) -> tuple[float, float]:
    """Return the least and the greatest value that the tied genes at the cut allow."""
    sides = comparison.real, comparison.predicted
    sizes = [int(side.significant[i].sum()) for side in sides]
    k = sizes[0] if METRICS[metric].column.startswith("overlap") else sizes[1]
    limit = METRICS[metric].column.rsplit("_", 1)[1]
    k = k if limit == "N" else min(k, int(limit))
    if not k:
        return 0.0, 0.0
    certain, possible = zip(*(_top(side, i, k) for side in sides), strict=True)
    room = [k - len(c) for c in certain]  # places that tied genes may take
    least = max(len(certain[0] & certain[1]), 0)
    extra = len((possible[0] & possible[1]) - (certain[0] & certain[1]))
    return least / k, min(least + min(extra, sum(room)), k) / k


def _top(side: Differential, i: int, k: int) -> tuple[set, set]:
    """Return the genes surely and possibly among the k strongest."""
    found = np.flatnonzero(side.significant[i])
    strength = np.abs(side.log2_fold[i, found])
    if len(found) <= k:
        return set(found), set(found)
    cut = np.sort(strength)[::-1][k - 1]
    tied = np.isclose(strength, cut, rtol=2e-6, atol=1e-6)
    if tied.sum() + (strength > cut)[~tied].sum() == k:  # the tie ends at the cut
        return set(found[(strength > cut) | tied]), set(found[(strength > cut) | tied])
    return set(found[(strength > cut) & ~tied]), set(found[(strength > cut) | tied])


@each_case
def test_every_metric_of_every_perturbation(fixture, definition, scope):
    found = case(fixture, definition, scope)
    compared = tied = 0
    for metric in found.theirs:
        for i, perturbation in enumerate(found.comparison.perturbations):
            ours, theirs = found.ours.loc[perturbation, metric], found.theirs.loc[perturbation, metric]
            if not found.is_defined(metric, perturbation):
                continue
            message = f"{metric} of {perturbation}"
            if metric in OVERLAPS:
                least, greatest = bounds(found.comparison, i, metric)
                assert least - 1e-9 <= ours <= greatest + 1e-9, message
                assert least - 1e-9 <= theirs <= greatest + 1e-9, message
                if greatest > least:
                    tied += 1
                    continue
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=message)
            compared += 1
    assert len(found.noise) <= 1
    assert compared + tied == found.theirs.size - len(found.noise) * len(NOISY & set(found.theirs))
    assert tied <= 0.2 * found.theirs.size


@each_case
@pytest.mark.parametrize("side", ["real", "pred"])
def test_every_p_q_and_fold_change(fixture, definition, scope, side):
    few, found = case(fixture, definition, scope).few, case(fixture, definition, scope).comparison
    ours = found.real if side == "real" else found.predicted
    theirs = pd.read_parquet(DATA / fixture / definition / scope / f"{side}_de.parquet")
    assert len(theirs) == ours.p.size
    rows = pd.Index(found.perturbations).get_indexer(theirs["target"].astype(str))
    places = rows, pd.Index(found.genes).get_indexer(theirs["feature"].astype(str))
    if definition == "cell-eval-0.6.6":
        many = ~theirs["target"].isin(few).to_numpy()  # ours is exact where scipy's sums are rounded
        np.testing.assert_array_equal(ours.p[places][many], theirs["p_value"][many])
        np.testing.assert_allclose(ours.p[places], theirs["p_value"], rtol=1e-14)
        np.testing.assert_allclose(ours.fold[places], theirs["fold_change"], rtol=5e-6)
    else:
        np.testing.assert_allclose(ours.p[places], theirs["p_value"], rtol=1e-12)
        np.testing.assert_allclose(ours.log2_fold[places], theirs["log2_fold_change"], rtol=5e-6, atol=1e-5)
    q = theirs["fdr"].to_numpy()
    np.testing.assert_allclose(ours.q[places], q, rtol=1e-6, atol=1e-37)  # float32 keeps no less
    clear = np.abs(q - 0.05) > 1e-8
    np.testing.assert_array_equal(ours.significant[places][clear], (q < 0.05)[clear])


@each_case
def test_every_row_of_the_summary(fixture, definition, scope):
    """Count, mean, spread and quartiles over perturbations, as polars describes them.

    What is undefined or tied takes cell-eval's value here: it has been dealt with above.
    """
    found = case(fixture, definition, scope)
    for metric in found.theirs:
        values = found.ours[metric].to_numpy().copy()
        absent = np.zeros(len(values), bool)
        if METRICS[metric].needs_real_de:
            absent = METRICS[metric].absent(found.comparison)
        for i, perturbation in enumerate(found.comparison.perturbations):
            least, most = bounds(found.comparison, i, metric) if metric in OVERLAPS else (0.0, 0.0)
            if not found.is_defined(metric, perturbation) or most > least:
                values[i] = found.theirs[metric].iloc[i]
        np.testing.assert_array_equal(absent & ~np.isnan(values), False)
        ours = _described(values[~absent], int(absent.sum()))
        np.testing.assert_allclose(
            list(ours.values()), found.summary.loc[list(ours), metric], rtol=1e-5, atol=1e-5, err_msg=metric
        )


def _described(values: np.ndarray, num_absent: int) -> dict[str, float]:
    ordered = np.sort(values)  # NaN last, as polars sorts
    nearest = {f"{p}%": ordered[int((len(values) - 1) * p / 100 + 0.5)] for p in (25, 50, 75)}
    return {
        "count": len(values),
        "null_count": num_absent,
        "mean": values.mean(),
        "std": values.std(ddof=1),
        "min": np.nanmin(values),
        "max": np.nanmax(values),
        **nearest,
    }


@pytest.mark.parametrize("definition", RELEASES)
@pytest.mark.parametrize("fixture", ["a", "b"])
def test_from_file_to_file(fixture, definition, tmp_path):
    """`evaluate` writes the values of the pure functions for each scope, and means by cell-eval's rule."""
    config = EvaluateConfig(scale="log1p", control="control", definition=definition)
    folder = evaluate(DATA / fixture / "pred.h5ad", DATA / fixture / "real.h5ad", tmp_path / "out", config)
    metrics: pd.DataFrame = pd.read_parquet(folder / "metrics.parquet").astype(
        {"scope": str, "perturbation": str}
    )
    means = pd.read_csv(folder / "aggregate.csv", dtype={"scope": str})
    assert set(metrics["definition"]) == {definition}
    r_squared = pd.read_csv(DATA / fixture / "r2.csv").set_index(["scope", "perturbation"])["r2"]
    for scope in [s for f, d, s in CASES if (f, d) == (fixture, definition)]:
        label = "pooled" if scope == "all" else scope
        found = case(fixture, definition, scope)
        kinds = metrics["scope_kind"] == ("pooled" if scope == "all" else "context")
        rows = pd.DataFrame(metrics[kinds & (metrics["scope"] == label)])
        mean = pd.DataFrame(means[means["scope"] == label]).set_index("metric")["mean"]
        for metric in found.ours:
            values = pd.DataFrame(rows[rows["metric"] == metric]).set_index("perturbation")["value"]
            expected = (
                found.ours[metric] if METRICS[metric].per_perturbation else found.ours[metric].iloc[[0]]
            )
            np.testing.assert_allclose(values.to_numpy(), expected, rtol=1e-12, err_msg=metric)
            if metric not in NOISY:
                summary = found.summary.loc["mean", metric]
                np.testing.assert_allclose(mean[metric], summary, rtol=1e-5, err_msg=metric)
        ours = pd.DataFrame(rows[rows["metric"] == "R2"]).set_index("perturbation")["value"].sort_index()
        if scope in r_squared.index.get_level_values(0):
            np.testing.assert_allclose(ours, pd.Series(r_squared[scope]).sort_index(), rtol=1e-6)
