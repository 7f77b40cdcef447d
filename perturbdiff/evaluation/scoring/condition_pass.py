"""The pass over the cells: condition by condition, real and predicted, into test results and distances.

One thread reads ahead, others compare. Memory holds the cells of a few conditions, sparse. The sorted controls are in
memory if they are few, else in temporary files.
A condition's cells are sorted once, and joined for the scopes that pool them. What remains is a row of G numbers per
scope and perturbation (`test_results`) and a dozen numbers per condition. No result depends on
the number of threads, nor on which other metrics are computed.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from perturbdiff.conditions.condition import SORTED_BY, Condition, Group
from perturbdiff.conditions.targets import Targets
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.metrics import catalogue
from perturbdiff.evaluation.metrics.differential import DEFINITIONS, Controls
from perturbdiff.evaluation.metrics.populations import CHANCE, DISTRIBUTION, condition_metrics
from perturbdiff.evaluation.metrics.realism import distinct_cells
from perturbdiff.evaluation.metrics.set_metrics import SET_METRICS
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.evaluation.metrics.spread import variances
from perturbdiff.evaluation.readers.cells_by_condition import ExpressionView
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.condition_cells import (
    SetCells,
    joined_groups,
    mean_of,
    read_sets,
    sorted_groups,
)
from perturbdiff.evaluation.scoring.scopes import (
    HELD_BYTES,
    Comparisons,
    Scope,
    Tested,
    Unit,
    of_shard,
    units_of,
)
from perturbdiff.evaluation.scoring.worker_threads import Workers, usable
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.large_arrays import ScratchArrays
from perturbdiff.runtime.progress import Track, track

KEPT_VALUES = 1 << 24
"""Values of real cells that are kept for when their own condition comes, 0.13 GiB."""


Both = tuple[Columns, Columns]  # real and predicted


@dataclass(frozen=True)
class Wanted:
    """What the chosen metrics need.

    Attributes
    ----------
    table
        Metrics of pseudobulks and DE genes.
    distribution
        Metrics of a condition's cells.
    sets
        Metrics of a condition's sets of cells; none where it is not known which cells were a set.
    tests, chance
        Whether any needs rank tests, or the cells of another perturbation.
    """

    table: tuple[str, ...]
    distribution: tuple[str, ...]
    sets: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str], *, sets: bool) -> Wanted:
        """Return what ``names`` (metrics or families, empty for all) need; ``sets`` says whether they are known."""
        chosen = catalogue.chosen(names)
        spread, of_sets = (tuple(n for n in chosen if n in some) for some in (DISTRIBUTION, SET_METRICS))
        rest = tuple(n for n in chosen if n not in (*spread, *of_sets))
        return cls(rest, spread, of_sets if sets else ())

    @property
    def tests(self) -> bool:  # noqa: D102 - see the class
        return any(
            m.uses_q or m.needs_real_de or m.needs_min_de for m in map(catalogue.METRICS.get, self.table) if m
        )

    @property
    def chance(self) -> bool:  # noqa: D102 - see the class
        return bool(self.sets) or any(f"chance_{n}" in CHANCE for n in self.distribution)


@dataclass(frozen=True)
class Scored:
    """The results of the pass.

    Attributes
    ----------
    wanted
        The metrics that were computed.
    units
        Scopes that were scored, those with the same conditions together; the pool first, then contexts by name.
    tested
        Test results of each unit; empty if no metric needs them.
    comparisons
        The same as a comparison of each scope, made on demand.
    conditions
        One row per condition of the units: cell_type, batch, perturbation, context, n_cells, n_predicted,
        n_distinct (predicted cells that differ from each other), effect
        (norm of the real change, log1p), own (whether its distances are scored here), and if so the metrics of the
        distribution and their values by chance, and where sets are known n_sets and n_predicted_sets (those that were
        compared) with their metrics.
    targets
        Target genes of the perturbations.
    """

    wanted: Wanted
    units: list[Unit]
    tested: list[Tested]
    comparisons: Mapping[Scope, catalogue.Comparison]
    conditions: pd.DataFrame
    targets: Targets


def score_cells(
    pairing: Pairing,
    config: EvaluateConfig,
    *,
    seed: int = 0,
    threads: int | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Scored:
    """Test and compare the conditions of ``pairing``.

    Parameters
    ----------
    config
        Its ``metrics`` say what is computed.
    seed
        Of the cells drawn for distances; the draw of a condition does not depend on the other conditions.
    threads
        Number of threads that compare; by default the processors that this process may use.
    shard
        Part I of N, the scopes being shared out by their cells.

    Raises
    ------
    UserError
        If the table of target genes does not fit, a value contradicts the declared scale, or a condition has no
        cell on one side.
    """
    wanted = Wanted.of(config.metrics, sets=pairing.sets is not None)
    if not (wanted.table or wanted.distribution or wanted.sets):
        raise UserError(
            f"{pairing.real.reader.path}: metrics of sets need to know on both sides which cells were a set; name the "
            "truth's column with --set-col, and give predictions with whole numbers in obs column 'set'"
        )
    for condition in pairing.conditions:
        if not (len(pairing.real.rows[condition]) and len(pairing.predicted.rows[condition])):
            raise UserError(f"condition {condition} has no cells on one side")
    units = of_shard(units_of(pairing), pairing, shard)
    with threadpool_limits(1, "blas"):  # the threads here are the parallelism, and sums keep their order
        work = _Pass(pairing, config, wanted, units, seed)
        with Workers(usable(threads)) as workers:
            work.read_controls(workers)
        with Workers(usable(threads)) as workers:
            work.read_conditions(workers)
    comparisons = Comparisons(work.tested, config)
    return Scored(wanted, units, work.tested, comparisons, work.table(), work.targets)


@dataclass
class _Perturbation:
    """Sorted cells of a perturbation's conditions as they come in."""

    name: str
    conditions: list[Condition]
    columns: dict[Condition, Both] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, condition: Condition, columns: Both) -> bool:
        """Keep a condition's columns; return True to the one caller that brings the last condition."""
        with self.lock:
            self.columns[condition] = columns
            return len(self.columns) == len(self.conditions)


