"""What the model must know of its training cells: their scale, detection limit and largest values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

_ROWS = 4096
_WINDOW = 64  # a chunk of a store: rows are looked at in runs of this many
_QUANTILE_VALUES = 2_000_000
_QUANTILE, _SHARE = 0.01, 0.75


@dataclass(frozen=True)
class ValueRange:
    """Numbers taken from training cells only.

    Attributes
    ----------
    unit
        Model values are log1p / unit.
    gate_threshold
        0.75 × the 1 % quantile of the non-zero log1p values: below it lies nothing that was ever measured.
    maximum
        float32 [G]: largest log1p value of each gene.
    cells
        Number of cells looked at.
    """

    unit: float
    gate_threshold: float
    maximum: np.ndarray
    cells: int

    def put_into(self, model: Denoiser) -> None:
        """Set the model's buffers."""
        model.unit.fill_(self.unit)
        model.gate_threshold.fill_(self.gate_threshold)
        model.maximum.copy_(model.maximum.new_tensor(self.maximum))


def measure(
    stores: Sequence[Any],
    gene_maps: Sequence[GeneMap],
    rows: Sequence[np.ndarray],
    *,
    unit: Literal["scale", "rms"],
    limit: int,
    seed: int,
) -> ValueRange:
    """Look at training cells once and return their units.

    Parameters
    ----------
    stores, gene_maps
        Stores, and how each fits the model's genes.
    rows
        int64 rows of each store that training may use.
    unit
        ``scale``: the stores' divisor; ``rms``: root mean square over cells and genes of the log1p values.
    limit
        At most about this many cells are looked at, drawn with ``seed``.
    """
    genes = len(gene_maps[0].target)
    total = sum(len(r) for r in rows)
    share = min(1.0, limit / max(total, 1))
    rng = np.random.default_rng(np.random.SeedSequence((7, seed)))
    maximum, squares, cells = np.zeros(genes, np.float32), 0.0, 0
    values: list[np.ndarray] = []
    with track("scale of the training cells", round(total * share)) as work:
        for store, gene_map, mine in zip(stores, gene_maps, rows, strict=True):
            for chunk in _chunks(mine, share, rng):
                matrix = gene_map.apply(store.expression(chunk))
                data = np.asarray(matrix.data, dtype=np.float32)
                np.maximum(maximum, matrix.max(axis=0).toarray().ravel(), out=maximum)
                squares += float(np.square(data, dtype=np.float64).sum())
                cells += len(chunk)
                keep = _QUANTILE_VALUES * len(chunk) / max(total * share, 1)
                positive = data[data > 0]
                values.append(rng.choice(positive, min(len(positive), round(keep) + 1), replace=False))
                work.advance(len(chunk))
    sample = np.concatenate(values) if values else np.empty(0)
    if not len(sample):
        raise UserError(
            "the training cells have no value above zero in the model's genes; check the gene names"
        )
    scale = _common_scale(stores) if unit == "scale" else float(np.sqrt(squares / (cells * genes)))
    return ValueRange(scale, _SHARE * float(np.quantile(sample, _QUANTILE)), maximum, cells)


def _chunks(rows: np.ndarray, share: float, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield about ``share`` of the ascending ``rows`` in blocks, whole windows of a store at a time."""
    if share < 1:
        windows = np.arange(0, len(rows), _WINDOW)
        chosen = np.sort(rng.choice(windows, max(1, round(share * len(windows))), replace=False))
        places = (chosen[:, None] + np.arange(_WINDOW)).ravel()
        rows = rows[places[places < len(rows)]]
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS]


def _common_scale(stores: Sequence[Any]) -> float:
    scales = sorted({float(store.scale) for store in stores})
    if len(scales) > 1:
        raise UserError(
            f"the stores divide by different scales ({scales}); preprocess them with one data.scale, "
            "or use model.unit=rms"
        )
    return scales[0]
