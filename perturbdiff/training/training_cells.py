"""The cells that a model learns from: which are held out, and the range of their values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from pandas.util import hash_array

from perturbdiff.conditions.condition import Condition, conditions_of
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store.store import Store
from perturbdiff.training.size_spread import CellSizes

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

_NAMES_PER_READ = 1 << 18
_ROWS = 4096
_WINDOW = 64  # rows are read in runs of this length, as one chunk of a store has them
_QUANTILE_VALUES = 2_000_000


def _names(store: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yield 64-bit hashes of the names of some of a store's cells at a time: the first row, and uint64 [n]."""
    for start in range(0, store.n_cells, _NAMES_PER_READ):
        stop = min(start + _NAMES_PER_READ, store.n_cells)
        yield start, np.asarray(hash_array(store.cell_names(start, stop)), np.uint64)


def _rows(table: pd.DataFrame, chosen: np.ndarray) -> np.ndarray:
    """Return a mask over the store's rows of the chosen conditions."""
    return np.repeat(chosen, (table["stop"] - table["start"]).to_numpy())


@dataclass
class HeldOut:
    """Validation and test conditions of downstream splits, and the names of their cells.

    Attributes
    ----------
    conditions
        What is held out.
    cells
        Sorted hashes of cell names.
    splits
        The split of each downstream store, by its resolved path.
    report
        Lines on what was left out of each store.
    """

    conditions: set[Condition] = field(default_factory=set)
    cells: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    splits: dict[Path, pd.DataFrame] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)

    @classmethod
    def collect(cls, downstream: Sequence[tuple[Path, Path]]) -> HeldOut:
        """Read what the downstream splits hold out."""
        held, names = cls(), []
        for path, split_path in downstream:
            store, split = Store(path), read_split(split_path)
            part = parts(store.conditions, split, path)
            out = np.isin(part, ["valid", "test"])
            held.conditions.update(conditions_of(pd.DataFrame(store.conditions[out])))
            rows = _rows(store.conditions, out)
            names += [hashes[rows[start : start + len(hashes)]] for start, hashes in _names(store)]
            held.splits[path.resolve()] = split
        held.cells = np.unique(np.concatenate(names)) if names else held.cells
        return held

    def leave_out(self, store: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Return which conditions of a store pretraining may use, and a mask of rows it may not (or None).

        Raises
        ------
        UserError
            If nothing is left.
        """
        table = store.conditions
        held = np.array([condition in self.conditions for condition in conditions_of(table)])
        split = self.splits.get(Path(store.path).resolve())
        use = ~held if split is None else (parts(table, split, store.path) == "train") & ~held
        if not use.any():
            raise UserError(f"{store.path}: every condition is held out by a downstream split; leave it out")
        if not len(self.cells):
            return use, None
        twins = np.zeros(store.n_cells, bool)
        for start, hashes in _names(store):
            place = np.searchsorted(self.cells, hashes) % len(self.cells)
            twins[start : start + len(hashes)] = self.cells[place] == hashes
        left = int((twins & _rows(table, use)).sum())
        self.report.append(
            f"{Path(store.path).name}: {int((~use).sum())} of {len(table)} conditions are held out downstream; "
            f"{left} further cells bear a held-out cell's name"
        )
        logger.info("left out of %s", self.report[-1])
        return use, twins if twins.any() else None


_QUANTILE, _SHARE = 0.01, 0.75


@dataclass(frozen=True)
class ValueRange:
    """Numbers that are measured on training cells only.

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
    sizes
        Totals and numbers of detected genes of these cells, by condition, for each store.
    """

    unit: float
    gate_threshold: float
    maximum: np.ndarray
    cells: int
    sizes: tuple[CellSizes, ...]

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
    """Read the training cells once and return the range of their values.

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
    sizes = tuple(CellSizes(store.conditions) for store in stores)
    with track("scale of the training cells", round(total * share)) as work:
        for store, gene_map, store_rows, of_store in zip(stores, gene_maps, rows, sizes, strict=True):
            for chunk in _chunks(store_rows, share, rng):
                matrix = gene_map.apply(store.expression(chunk))
                of_store.add(chunk, matrix)
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
    return ValueRange(scale, _SHARE * float(np.quantile(sample, _QUANTILE)), maximum, cells, sizes)


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
