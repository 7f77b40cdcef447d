"""Distances between two populations of cells from all pairs of cells: the energy distance and the MMD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.compiled import kernel

CHANCE_CELLS = 256  # cells drawn of another perturbation: enough for chance, whose noise they raise a little
PAIRWISE = ("energy_distance", "mmd", "mmd_pc")
COMPONENTS = 20
_CELLS_PER_AXIS = 10  # an axis of fewer cells is mostly their noise
_FITTED = 512  # real cells of a half that the components are fitted to at most
_BLOCK = 256  # cells whose distances are held at a time
_NOTHING = 5e-6
_TINY = 1e-30
_LANES = 8


def energy_distance(predicted: Sparse, real: Sparse, *, max_cells: int = 2000, seed: int = 0) -> float:
    """Return 2E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖ without self-pairs (the U-statistic), in log1p units.

    Parameters
    ----------
    predicted, real
        Cells of one condition, sparse log1p [cells, G].
    max_cells
        Beyond it, that many cells are drawn without replacement on each side.
    seed
        Of the draw.

    Returns
    -------
    float
        NaN with fewer than two cells on a side. Expected 0 for equal distributions, hence at times negative.
    """
    return pairwise(predicted, real, max_cells=max_cells, seed=seed)["energy_distance"]


def mmd(predicted: Sparse, real: Sparse, *, max_cells: int = 2000, seed: int = 0) -> float:
    """Return the squared maximum mean discrepancy E k(x, x') + E k(y, y') − 2E k(x, y) without self-pairs.

    The kernel is a mean of five Gaussians, k(x, y) = ⅕ Σ exp(−‖x − y‖² / (s m)) over s = ¼, ½, 1, 2, 4, with m the
    median squared distance of two different real cells (Gretton et al. 2012, J. Mach. Learn. Res. 13:723; the
    median as the scale: section 8). Bandwidths that follow the data keep the number meaningful for any number of
    genes; CellFlow's fixed ones, exp(−γ‖x − y‖²) for γ of 0.005 to 2, are made for some 50 principal components
    and vanish between all cells of 2,000 genes.

    Parameters and draws are those of `energy_distance`.

    Returns
    -------
    float
        NaN with fewer than two cells on a side or if half the pairs of real cells are equal. Expected 0 for equal
        distributions, hence at times negative.
    """
    return pairwise(predicted, real, max_cells=max_cells, seed=seed)["mmd"]


def mmd_in_components(
    predicted: Sparse,
    real: Sparse,
    *,
    control: np.ndarray | None = None,
    max_cells: int = 2000,
    seed: int = 0,
) -> float:
    """Return the MMD² of `mmd` between cells in up to 20 leading components of the real cells, which leave out noise.

    The components are the axes along which the real cells lie farthest from the mean of the controls, so that they
    hold what the perturbation changes as well as how its cells differ. They are the same for every prediction. Half
    of the real cells give the components in which the other half is compared, and the other way round: cells lie
    farther apart along axes that were fitted to themselves than others like them do.

    Parameters
    ----------
    predicted, real, max_cells, seed
        See `energy_distance`. At most 512 cells of a half give the components, ten cells at least for each.
    control
        Mean of the controls, float64 [G]; without it, that of the real cells.
    """
    found = pairwise(predicted, real, max_cells=max_cells, seed=seed, names=("mmd_pc",), control=control)
    return found["mmd_pc"]


def pairwise(
    predicted: Sparse,
    real: Sparse,
    *,
    max_cells: int,
    seed: int,
    other: Sparse | None = None,
    names: Sequence[str] = PAIRWISE,
    control: np.ndarray | None = None,
) -> dict[str, float]:
    """Return ``energy_distance``, ``mmd`` and ``mmd_pc`` of the same cells.

    Parameters
    ----------
    predicted, real, max_cells, seed, control
        See `energy_distance` and `mmd_in_components`.
    other
        Real cells of another perturbation. Then also ``chance_…`` of each: the prediction against (up to 256 of)
        these.
    names
        Which of the three to compute; the first two come together.
    """
    rng = np.random.default_rng(seed)
    centre = np.asarray(real.mean(axis=0), np.float32).ravel() if real.shape[0] else np.zeros(real.shape[1])
    x, y = (_Cells.drawn(cells, max_cells, rng, centre) for cells in (predicted, real))
    sides = {"": y}
    if other is not None:
        sides["chance_"] = _Cells.drawn(other, min(max_cells, CHANCE_CELLS), rng, centre)
    values: dict[str, float] = {}
    if {"energy_distance", "mmd"} & set(names):
        for prefix, side in sides.items():
            energy, discrepancy = _against(x, side)
            values |= {f"{prefix}energy_distance": energy, f"{prefix}mmd": discrepancy}
    if "mmd_pc" in names:
        shift = np.asarray(centre - (centre if control is None else control), np.float32)
        for prefix, side in sides.items():
            values[f"{prefix}mmd_pc"] = _in_components(x, y, side, shift)
    return values


def _in_components(x: _Cells, y: _Cells, against: _Cells, shift: np.ndarray) -> float:
    """Return the mean MMD² in the components of either half of ``y``, to its other half or to other cells."""
    if len(y) < 4:
        return float("nan")
    order = np.argsort(y.squares, kind="stable")  # halves that no order of the cells changes
    found = []
    for first in (0, 1):
        fitted, rest = order[first::2], order[1 - first :: 2]
        axes = _axes(y.values[fitted[:: -(-len(fitted) // _FITTED)]] + shift)
        scored = _Cells(y.values[rest], y.squares[rest]) if against is y else against
        found.append(_against(x.projected(axes), scored.projected(axes))[1])
    return float(np.mean(found))


def _axes(rows: np.ndarray) -> np.ndarray:
    """Return the leading principal axes of ``rows`` about the origin, float32 [G, up to 20]."""
    squared, vectors = np.linalg.eigh((rows @ rows.T).astype(np.float64))
    most = min(COMPONENTS, max(1, len(rows) // _CELLS_PER_AXIS))
    kept = np.flatnonzero(squared > _NOTHING * max(squared.max(), _TINY))[::-1][:most]
    return rows.T @ (vectors[:, kept] / np.sqrt(squared[kept])).astype(np.float32)


@dataclass
class _Cells:
    """Centred cells, float32 [n, G], and their squared norms, float64 [n]."""

    values: np.ndarray
    squares: np.ndarray
    _within: np.ndarray | None = None

    @classmethod
    def drawn(cls, cells: Sparse, most: int, rng: np.random.Generator, centre: np.ndarray) -> _Cells:
        num, genes = cells.shape
        rows = np.sort(rng.choice(num, most, replace=False)) if num > most else np.arange(num)
        cells = sp.csr_matrix(cells)
        values, squares = np.empty((len(rows), genes), np.float32), np.empty(len(rows))
        _densify(cells.data, cells.indices, cells.indptr, rows, centre.astype(np.float32), values, squares)
        return cls(values, squares)

    def __len__(self) -> int:
        return len(self.values)

    def projected(self, axes: np.ndarray) -> _Cells:
        """Return the cells in the coordinates of some axes, float32 [G, axes]."""
        values = self.values @ axes
        return _Cells(values, np.square(values, dtype=np.float64).sum(axis=1))

    def within(self) -> np.ndarray:
        """Return the squared distances of all pairs of different cells, float32."""
        if self._within is None:
            self._within = np.concatenate([np.empty(0, np.float32), *_squared(self, self)])
        return self._within


def _against(x: _Cells, y: _Cells) -> tuple[float, float]:
    """Return the energy distance and the MMD of cells ``x`` from the real ``y``."""
    n, m = len(x), len(y)
    if min(n, m) < 2:
        return float("nan"), float("nan")
    median = float(np.median(y.within()))
    parts = ((_squared(x, y), n * m), ([x.within()], n * (n - 1) / 2), ([y.within()], m * (m - 1) / 2))
    (between, alike), *rest = ([total / pairs for total in _sums(blocks, median)] for blocks, pairs in parts)
    energy = 2.0 * between - rest[0][0] - rest[1][0]
    return energy, rest[0][1] + rest[1][1] - 2.0 * alike if median > 0 else float("nan")


def _squared(x: _Cells, y: _Cells) -> Iterator[np.ndarray]:
    """Yield the squared distances of all pairs, of a set with itself each pair once, block by block, float32."""
    same = x is y
    for i in range(0, len(x), _BLOCK):
        rows = slice(i, i + _BLOCK)
        first = i if same else 0
        product = x.values[rows] @ y.values[first:].T
        num, width = product.shape
        out = np.empty(num * width - (num * (num + 1) // 2 if same else 0), np.float32)
        _expand(product, x.squares[rows], y.squares[first:], same, out)
        yield out


def _sums(blocks: Iterable[np.ndarray], median: float) -> tuple[float, float]:
    """Return the sums of the distances and of the kernel over pairs given by their squared distances."""
    distances, alike = 0.0, 0.0
    for squared in blocks:
        distances += float(np.sqrt(squared).sum(dtype=np.float64))
        if median > 0:
            alike += _kernel_sum(np.exp(squared * np.float32(-0.25 / median)))
    return distances, alike / 5.0


@kernel
def _densify(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    rows: np.ndarray,
    centre: np.ndarray,
    out: np.ndarray,
    squares: np.ndarray,
) -> None:
    """Write the chosen rows of a CSR matrix less ``centre`` to ``out`` and their squared norms to ``squares``."""
    for i in range(rows.size):
        for gene in range(centre.size):
            out[i, gene] = -centre[gene]
        for at in range(indptr[rows[i]], indptr[rows[i] + 1]):
            out[i, indices[at]] += data[at]
        total = 0.0
        for gene in range(centre.size):
            total += np.float64(out[i, gene]) * np.float64(out[i, gene])
        squares[i] = total


@kernel
def _expand(product: np.ndarray, x: np.ndarray, y: np.ndarray, same: bool, out: np.ndarray) -> None:  # noqa: FBT001
    """Write |x|² + |y|² − 2 x·y of each pair to ``out``; of the same cells only those above the diagonal."""
    at = 0
    for i in range(product.shape[0]):
        for j in range(i + 1 if same else 0, product.shape[1]):
            norms = x[i] + y[j]
            squared = norms - 2.0 * np.float64(product[i, j])
            out[at] = squared if squared > _NOTHING * norms else 0.0
            at += 1


@kernel
def _kernel_sum(e: np.ndarray) -> float:
    """Sum e + e² + e⁴ + e⁸ + e¹⁶: five Gaussians, each of half the squared width of the one before."""
    lanes = np.zeros(_LANES)
    even = e.size - e.size % _LANES
    for i in range(0, even, _LANES):
        for lane in range(_LANES):
            a = e[i + lane]
            b = a * a
            c = b * b
            d = c * c
            lanes[lane] += np.float64(a + b + c + d + d * d)
    for i in range(even, e.size):
        b = e[i] * e[i]
        c = b * b
        d = c * c
        lanes[0] += np.float64(e[i] + b + c + d + d * d)
    return lanes.sum()
