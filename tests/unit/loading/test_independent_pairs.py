import numpy as np
import pandas as pd
import pytest

from perturbdiff.loading.cell_sets import CellSetSampler
from perturbdiff.loading.set_streams import MixtureSampler, PairedSetStream, check_even
from perturbdiff.runtime.errors import UserError

SIZES = (("control", 40), ("p1", 30), ("p2", 3))


def sampler(seed=0, **options):
    stop = np.cumsum([n for _, n in SIZES])
    table = pd.DataFrame(
        {
            "cell_type": "B",
            "batch": "d1",
            "perturbation": [p for p, _ in SIZES],
            "start": stop - [n for _, n in SIZES],
            "stop": stop,
            "is_control": [p == "control" for p, _ in SIZES],
            "control": 0,
        }
    )
    use = np.ones(len(table), dtype=bool)
    return CellSetSampler(table, use, set_size=8, sets_per_step=2, seed=seed, control_targets=True, **options)


def test_twins_are_of_one_condition_and_drawn_apart():
    stream = PairedSetStream(sampler())
    shared = []
    for k in range(30):
        sets = stream.step(k)
        assert len(sets) == 4
        for one, other in zip(sets[::2], sets[1::2], strict=True):
            assert one.condition == other.condition
            if one.condition == 1:
                assert len(set(other.target)) == 8
                shared.append(len(set(one.target) & set(other.target)))
            if one.condition == 0:
                assert not set(other.target) & set(other.control)
    # two independent draws of 8 out of 30 share 8 · 8 / 30 cells on average
    assert 1.2 < np.mean(shared) < 3.2


def test_first_sets_are_the_stream_itself():
    plain, twins = sampler(), PairedSetStream(sampler())
    assert twins.steps_per_epoch == plain.steps_per_epoch
    for k in (0, 5, 2):
        for a, b in zip(plain.step(k), twins.step(k)[::2], strict=True):
            np.testing.assert_array_equal(a.target, b.target)
            np.testing.assert_array_equal(a.control, b.control)


def test_twins_of_a_mixture_stay_in_their_store():
    mixture = MixtureSampler([sampler(0), sampler(1)], sets_per_step=2, seed=0)
    for one, other in zip(*(PairedSetStream(mixture).step(3)[i::2] for i in (0, 1)), strict=True):
        assert (one.store, one.condition) == (other.store, other.condition)


def test_ranks_share_out_the_pairs():
    whole = PairedSetStream(sampler()).step(4)
    parts = [PairedSetStream(sampler(rank=r, world_size=2)).step(4) for r in range(2)]
    for i, cells in enumerate(whole):
        np.testing.assert_array_equal(parts[i // 2 % 2][i % 2].target, cells.target)


def test_odd_number_of_sets_is_refused():
    check_even(8, 2)
    with pytest.raises(UserError, match="train.sets_per_step=6.*multiple of 4"):
        check_even(6, 2)
