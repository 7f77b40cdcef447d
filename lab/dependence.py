"""Which measures see that genes depend on each other otherwise, while each gene stays as it is? See dependence.md.

``python lab/dependence.py CELLS`` prints, for each measure and each change of dependence, how many standard deviations
between two equal samples the change is worth.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.metrics.pairwise_distances import pairwise
from perturbdiff.evaluation.metrics.profile_metrics import average_ranks
from perturbdiff.evaluation.metrics.realism import correlation_agreement, dependence_gap

GENES, MODULES, TOP = 300, 6, 60
MODULE = np.arange(GENES) % MODULES
Measure = Callable[[np.ndarray, np.ndarray], float]


def sample(n: int, rng: np.random.Generator, dependence: str) -> np.ndarray:
    """Return log1p counts [n, genes] whose genes have the same distributions whatever their dependence."""
    fixed = np.random.default_rng(7)
    rates, noise = fixed.lognormal(0, 1.2, GENES), rng.standard_normal((n, GENES))
    modules, signs, share = MODULE, np.ones(GENES), 0.5
    if dependence == "half as strong":
        share = 0.25
    if dependence == "other signs":
        signs = fixed.choice([-1, 1], GENES)
    if dependence == "other modules":
        modules = fixed.permutation(MODULE)
    shared = rng.standard_normal((n, MODULES))[:, modules] * signs
    latent = np.sqrt(share) * shared + np.sqrt(1 - share) * noise
    if dependence == "none":
        latent = noise
    if dependence == "one module less":
        latent[:, MODULE == 0] = noise[:, MODULE == 0]
    return np.log1p(rng.poisson(rates * np.exp(0.6 * latent - 0.18)))


def sparse(measure: Callable[[sp.csr_matrix, sp.csr_matrix], float]) -> Measure:
    """Return a measure of arrays from one of sparse matrices."""
    return lambda x, y: measure(*(sp.csr_matrix(side.astype(np.float32)) for side in (x, y)))


def ranks(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Return standardised ranks of the genes with the highest mean in ``y``."""
    top = np.argsort(-y.mean(axis=0), kind="stable")[:TOP]
    found = [np.column_stack([average_ranks(gene) for gene in side[:, top].T]) for side in (x, y)]
    return [(r - r.mean(axis=0)) / np.maximum(r.std(axis=0), 1e-9) for r in found]


def energy_of_slices(x: np.ndarray, y: np.ndarray, directions: np.ndarray) -> float:
    """Return the mean energy distance of two sets of cells along some directions [genes, directions]."""

    def within(z: np.ndarray) -> np.ndarray:
        weights = 2 * np.arange(1, len(z) + 1) - len(z) - 1
        return 2 * (weights[:, None] * np.sort(z, axis=0)).sum(axis=0)

    directions = directions / np.linalg.norm(directions, axis=0)
    a, b = x @ directions, y @ directions
    n, m = len(a), len(b)
    between = (within(np.concatenate([a, b])) - within(a) - within(b)) / (2 * n * m)
    return float((2 * between - within(a) / (n * (n - 1)) - within(b) / (m * (m - 1))).mean())


def dense(x: np.ndarray, y: np.ndarray) -> float:
    """Slice ranks along 128 random directions."""
    x, y = ranks(x, y)
    return energy_of_slices(x, y, np.random.default_rng(0).standard_normal((TOP, 128)))


def along_axes(x: np.ndarray, y: np.ndarray) -> float:
    """Slice ranks along the ten leading axes of either side."""
    x, y = ranks(x, y)
    return energy_of_slices(x, y, np.hstack([np.linalg.eigh(z.T @ z)[1][:, -10:] for z in (x, y)]))


MEASURES: dict[str, Measure] = {
    "energy_distance": sparse(lambda x, y: pairwise(x, y, max_cells=2000, seed=0)["energy_distance"]),
    "mmd": sparse(lambda x, y: pairwise(x, y, max_cells=2000, seed=0)["mmd"]),
    "1 − correlation_agreement": sparse(lambda x, y: 1 - correlation_agreement(x, y)),
    "ranks, random slices": dense,
    "ranks, slices along axes": along_axes,
    "dependence_gap": sparse(dependence_gap),
}
CHANGES = ("none", "half as strong", "other signs", "other modules", "one module less")


def main(n: int, repeats: int = 12) -> None:
    """Print the table."""
    rngs = [np.random.default_rng(i) for i in range(repeats)]
    equal = [(sample(n, rng, "as it is"), sample(n, rng, "as it is")) for rng in rngs]
    for name, measure in MEASURES.items():
        start = time.process_time()
        base = np.array([measure(*pair) for pair in equal])
        cost = 1000 * (time.process_time() - start) / repeats
        cells = []
        for change in CHANGES:
            found = np.array(
                [measure(sample(n, rng, change), y) for rng, (_, y) in zip(rngs, equal, strict=True)]
            )
            cells.append(f"{(found.mean() - base.mean()) / base.std(ddof=1):.1f}")
        print(f"| {name} | {base.mean():.2g} | {' | '.join(cells)} | {cost:.0f} ms |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
