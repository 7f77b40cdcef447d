"""Arrays that are in memory while they are few, and in temporary files that are mapped into it afterwards."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from perturbdiff.runtime import large_arrays
from perturbdiff.runtime.large_arrays import ScratchArrays


def is_mapped(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap | memoryview)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(large_arrays, "HELD_BYTES", 1 << 10)
    monkeypatch.setattr(large_arrays, "_SEGMENT", 1 << 12)


def test_every_array_is_its_own_and_only_the_first_are_in_memory():
    scratch = ScratchArrays()
    lengths = [10, 100, 0, 1, 7, 300, 5000, 33, 64, 20_000, 900]
    arrays = [scratch.empty(n, np.dtype(np.float64 if n % 2 else np.float32)) for n in lengths]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [len(array) for array in arrays] == lengths
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert [is_mapped(arrays[k]) for k in (0, 1, 5, 6, 9, 10)] == [False, False, True, True, True, True]


def test_a_full_disk_leaves_them_in_memory(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    array = ScratchArrays().empty(5000, np.dtype(np.float32))
    array[:] = 1
    assert not is_mapped(array)
