"""The sets and the chance of a step, shared out over processes and forward passes, are those of one process."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import tiny_module

from perturbdiff.loading.cell_sets import CellSetSampler
from perturbdiff.loading.set_streams import MixtureSampler, PairedSetStream
from perturbdiff.loading.windows import WindowedSampler

CONDITIONS = pd.DataFrame(
    {
        "cell_type": "B",
        "batch": "d1",
        "perturbation": ["control", "p1", "p2", "p3"],
        "start": [0, 40, 73, 78],
        "stop": [40, 73, 78, 100],
        "is_control": [True, False, False, False],
        "control": 0,
    }
)


def stream(kind, sets_per_step, twins, rank=0, world_size=1):
    place = {"sets_per_step": sets_per_step, "rank": rank, "world_size": world_size}
    own = WindowedSampler if kind == "windowed" else CellSetSampler
    use = np.ones(len(CONDITIONS), bool)
    samplers = [own(CONDITIONS, use, set_size=4, seed=seed, quiet=True, **place) for seed in (3, 4)]
    found = MixtureSampler(samplers, seed=3, **place) if kind == "mixture" else samplers[0]
    return PairedSetStream(found) if twins == 2 else found


def contents(cells):
    return cells.store, cells.condition, cells.target.tolist(), cells.control.tolist()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["memory", "windowed", "mixture"]),
    world=st.integers(1, 8),
    each=st.integers(1, 4),
    first=st.integers(0, 40),
    steps=st.integers(1, 5),
    twins=st.sampled_from([1, 2]),
)
def test_ranks_share_out_a_step_from_wherever_they_resume(kind, world, each, first, steps, twins):
    whole = stream(kind, world * each, twins)
    ranks = [stream(kind, world * each, twins, rank, world) for rank in range(world)]
    for k in range(steps):
        whole.step(k)  # one that ran from the start; the ranks begin at `first`
    for k in range(first, first + steps):
        shares = [rank.step(k) for rank in ranks]
        assert {len(share) for share in shares} == {each * twins}
        # pair (or set) b of rank r is pair r + b · world of the step: none twice, none left out
        pairs = [share[b * twins : (b + 1) * twins] for b in range(each) for share in shares]
        assert [contents(s) for pair in pairs for s in pair] == [contents(s) for s in whole.step(k)]


@settings(max_examples=60, deadline=None)
@given(
    statistic=st.sampled_from(["V", "cross"]),
    world=st.integers(1, 8),
    parts=st.integers(1, 4),
    count=st.integers(1, 3),
    step=st.integers(0, 10**6),
    per=st.sampled_from(["set", "step"]),
)
def test_chance_goes_with_the_sets_over_ranks_and_passes(statistic, world, parts, count, step, per):
    module = tiny_module(statistic, drop_per=per, drop_covariates=0.5)
    twins = 2 if statistic == "cross" else 1
    whole = module.draws(torch.Size((world * parts * count * twins, 2, 3)), step)
    seen = torch.zeros_like(whole.noise)
    for rank in range(world):
        for part in range(parts):
            shape = torch.Size((count * twins, 2, 3))
            mine = module.draws(shape, step, rank=rank, world=world, part=part, parts=parts)
            assert mine.self_condition == whole.self_condition
            for b in range(count):
                pair = rank + (part * count + b) * world  # of the step, as the sampler deals them out
                here, there = slice(b * twins, (b + 1) * twins), slice(pair * twins, (pair + 1) * twins)
                for own, all_ in zip(mine[:3], whole[:3], strict=True):
                    assert torch.equal(own[here], all_[there])
                seen[there] += 1
    assert (seen == 1).all()
