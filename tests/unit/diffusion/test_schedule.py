"""The noise schedule against its closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbdiff.diffusion.schedule import NoiseSchedule


def test_tables_of_a_thousand_steps():
    schedule = NoiseSchedule(1000)
    assert schedule.betas[0] == pytest.approx(1e-4)
    assert schedule.betas[-1] == pytest.approx(0.02)
    # log of the product by summation, independent of cumprod
    logs = np.array([np.log1p(-schedule.betas[: k + 1]).sum() for k in (0, 9, 99, 499, 999)])
    np.testing.assert_allclose(np.log(schedule.alpha_bar[[0, 9, 99, 499, 999]]), logs, rtol=1e-12)
    np.testing.assert_allclose(
        schedule.alpha_bar[[0, 9, 99, 499, 999]], [0.9999, 0.99811, 0.89702, 0.07859, 4.04e-5], rtol=2e-3
    )
    assert schedule.alpha_bar.dtype == np.float64


def test_noising_keeps_unit_variance():
    schedule = NoiseSchedule(1000)
    t = torch.tensor([0, 300, 999])
    x0, noise = torch.randn(2, 3, 200, 50, generator=torch.Generator().manual_seed(0))
    x = schedule.add_noise(x0, t, noise)
    assert x.std((1, 2)).tolist() == pytest.approx([1, 1, 1], abs=0.02)
    torch.testing.assert_close(
        x[1], np.sqrt(schedule.alpha_bar[300]) * x0[1] + np.sqrt(1 - schedule.alpha_bar[300]) * noise[1],
        check_dtype=False,
    )  # fmt: skip


def test_levels():
    schedule = NoiseSchedule(1000)
    assert schedule.levels(1).tolist() == [999]
    assert schedule.levels(5).tolist() == [999, 749, 500, 250, 0]
    assert schedule.levels(1000).tolist() == list(range(999, -1, -1))
    assert schedule.levels(3, 3).tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="1001 levels"):
        schedule.levels(1001)


def test_levels_decrease_strictly_from_the_start_to_zero():
    schedule = NoiseSchedule(1000)
    for start in (None, 1000, 640, 100):
        top = 1000 if start is None else start
        for number in {2, 3, 7, 50, 99, 100, top // 2 + 1, top - 1, top}:
            if number <= top:
                levels = schedule.levels(number, start)
                assert (levels[0], levels[-1], len(levels)) == (top - 1, 0, number)
                assert (np.diff(levels) < 0).all()
                assert np.ptp(np.diff(levels)) <= 1  # evenly, to rounding


@pytest.mark.parametrize("num_steps", [100, 400, 4000])
def test_other_lengths_have_nearly_the_same_marginals(num_steps):
    """Betas scale with 1/T, so α at a share of the way is that of T = 1000: log α = -(0.1 s + 9.95 s²)."""
    schedule = NoiseSchedule(num_steps)
    for share in (0.25, 0.5, 1.0):
        found = np.log(schedule.alpha_bar[int(share * num_steps) - 1])
        assert found == pytest.approx(-(0.1 * share + 9.95 * share**2), rel=20 / num_steps + 0.01)
