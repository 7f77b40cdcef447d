import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbdiff.conditions.condition import condition_table
from perturbdiff.splits.splits import leave_out


def table(sizes: dict[str, int]) -> pd.DataFrame:
    keys = pd.DataFrame({"cell_type": "A", "batch": "x", "perturbation": list(sizes)})
    return condition_table(keys.assign(n_cells=list(sizes.values())), "control")


def kept(conditions: pd.DataFrame, out: np.ndarray) -> dict[str, int]:
    rows = zip(conditions["perturbation"], conditions["start"], conditions["stop"], strict=True)
    return {name: int((~out[a:b]).sum()) for name, a, b in rows}


SIZES = {"control": 50, "p": 100, "q": 7, "r": 1}


def left(fraction: float, seed: int = 0, exclude: np.ndarray | None = None) -> np.ndarray:
    conditions = table(SIZES)
    out = leave_out(conditions, np.ones(4, bool), fraction, seed, exclude)
    assert out is not None
    return out


def test_each_perturbation_keeps_its_share_and_at_least_one_cell():
    assert kept(table(SIZES), left(0.07)) == {"control": 50, "p": 7, "q": 1, "r": 1}
    assert kept(table(SIZES), left(0.5)) == {"control": 50, "p": 50, "q": 4, "r": 1}


def test_the_share_is_of_a_perturbation_in_all_its_contexts():
    """Rounded up in each of 50 contexts, 1 % of 20 cells would be 5 % of the perturbation."""
    keys = pd.DataFrame({"cell_type": "A", "batch": [f"b{i:02}" for i in range(50)]})
    keys = pd.concat([keys.assign(perturbation=name) for name in ("control", "p", "q")], ignore_index=True)
    conditions = condition_table(keys.assign(n_cells=20), "control")
    use = ~((conditions["perturbation"] == "q") & (conditions["batch"] < "b25")).to_numpy()
    out = leave_out(conditions, use, 0.01, 0)
    assert out is not None
    rows = zip(conditions["start"], conditions["stop"], strict=True)
    cells = np.array([int((~out[a:b]).sum()) for a, b in rows])
    used = pd.Series(cells[use]).groupby(conditions["perturbation"].to_numpy()[use]).sum()
    assert used.to_dict() == {"control": 1000, "p": 10, "q": 5}
    assert (cells[~use] == 20).all()


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.integers(0, 9))
def test_fewer_cells_are_among_more(a, b, seed):
    few, many = left(min(a, b), seed), left(max(a, b), seed)
    assert not (~few & many).any()


def test_the_seed_alone_decides_and_every_cell_can_be_kept():
    np.testing.assert_array_equal(left(0.1, 3), left(0.1, 3))
    assert not np.array_equal(left(0.1, 3), left(0.1, 4))
    often = sum(~left(0.1, seed)[50:150] for seed in range(400))
    assert np.mean(often) == pytest.approx(40)
    assert np.min(often) > 15  # binomial: mean 40, standard deviation 6


def test_unused_conditions_and_cells_left_out_before_stay_as_they_are():
    conditions, use = table(SIZES), np.array([True, False, True, True])
    before = np.zeros(158, bool)
    before[150:154] = True  # four of q
    out = leave_out(conditions, use, 0.34, 0, before)
    assert out is not None
    assert kept(conditions, out) == {"control": 50, "p": 100, "q": 2, "r": 1}
    assert out[150:154].all()
    assert not before[154:].any()
    assert leave_out(conditions, use, 1.0, 0) is None
    assert leave_out(conditions, use, 1.0, 0, before) is before
