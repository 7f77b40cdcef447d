"""What is kept of every cell does not grow in memory: rows by condition and halves lie in mapped files."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perturbdiff.conditions.condition import Condition
from perturbdiff.evaluation.readers.cell_sources import _rows_by_condition
from perturbdiff.evaluation.readers.cells_by_condition import Cells, RowRanges
from perturbdiff.evaluation.readers.remarks import Findings
from perturbdiff.evaluation.references import halve
from perturbdiff.runtime import large_arrays

SIZES = (200_000, 800_000)  # both more than the rows that are worked on at once


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(large_arrays, "LONG_BYTES", 1 << 12)


def peak_of(work) -> int:
    """Return the most bytes that Python and NumPy allocate meanwhile; mapped files are not among them."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def conditions(number: int) -> list[Condition]:
    return [Condition(f"p{k}", "T", "b") for k in range(number)]


def test_rows_of_a_file_by_condition():
    names = conditions(5)
    codes = [np.random.default_rng(0).integers(-1, 5, size).astype(np.int32) for size in SIZES]
    found = _rows_by_condition(codes[0], names)
    for k, name in enumerate(names):
        np.testing.assert_array_equal(found[name], np.flatnonzero(codes[0] == k))
    peaks = [peak_of(lambda some=some: _rows_by_condition(some, names)) for some in codes]
    assert peaks[1] < 1.05 * peaks[0]


def test_halves_of_a_store():
    def truth(size: int) -> Cells:
        each = 1000
        rows = {c: [(each * k, each * (k + 1))] for k, c in enumerate(conditions(size // each))}
        reader: Any = SimpleNamespace(path="store")
        return Cells(reader, RowRanges(rows), RowRanges({("T", "b"): [(size, size + 50)]}))

    halves = halve(truth(10_000), conditions(2), Findings(), seed=0)
    whole = [np.sort(np.concatenate([halves.truth[c], halves.known[c]])) for c in conditions(2)]
    np.testing.assert_array_equal(np.concatenate(whole), np.arange(2000))
    small, large = (
        peak_of(lambda some=truth(s): halve(some, conditions(2), Findings(), seed=0)) for s in SIZES
    )
    assert large - small < 1.0 * (SIZES[1] - SIZES[0]), "names of conditions, and not 8 bytes a cell"
