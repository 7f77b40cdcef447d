"""Medians from counts of equal values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturbdiff.preprocessing import scan


@given(seed=st.integers(0, 999), pieces=st.integers(1, 5), whole=st.booleans())
def test_medians_are_numpys(seed, pieces, whole):
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 4, 60)
    values = (rng.integers(0, 9, 60) if whole else rng.random(60)).astype(np.float32)
    counted = scan.StreamingMedian()
    for part in np.array_split(np.arange(60), pieces):
        counted.add(group[part], values[part])
    expected = [np.median(values[group == g]) if (group == g).any() else np.nan for g in range(6)]
    np.testing.assert_array_equal(counted.medians(6), np.array(expected, np.float64))


def test_memory_follows_the_number_of_different_values(monkeypatch):
    monkeypatch.setattr(scan, "_MOST_WAITING", 50)
    counted = scan.StreamingMedian()
    for _ in range(100):
        counted.add(np.zeros(20, int), np.arange(20, dtype=np.float32))
        assert sum(map(len, counted._keys)) <= 50 + 20
    assert counted.medians(1)[0] == pytest.approx(9.5)
