import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturbdiff.data.cell_sets import CellSet
from perturbdiff.data.twins import TwinStream, check_even, halves
from perturbdiff.errors import UserError


class Fixed:
    steps_per_epoch = 7

    def __init__(self, target, control):
        self.sets = [CellSet(3, np.array(target), np.array(control), store=1)]

    def step(self, k):
        return self.sets


@given(st.lists(st.integers(0, 30), min_size=8, max_size=8))
def test_halves_share_no_cell_and_lose_none(rows):
    a, b = halves(CellSet(0, np.array(rows), np.arange(8)))
    assert len(a.target) == len(b.target) == 4
    assert set(a.target) | set(b.target) == set(rows)
    if len(set(rows)) > 1:
        assert not set(a.target) & set(b.target)
    else:
        assert set(a.target) == set(b.target)
    assert not set(a.control) & set(b.control)


def test_stream_puts_twins_side_by_side():
    stream = TwinStream(Fixed([5, 6, 7, 8], [1, 2, 3, 4]))
    one, other = stream.step(0)
    assert (one.condition, one.store) == (other.condition, other.store) == (3, 1)
    assert sorted([*one.target, *other.target]) == [5, 6, 7, 8]
    assert stream.steps_per_epoch == 7


def test_odd_number_of_sets_is_refused():
    check_even(8, 2)
    with pytest.raises(UserError, match="train.sets_per_step=6.*multiple of 4"):
        check_even(6, 2)
