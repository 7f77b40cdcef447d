"""Time of the tests of differential expression, and of a whole evaluation, against a plain loop over scipy.

    python benchmarks/evaluation.py [--cells 16600] [--perturbations 60] [--genes 2000]

The loop calls ``scipy.stats.mannwhitneyu`` once per perturbation on dense columns (vectorised over genes), for as
many perturbations as fit into a few seconds; the rest is extrapolated. Prints seconds, the ratio and the largest
relative difference of the p values.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import scipy.sparse as sp
from scipy import stats

from perturbdiff.evaluation.catalogue import score
from perturbdiff.evaluation.differential import Controls, Differential
from perturbdiff.evaluation.metrics import Comparison


def simulate(cells: int, perturbations: int, genes: int, seed: int = 0) -> list[sp.csr_matrix]:
    """Return log1p cells at about 10 % density: the controls (a tenth of all), then each perturbation."""
    rng = np.random.default_rng(seed)
    base = rng.lognormal(-2.6, 1.2, genes)
    groups = []
    for i in range(perturbations + 1):
        effect = np.where(rng.random(genes) < 0.1, rng.lognormal(0, 0.7, genes), 1.0) if i else 1.0
        n = cells // 10 if i == 0 else (cells - cells // 10) // perturbations
        depth = rng.lognormal(0, 0.3, (n, 1))
        counts = rng.poisson(base * effect * depth)
        groups.append(sp.csr_matrix(np.log1p(counts / depth).astype(np.float32)))
    return groups


def ours(groups: list[sp.csr_matrix]) -> Differential:
    """Test every group after the first against the first."""
    controls = Controls(groups[0])
    p, mean = (np.stack(rows) for rows in zip(*[controls.test(g) for g in groups[1:]], strict=True))
    return Differential.of(p, mean, controls.mean)


def loop(groups: list[sp.csr_matrix], seconds: float) -> tuple[np.ndarray, float]:
    """Return p of as many perturbations as fit into ``seconds`` and the time for all, extrapolated."""
    control, rows, start = groups[0].toarray().astype(np.float64), [], time.perf_counter()
    for group in groups[1:]:
        found = stats.mannwhitneyu(group.toarray().astype(np.float64), control, axis=0, method="asymptotic")
        rows.append(np.nan_to_num(found.pvalue, nan=1.0))
        if time.perf_counter() - start > seconds:
            break
    return np.stack(rows), (time.perf_counter() - start) * (len(groups) - 1) / len(rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("cells", 16_600), ("perturbations", 60), ("genes", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the plain loop")
    settings = parser.parse_args()
    sizes = (settings.cells, settings.perturbations, settings.genes)
    real, predicted = simulate(*sizes), simulate(*sizes)
    predicted[0] = real[0]
    ours(real[:2])  # compiles
    start = time.perf_counter()
    tested = ours(real)
    one_side = time.perf_counter() - start
    names = tuple(f"p{i:04}" for i in range(settings.perturbations))
    genes = tuple(f"g{i}" for i in range(settings.genes))
    score(Comparison(names, genes, tested, ours(predicted)))
    whole = time.perf_counter() - start
    p, plain = loop(real, settings.seconds)
    largest = np.max(np.abs(tested.p[: len(p)] - p) / np.maximum(p, 1e-300))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{settings.cells} cells, {settings.perturbations} perturbations, {settings.genes} genes")
    print(
        f"tests of one side   ours {one_side:.2f} s, loop over scipy {plain:.1f} s ({len(p)} perturbations run)"
    )
    print(f"both sides and all metrics {whole:.2f} s; peak memory of this process {memory:.2f} GiB")
    print(f"largest relative difference of p {largest:.1e}")
    print(f"ratio {plain / one_side:.0f}")


if __name__ == "__main__":
    main()