class _Pass:
    """The state of one pass over the cells. Threads sort and compare, the main thread reads."""

    def __init__(
        self, pairing: Pairing, config: EvaluateConfig, wanted: Wanted, units: list[Unit], seed: int
    ) -> None:
        self.targets = Targets.read(config.targets, pairing.perturbations, pairing.genes)
        self.pairing, self.config, self.wanted, self.units, self.seed = pairing, config, wanted, units, seed
        self.tested: list[Tested] = []
        self.means: dict[Group, np.ndarray] = {}
        self._own = {c for unit in units for c in unit.own}
        scored = {c for unit in units for c in unit.conditions}
        self._conditions = [c for c in pairing.conditions if c in scored]
        self._rows: dict[Condition, dict[str, object]] = {}
        self._lock = threading.Lock()

    def read_controls(self, workers: Workers) -> None:
        """Read the controls of the scopes once, some at a time, sort and join them."""
        pairing, groups = self.pairing, {c.group for c in self._conditions}
        sides: list[tuple[ExpressionView, Mapping[Group, np.ndarray]]] = [(pairing.real, pairing.controls)]
        if pairing.predicted_controls is not None and self.wanted.table:
            sides.append((pairing.predicted, pairing.predicted_controls))
        scratch, found = ScratchArrays().empty, []
        for place, (side, controls) in enumerate(sides):
            wanted = {group: controls[group] for group in sorted(groups & set(controls))}
            if self.wanted.table:
                found.append(sorted_groups(side, wanted, workers, scratch))
                means = {group: columns.mean for group, columns in found[-1].items()}
            else:
                means = {group: mean_of(side, rows) for group, rows in wanted.items()}
            if place == 0:
                self.means = means
        if self.wanted.table:
            size = sum(Tested.size(unit, len(pairing.genes)) for unit in self.units)
            for unit in self.units:
                controls = [Controls.of_columns(joined_groups(unit, columns, scratch)) for columns in found]
                both = (controls[0], controls[-1])
                self.tested.append(
                    Tested(unit, both, pairing.genes, held=size <= HELD_BYTES, targets=self.targets)
                )

    def read_conditions(self, workers: Workers) -> None:
        """Read the conditions one after the other and have them compared."""
        by_perturbation: dict[str, _Perturbation] = {}
        for condition in self._conditions:
            name = condition.perturbation
            by_perturbation.setdefault(name, _Perturbation(name, [])).conditions.append(condition)
        partners = _partners(self.pairing) if self.wanted.chance else {}
        with track("evaluate", len(self._conditions), "conditions") as progress:
            for condition, *cells in self._read(partners):
                sets = self._read_sets(condition, partners.get(condition))
                values = sum(c.nnz for c in cells if c is not None) + (0 if sets is None else sets.nnz)
                work = partial(
                    self.work_on_condition,
                    condition,
                    cells,
                    sets,
                    by_perturbation[condition.perturbation],
                    progress,
                )
                workers.submit(work, values)
                del work, cells, sets
            workers.finish()

    def _read(
        self, partners: Mapping[Condition, Condition]
    ) -> Iterator[tuple[Condition, Sparse, Sparse, Sparse | None]]:
        """Yield each condition's real and predicted cells, and real cells of another perturbation."""
        real, kept, room = self.pairing.real, {}, KEPT_VALUES
        place = {c: i for i, c in enumerate(self._conditions)}
        for i, condition in enumerate(self._conditions):
            cells = kept.pop(condition, None)
            if cells is None:
                cells = real.cells(real.rows[condition])
            else:
                room += cells.nnz
            other = None
            if condition in self._own and (partner := partners.get(condition)) is not None:
                rows = real.rows[partner]
                other = kept.get(partner)
                if other is None:
                    other = real.cells(self._drawn(partner, rows))
                    if len(rows) == other.shape[0] and place.get(partner, -1) > i and other.nnz <= room:
                        kept[partner] = other
                        room -= other.nnz
            yield (
                condition,
                cells,
                self.pairing.predicted.cells(self.pairing.predicted.rows[condition]),
                other,
            )

    def _read_sets(self, condition: Condition, partner: Condition | None) -> SetCells | None:
        """Return the cells of the condition's sets, if they are to be compared here."""
        if condition not in self._own or not self.wanted.sets:
            return None
        return read_sets(self.pairing, condition, partner, seed=_seed_of(condition, self.seed))

    def _drawn(self, condition: Condition, rows: np.ndarray) -> np.ndarray:
        """Return at most ``max_cells`` of a condition's rows."""
        if len(rows) <= self.config.max_cells:
            return rows
        rng = np.random.default_rng(_seed_of(condition, self.seed))
        return np.sort(rng.choice(rows, self.config.max_cells, replace=False))

    def work_on_condition(
        self,
        condition: Condition,
        cells: list[Sparse],
        sets: SetCells | None,
        perturbation: _Perturbation,
        progress: Track,
    ) -> None:
        """Sort and compare the cells of one condition; test the perturbation if it was its last."""
        real, predicted, other = cells
        columns = None
        if self.wanted.table or (condition in self._own and "wasserstein" in self.wanted.distribution):
            columns = Columns.of([real]), Columns.of([predicted])
        row = self._row(condition, real, predicted, other, columns)
        self._rows[condition] = row if sets is None else row | sets.metrics(self.wanted.sets)
        cells.clear()
        del real, predicted, other, sets
        if self.wanted.table and columns is not None and perturbation.complete(condition, columns):
            del columns
            self._test(perturbation)
        with self._lock:
            progress.advance()

    def _row(
        self,
        condition: Condition,
        real: Sparse,
        predicted: Sparse,
        other: Sparse | None,
        columns: Both | None,
    ) -> dict[str, object]:
        control = self.means.get(condition.group)
        row: dict[str, object] = {
            **{label: getattr(condition, label) for label in SORTED_BY},
            "context": self.pairing.contexts.get(condition, ""),
            "n_cells": real.shape[0],
            "n_predicted": predicted.shape[0],
            "n_distinct": distinct_cells(predicted),
            "own": condition in self._own,
            "effect": float("nan")
            if control is None
            else float(np.linalg.norm(_mean(real, columns and columns[0]) - control)),
        }
        if condition not in self._own:
            return row
        return row | condition_metrics(
            predicted,
            real,
            self.wanted.distribution,
            max_cells=self.config.max_cells,
            seed=_seed_of(condition, self.seed),
            other=other,
            columns=None if columns is None else (columns[1], columns[0]),
            control=control,
            depth=self.pairing.depth,
        )

    def _test(self, perturbation: _Perturbation) -> None:
        """Test a perturbation's cells against the controls of each scope that it is in."""
        left, joined = perturbation.columns, []
        perturbation.columns = {}
        for tested in reversed(self.tested):  # contexts first: the pool is joined from them
            if tested.unit.is_pool:
                self._test_in(tested, perturbation.name, _joined([*joined, *left.values()]))
            elif of_context := [left.pop(c) for c in tested.unit.conditions if c in left]:
                joined.append(_joined(of_context))
                self._test_in(tested, perturbation.name, joined[-1])

    def _test_in(self, tested: Tested, perturbation: str, columns: Both) -> None:
        rows = []
        for controls, cells in zip(tested.controls, columns, strict=True):
            p = np.full(len(cells.mean), np.nan)
            if self.wanted.tests:
                p = controls.test_columns(cells, DEFINITIONS[self.config.definition])[0]
            rows += [p, cells.mean]
        real, predicted = columns
        rows.insert(2, variances(real))
        total = float(np.nan_to_num(variances(predicted).sum()))
        tested.put(perturbation, rows, total, (real.num_cells, predicted.num_cells))

    def table(self) -> pd.DataFrame:
        """Return the rows of all conditions read, in the order of the pairing."""
        return pd.DataFrame([self._rows[c] for c in self._conditions])


