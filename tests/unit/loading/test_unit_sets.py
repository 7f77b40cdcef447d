"""Cell sets within one well, plate or guide: every cell is used, nothing is mixed, and ranks share the stream."""

import logging

import numpy as np
import pandas as pd
import pytest

from perturbdiff.conditions.condition import condition_table
from perturbdiff.conditions.set_units import UnitRows
from perturbdiff.loading.set_streams import MixtureSampler, UnitSetSampler
from perturbdiff.runtime.errors import UserError

CONDITIONS = condition_table(
    pd.DataFrame(
        [("B", "x", "control", 70), ("B", "x", "p", 60), ("B", "x", "q", 5), ("T", "y", "control", 30)],
        columns=["cell_type", "batch", "perturbation", "n_cells"],
    ),
    "control",
)
SETS = np.random.default_rng(0).integers(3, size=165) + 1
SETS[:70][SETS[:70] == 3] = 4  # controls of set 3 are missing
SETS[70:74] = 9  # a well of four cells
EVERY = np.ones(len(CONDITIONS), bool)


def sampler(conditions=CONDITIONS, sets=SETS, use=EVERY, **options):
    given = {"set_size": 8, "sets_per_step": 4, "seed": 1, **options}
    return UnitSetSampler(conditions, use, sets=sets, **given)


def test_sets_and_their_controls_are_from_one_unit_each():
    stream, seen, drawn = sampler(), np.zeros(165, int), set()
    for place in range(stream.sets_per_epoch):
        made = stream.set_at(place)
        start, stop = CONDITIONS.loc[made.condition, ["start", "stop"]]
        assert ((made.target >= start) & (made.target < stop)).all()
        (own,), (control,) = np.unique(SETS[made.target]), np.unique(SETS[made.control])
        assert (made.control < 70).all()
        assert len(set(made.control)) == 8
        if own in (1, 2):
            assert control == own, "controls of the same set"
        else:
            drawn.add(int(control))
        seen[made.target] += 1
    assert drawn == {1, 2, 4}, "no controls of its own: of any other set"
    wanted = np.zeros(165, bool)
    wanted[74:135] = True  # perturbed, but for the well of four cells
    small = [
        s
        for s in np.unique(SETS[130:135])
        if (SETS[130:135] == s).sum() < np.unique(SETS[130:135], return_counts=True)[1].max()
    ]
    wanted[130:135] = ~np.isin(SETS[130:135], small)  # the largest set of a small condition stays
    assert ((seen > 0) == wanted).all()


def test_units_leave_out_excluded_rows_and_know_their_conditions():
    exclude = np.zeros(165, bool)
    exclude[70:110] = True
    units = UnitRows(CONDITIONS, SETS, exclude)
    rows = np.concatenate([units.at(u, np.arange(n)) for u, n in enumerate(units.count)])
    assert sorted(rows) == np.flatnonzero(~exclude).tolist()
    for unit in range(len(units.count)):
        own = units.at(unit, np.arange(units.count[unit]))
        assert (SETS[own] == units.label[unit]).all()
        assert (np.searchsorted(CONDITIONS["stop"], own, "right") == units.condition[unit]).all()
    stream = sampler(exclude=exclude)
    assert not exclude[np.concatenate([stream.set_at(k).target for k in range(stream.sets_per_epoch)])].any()
    assert stream.target_conditions.tolist() == [1, 2]


def test_control_targets_and_their_controls_are_of_one_set():
    stream = sampler(control_targets=True)
    for place in range(stream.sets_per_epoch):
        made = stream.set_at(place)
        if CONDITIONS["is_control"][made.condition]:
            assert len(np.unique(SETS[np.concatenate([made.target, made.control])])) == 1
            if made.condition == 0:  # units of 16 cells and more
                assert not set(made.target) & set(made.control)
    assert stream.target_conditions.tolist() == [0, 1, 2, 3]
    assert 3 not in sampler(control_targets="perturbed").target_conditions


def test_pretraining_takes_every_condition_as_its_own_control():
    alone = CONDITIONS.assign(
        is_control=False, control=range(len(CONDITIONS))
    )  # as training on contexts does
    stream = sampler(alone)
    for place in range(stream.sets_per_epoch):
        made = stream.set_at(place)
        assert len(np.unique(SETS[np.concatenate([made.target, made.control])])) == 1
    assert stream.target_conditions.tolist() == [0, 1, 2, 3]


def test_ranks_and_mixtures_share_the_stream():
    whole = sampler()
    parts = [sampler(rank=rank, world_size=2) for rank in range(2)]
    for k in range(3):
        expected = [one.target.tolist() for one in whole.step(k)]
        for rank, part in enumerate(parts):
            assert [one.target.tolist() for one in part.step(k)] == expected[rank::2]
    mixed = MixtureSampler([sampler(), sampler(seed=2)], sets_per_step=4, seed=0)
    assert {one.store for k in range(4) for one in mixed.step(k)} == {0, 1}


def test_a_model_that_is_told_the_set_is_refused():
    two = CONDITIONS.copy()
    by_batch = sampler(two, (two.index.repeat(two["n_cells"]) >= 3).astype(int))
    with pytest.raises(UserError, match="'well'.* one set for each perturbation and cell_type"):
        by_batch.check_family(["perturbation"], "well")
    sampler().check_family(["perturbation", "batch"], "well")


def test_wells_smaller_than_a_set_are_told(caplog):
    with caplog.at_level(logging.INFO):
        sampler(set_size=64)
    assert "choose train.set_size=" in caplog.text
    assert "too small to learn from" in caplog.text
