"""Compare simulated data with real data: depth, zeros, dispersion, condition sizes, effects.

For each real file an experiment of the same number of cells, genes, contexts and perturbations is simulated
with a preset's parameters, and both are measured by the same code. Prints one Markdown table per file.

    python lab/simulation_realism.py REAL.h5ad --preset simulated-papalexi --batch-key replicate
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp

from perturbdiff.config import recipes
from perturbdiff.config import settings as configuration
from perturbdiff.runtime.files import existing
from perturbdiff.simulation.simulation_stage import simulate

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MEAN_BINS = ((0.05, 0.2), (0.2, 0.5), (0.5, 1.0), (1.0, 3.0), (3.0, 10.0), (10.0, np.inf))
LEAST_CELLS = 60  # of a control population whose variances are looked at
LEAST_COUNTS = 50  # of a gene whose fold change is looked at


def quantiles(values: np.ndarray, form: str = "{:.2f}") -> str:
    return " / ".join(form.format(v) for v in np.quantile(values, QUANTILES))


def share_of_counts(counts: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    total = np.asarray(counts.sum(0)).ravel()
    return total, total / max(total.sum(), 1)


def log_ratio(a: sp.csr_matrix, b: sp.csr_matrix) -> np.ndarray:
    """Log fold change of b against a where both are well measured, else nan; median 0."""
    (counts_a, share_a), (counts_b, share_b) = share_of_counts(a), share_of_counts(b)
    seen = (counts_a >= LEAST_COUNTS) & (counts_b >= LEAST_COUNTS / 2)
    ratio = np.full(len(seen), np.nan)
    ratio[seen] = np.log(share_b[seen] / share_a[seen])
    return ratio - np.nanmedian(ratio) if seen.any() else ratio


def dispersion(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean count and moment estimate of φ of each gene, given each cell's depth."""
    depth = counts.sum(1)
    size = depth / depth.mean()
    mean = counts.mean(0)
    expected = mean * size[:, None]
    excess = ((counts - expected) ** 2 - expected).sum(0)
    return mean, excess / np.maximum((expected**2).sum(0), 1e-12)


def leading_correlation(counts: np.ndarray) -> tuple[float, float]:
    """Share of variance on the first axis, and RMS correlation above chance, of well expressed genes."""
    depth = counts.sum(1, keepdims=True)
    log = np.log1p(counts / depth * 1e4)[:, counts.mean(0) > 0.3]
    correlation = np.corrcoef(log[:, log.std(0) > 0].T)
    pairs = correlation[np.triu_indices(len(correlation), 1)]
    axis = np.linalg.eigvalsh(correlation)[-1] / len(correlation)
    return float(axis), float(np.sqrt(max(pairs.var() - 1 / len(counts), 0)))


def populations(data: anndata.AnnData, control: str) -> dict[tuple[str, str, str], sp.csr_matrix]:
    counts = sp.csr_matrix(data.X, dtype=np.float64)
    groups = data.obs.groupby(["cell_type", "batch", "perturbation"], observed=True).indices
    return {key: counts[np.sort(rows)] for key, rows in groups.items()}


def marginals(data: anndata.AnnData) -> dict[str, str]:
    counts = sp.csr_matrix(data.X)
    depth = np.asarray(counts.sum(1)).ravel() / counts.shape[1]
    detected = counts.getnnz(1) / counts.shape[1]
    mean = np.asarray(counts.mean(0)).ravel()
    return {
        "counts per gene of a cell": quantiles(depth),
        "SD of log depth": f"{np.log(depth[depth > 0]).std():.2f}",
        "zeros, all": f"{1 - counts.nnz / np.prod(counts.shape):.3f}",
        "zeros per cell": quantiles(1 - detected),
        "zeros per gene": quantiles(1 - counts.getnnz(0) / counts.shape[0]),
        "mean count per gene": quantiles(mean),
        "share of the strongest gene": f"{mean.max() / mean.sum():.3f}",
    }


