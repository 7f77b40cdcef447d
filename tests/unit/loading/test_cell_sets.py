import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbdiff.conditions.condition import condition_table
from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.loading.cell_sets import CellSetSampler
from perturbdiff.loading.set_streams import MixtureSampler
from perturbdiff.loading.windows import WindowedSampler
from perturbdiff.runtime.errors import UserError


def table(sizes: dict[tuple[str, str, str], int]) -> pd.DataFrame:
    keys = pd.DataFrame(list(sizes), columns=["cell_type", "batch", "perturbation"])
    return condition_table(keys.assign(n_cells=list(sizes.values())), "control")


def sampler(conditions, m=4, b=4, seed=0, **kwargs):
    kind = WindowedSampler if "window" in kwargs else CellSetSampler
    return kind(conditions, np.ones(len(conditions), bool), set_size=m, sets_per_step=b, seed=seed, **kwargs)


WAYS = [{}, {"window": 3, "block": 6, "mixed": 12}, {"window": 2, "block": 8, "mixed": 40}]


sizes = st.dictionaries(
    st.tuples(st.sampled_from("AB"), st.sampled_from("xy"), st.sampled_from(["p", "q", "r"])),
    st.integers(1, 30),
    min_size=1,
)


@st.composite
def screens(draw):
    perturbed = draw(sizes)
    controls = {(c, b, "control"): draw(st.integers(1, 40)) for c, b, _ in perturbed}
    return table(perturbed | controls)


@settings(max_examples=60, deadline=None)
@given(screens(), st.integers(2, 9), st.booleans(), st.integers(0, 5), st.sampled_from(WAYS))
def test_each_epoch_holds_every_cell_and_never_mixes_conditions(conditions, m, control_targets, seed, way):
    stream = sampler(conditions, m=m, seed=seed, control_targets=control_targets, **way)
    start, stop = conditions["start"].to_numpy(), conditions["stop"].to_numpy()
    for epoch in (0, 1):
        seen = np.zeros(stop.max(), int)
        for i in range(stream.sets_per_epoch):
            cells = stream.set_at(epoch * stream.sets_per_epoch + i)
            assert cells.target.shape == cells.control.shape == (m,)
            c = cells.condition
            assert ((cells.target >= start[c]) & (cells.target < stop[c])).all()
            own = conditions["control"][c]
            assert ((cells.control >= start[own]) & (cells.control < stop[own])).all()
            seen[cells.target] += 1
        wanted = np.repeat(control_targets | ~conditions["is_control"].to_numpy(), conditions["n_cells"])
        assert (seen[wanted] >= 1).all()
        assert (seen[~wanted] == 0).all()


