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