def variances(groups: dict, control: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    dense = [x.toarray() for (*_, p), x in groups.items() if p == control and x.shape[0] >= LEAST_CELLS]
    fits = [dispersion(x) for x in dense]
    mean, phi = (np.concatenate([f[k] for f in fits]) for k in (0, 1))
    zeros = np.concatenate([(x == 0).mean(0) for x in dense])
    for low, high in MEAN_BINS:
        inside = (mean > low) & (mean <= high)
        name = f"mean {low:g} to {high:g}" if np.isfinite(high) else f"mean above {low:g}"
        if inside.sum() >= 10:
            low_q, mid, high_q = np.quantile(phi[inside], (0.25, 0.5, 0.75))
            rows[f"NB φ, {name}"] = f"{low_q:.2f} / {mid:.2f} / {high_q:.2f}"
            rows[f"zeros, {name}"] = f"{np.median(zeros[inside]):.2f}"
    leading = np.array([leading_correlation(x) for x in dense])
    rows["variance on the first axis"] = f"{np.median(leading[:, 0]):.3f}"
    rows["RMS gene correlation above chance"] = f"{np.median(leading[:, 1]):.3f}"
    return rows


def contexts(groups: dict, control: str) -> dict[str, str]:
    """Spread of log ratios between controls of two batches and of two cell types."""
    rows = {}
    controls = {(c, b): x for (c, b, p), x in groups.items() if p == control}
    pairs = [(k, m) for k in controls for m in controls if k < m]
    for name, chosen in (
        ("batches", [(k, m) for k, m in pairs if k[0] == m[0]]),
        ("cell types", [(k, m) for k, m in pairs if k[1] == m[1]]),
    ):
        spreads = [np.nanstd(log_ratio(controls[k], controls[m])) for k, m in chosen]
        if spreads:
            rows[f"SD of log ratio between {name}"] = f"{np.median(spreads):.2f}"
    return rows


def effects(groups: dict, control: str) -> dict[str, str]:
    found: dict[str, list[np.ndarray]] = {}
    for (c, b, p), x in groups.items():
        reference = groups.get((c, b, control))
        if p != control and reference is not None and x.shape[0] >= LEAST_CELLS:
            found.setdefault(p, []).append(log_ratio(reference, x))
    spread = [np.nanstd(changes[0]) for changes in found.values()]
    agreement = []
    for first, *others in found.values():
        for other in others:
            both = ~np.isnan(first + other)
            agreement.append(np.corrcoef(first[both], other[both])[0, 1])
    largest = [np.nanmax(np.abs(changes[0])) for changes in found.values()]
    rows = {"SD of a perturbation's log fold changes": quantiles(np.array(spread))}
    rows["its largest"] = quantiles(np.array(largest))
    if agreement:
        rows["its correlation between contexts"] = quantiles(np.array(agreement))
    return rows


def sizes(data: anndata.AnnData, control: str) -> dict[str, str]:
    count = data.obs.groupby(["cell_type", "batch", "perturbation"], observed=True).size()
    treated = count[count.index.get_level_values("perturbation") != control]
    return {
        "share of controls": f"{(data.obs['perturbation'] == control).mean():.3f}",
        "cells of a condition": quantiles(treated.to_numpy(), "{:.0f}"),
        "SD of log size": f"{np.log(treated).std():.2f}",
    }


def measure(data: anndata.AnnData, control: str) -> dict[str, str]:
    groups = populations(data, control)
    parts = (marginals(data), variances(groups, control), contexts(groups, control), effects(groups, control))
    return {key: value for part in (*parts, sizes(data, control)) for key, value in part.items()}


def like(real: anndata.AnnData, base: configuration.SimulateConfig) -> configuration.SimulateConfig:
    """Return ``base`` with the real experiment's numbers of cells, genes, contexts and perturbations."""
    labels = real.obs["perturbation"].nunique() - 1
    kind = "cytokines" if base.cytokines and not base.knockdowns else "knockdowns"
    counts = {"knockdowns": 0, "drugs": 0, "cytokines": 0, kind: labels}
    changed = {
        "cells": real.n_obs,
        "genes": real.n_vars,
        "cell_types": real.obs["cell_type"].nunique(),
        "batches": real.obs["batch"].nunique(),
        **counts,
    }
    return base.model_copy(update=changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("real", type=Path, help="h5ad with raw counts")
    parser.add_argument("--preset", help="preset or YAML whose simulate section is tried; none: the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--perturbation-key", default="perturbation")
    parser.add_argument("--cell-type-key", default="cell_type")
    parser.add_argument("--batch-key", default="batch")
    parser.add_argument("--control", default="control")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    real = anndata.read_h5ad(existing(options.real, "real data"))
    keys = (options.perturbation_key, options.cell_type_key, options.batch_key)
    names = ("perturbation", "cell_type", "batch")
    real.obs = pd.DataFrame(
        {n: real.obs[k].astype(str).to_numpy() for n, k in zip(names, keys, strict=True)}, real.obs_names
    )
    config = like(real, recipes.load(options.preset, options.set).simulate)
    with tempfile.TemporaryDirectory() as folder:
        out = simulate(Path(folder) / "simulated", config, seed=options.seed)
        simulated = anndata.read_h5ad(out / "counts.h5ad")
    left, right = measure(real, options.control), measure(simulated, "control")
    print(f"| {options.real.stem} | real | simulated |\n|---|---|---|")
    for key in dict.fromkeys([*left, *right]):
        print(f"| {key} | {left.get(key, '')} | {right.get(key, '')} |")


if __name__ == "__main__":
    main()