@settings(max_examples=30, deadline=None)
@given(screens(), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.sampled_from(WAYS))
def test_ranks_share_the_single_stream(conditions, world, first, way):
    whole = sampler(conditions, m=3, **way)
    ranks = [sampler(conditions, m=3, rank=r, world_size=world, **way) for r in range(world)]
    for k in (first, first + 7):
        shares = [rank.step(k) for rank in ranks]
        assert len({len(s) for s in shares}) == 1
        merged = [shares[i % world][i // world] for i in range(4)]
        for a, b in zip(whole.step(k), merged, strict=True):
            assert a.condition == b.condition
            np.testing.assert_array_equal(a.target, b.target)
            np.testing.assert_array_equal(a.control, b.control)


@pytest.mark.parametrize("way", WAYS)
def test_stream_depends_on_seed_and_step_only(way):
    conditions = table({("A", "x", "p"): 50, ("A", "x", "q"): 20, ("A", "x", "control"): 60})

    def rows(stream, k):
        return np.concatenate([np.concatenate([s.target, s.control]) for s in stream.step(k)])

    forward = sampler(conditions, **way)
    steps = [rows(forward, k) for k in range(20)]
    resumed = sampler(conditions, **way)
    for k in (17, 3, 18, 0):
        np.testing.assert_array_equal(rows(resumed, k), steps[k])
    assert not np.array_equal(rows(sampler(conditions, seed=1, **way), 0), steps[0])
    assert not np.array_equal(np.sort(rows(forward, 0)), np.sort(rows(forward, forward.steps_per_epoch)))


def test_blocks_have_no_repeats_but_the_last():
    conditions = table({("A", "x", "p"): 10, ("A", "x", "control"): 9})
    stream = sampler(conditions, m=4)
    assert stream.sets_per_epoch == 3
    distinct = sorted(len(set(stream.set_at(i).target)) for i in range(3))
    assert distinct[1:] == [4, 4]
    assert all(len(set(stream.set_at(i).control)) == 4 for i in range(3))


def test_targets_are_permuted_uniformly():
    conditions = table({("A", "x", "p"): 8, ("A", "x", "control"): 8})
    stream = sampler(conditions, m=4)
    together = np.zeros((8, 8))
    for i in range(800):
        rows = stream.set_at(i).target - conditions["start"][1]
        together[np.ix_(rows, rows)] += 1
    off = together[~np.eye(8, dtype=bool)]
    assert abs(off.mean() - 800 * 12 / 56) < 1e-9
    assert off.min() > 0.7 * off.mean()


@pytest.mark.parametrize("way", [{}, {"window": 10, "block": 40, "mixed": 80}])
@pytest.mark.parametrize("size", [16, 17, 40, 41, 200])
def test_control_targets_have_disjoint_controls(size, way):
    conditions = table({("A", "x", "p"): 5, ("A", "x", "control"): size})
    stream = sampler(conditions, m=20, control_targets=True, **way)
    covered = set()
    for i in range(stream.sets_per_epoch):
        cells = stream.set_at(i)
        if conditions["is_control"][cells.condition]:
            assert not set(cells.target) & set(cells.control)
            assert size < 40 or len(set(cells.control)) == 20
            covered |= set(cells.target.tolist())
    assert len(covered) == size


@pytest.mark.parametrize("way", WAYS)
def test_controls_of_perturbed_targets_alone_are_targets(way):
    conditions = table(
        {("A", "x", "p"): 9, ("A", "x", "control"): 30, ("A", "y", "control"): 30, ("B", "x", "control"): 30}
        | {("C", "x", "p"): 9, ("C", "y", "control"): 30}  # draws from controls of another batch
        | {("D", "x", "p"): 9, ("D", "x", "control"): 30}  # not used
    )
    use = (conditions["cell_type"] != "D").to_numpy() | conditions["is_control"].to_numpy()
    kind = WindowedSampler if way else CellSetSampler
    stream = kind(conditions, use, set_size=4, sets_per_step=4, seed=0, control_targets="perturbed", **way)
    targets = {
        tuple(row) for row in conditions.loc[stream.targets, ["cell_type", "batch", "is_control"]].to_numpy()
    }
    assert targets == {("A", "x", False), ("A", "x", True), ("C", "x", False), ("C", "y", True)}
    drawn = {stream.set_at(i).condition for i in range(stream.sets_per_epoch)}
    assert drawn == set(stream.targets.tolist())


def test_few_controls_may_overlap():
    conditions = table({("A", "x", "p"): 5, ("A", "x", "control"): 9})
    stream = sampler(conditions, m=20, control_targets=True)
    sets = [stream.set_at(i) for i in range(stream.sets_per_epoch)]
    assert all(len(s.control) == 20 for s in sets)


def test_excluded_rows_never_appear_and_empty_conditions_vanish():
    conditions = table({("A", "x", "p"): 12, ("A", "x", "q"): 5, ("A", "x", "control"): 30})
    exclude = np.zeros(47, bool)
    exclude[conditions["start"][2] : conditions["stop"][2]] = True  # all of q
    exclude[::2] = True
    stream = sampler(conditions, exclude=exclude)
    assert stream.targets.tolist() == [1]
    seen = set()
    for i in range(stream.sets_per_epoch):
        cells = stream.set_at(i)
        assert not exclude[cells.target].any()
        assert not exclude[cells.control].any()
        seen |= set(cells.target.tolist())
    kept = np.flatnonzero(~exclude[conditions["start"][1] : conditions["stop"][1]]) + conditions["start"][1]
    assert seen == set(kept.tolist())


def test_fallback_controls_are_stated(caplog):
    controls = {("A", "y", "control"): 5, ("A", "w", "control"): 2, ("B", "z", "control"): 6}
    conditions = table({("A", "x", "p"): 3, ("C", "z", "p"): 3} | controls)
    pools = ControlPools(conditions, Rows(conditions), np.flatnonzero(~conditions["is_control"]))
    assert pools.fallbacks == {"cell_type": 1, "batch": 1}
    lonely = conditions.index[(conditions["cell_type"] == "A") & (conditions["perturbation"] == "p")][0]
    drawn = pools.draw(lonely, 7, np.random.default_rng(0))
    of_type_a = conditions[(conditions["cell_type"] == "A") & conditions["is_control"]]
    allowed = np.concatenate(
        [np.arange(a, b) for a, b in zip(of_type_a["start"], of_type_a["stop"], strict=True)]
    )
    assert sorted(drawn) == sorted(allowed)
    assert "same cell type in other batches" in caplog.text
    assert "same batch in other cell types" in caplog.text


def test_no_controls_at_all_is_an_error():
    conditions = table({("A", "x", "p"): 3, ("B", "y", "control"): 5})
    with pytest.raises(UserError, match="no control cells for cell type 'A', batch 'x'"):
        sampler(conditions)


def test_small_conditions_are_logged_once(caplog):
    caplog.set_level("INFO", "perturbdiff")
    conditions = table({("A", "x", "p"): 3, ("A", "x", "q"): 30, ("A", "x", "control"): 9})
    sampler(conditions, m=8).step(0)
    assert caplog.text.count("1 of 2 conditions have fewer than 8 cells") == 1


def test_sets_that_ranks_cannot_share_are_refused():
    conditions = table({("A", "x", "p"): 3, ("A", "x", "control"): 9})
    with pytest.raises(UserError, match="sets_per_step=4 cannot be shared evenly by 3"):
        sampler(conditions, world_size=3)
    with pytest.raises(UserError, match="no cells to make sets of"):
        CellSetSampler(conditions, np.zeros(2, bool), set_size=2, sets_per_step=1, seed=0)


def mixture(weights=None, **kwargs):
    small = sampler(table({("A", "x", "p"): 40, ("A", "x", "control"): 9}), m=4)
    large = sampler(table({("A", "x", "p"): 120, ("A", "x", "control"): 9}), m=4, seed=1)
    return MixtureSampler([small, large], sets_per_step=4, seed=3, weights=weights, **kwargs)


def test_mixture_keeps_weights_and_each_stream():
    mixed = mixture([3, 1])
    sets = [mixed.set_at(p) for p in range(2048)]
    assert np.bincount([s.store for s in sets]).tolist() == [1536, 512]
    for store in (0, 1):
        own = [s for s in sets if s.store == store]
        for i, cells in enumerate(own):
            np.testing.assert_array_equal(cells.target, mixed.samplers[store].set_at(i).target)


def test_mixture_defaults_to_numbers_of_sets_and_is_pure():
    mixed = mixture()
    assert mixed.quota.tolist() == [256, 768]
    again = mixture(rank=1, world_size=2)
    for k in (300, 2):
        for a, b in zip(mixed.step(k)[1::2], again.step(k), strict=True):
            np.testing.assert_array_equal(a.control, b.control)
            assert a.store == b.store


def test_mixture_refuses_bad_weights():
    with pytest.raises(UserError, match="one weight above 0"):
        mixture([1])
    with pytest.raises(UserError, match="one weight above 0"):
        mixture([1, 0])