def _joined(parts: list[Both]) -> Both:
    real, predicted = (Columns.joined([part[side] for part in parts]) for side in (0, 1))
    return real, predicted


def _mean(cells: Sparse, columns: Columns | None) -> np.ndarray:
    """Return the mean of each gene, float64 [G]; taken from the sorted columns where there are any."""
    if columns is not None:
        return columns.mean
    return np.bincount(cells.indices, weights=cells.data, minlength=cells.shape[1]) / cells.shape[0]


def _seed_of(condition: Condition, seed: int) -> int:
    return zlib.crc32("\0".join((*condition.group, condition.perturbation, str(seed))).encode())


def _partners(pairing: Pairing) -> dict[Condition, Condition]:
    """Return for each condition the condition of another perturbation that serves as chance.

    The next perturbation by name, the first after the last, of the same cell type and batch; if there is none, of
    the same context.
    """
    partners: dict[Condition, Condition] = {}
    contexts = pairing.contexts
    for key in (lambda c: c.group, lambda c: contexts.get(c)):
        groups: dict[object, list[Condition]] = {}
        for condition in pairing.conditions:
            groups.setdefault(key(condition), []).append(condition)
        for members in groups.values():
            names = sorted({c.perturbation for c in members})
            first = {c.perturbation: c for c in reversed(members)}
            following = dict(zip(names, [*names[1:], names[0]], strict=True))
            for condition in members if len(names) > 1 else ():
                partners.setdefault(condition, first[following[condition.perturbation]])
    return partners
