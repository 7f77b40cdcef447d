"""Zeros, numbers of detected genes and totals of predicted cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbdiff.model.cell_sizes import Spread, make_zeros, match_totals, match_zeros, spread_of

S, G = 64, 200


def cells(seed, spread=1.0, depth=0.0):
    """Return sets whose cells differ in depth, log1p [2, S, G]."""
    rng = np.random.default_rng(seed)
    mean = rng.gamma(0.5, 2.0, G) * np.exp(depth * rng.normal(size=(2, S, 1)))
    counts = rng.poisson(mean * np.exp(spread * rng.normal(size=(2, S, 1))))
    return torch.from_numpy(np.log1p(counts)).float()


def total(sets):
    return torch.expm1(sets).sum(-1).log1p()


def detected(sets):
    return (sets > 0).sum(-1).float()


def spread(sizes):
    """Return the spread of sizes [B, S] over each set."""
    return spread_of(sizes[..., None]).flatten()


def test_the_spread_is_the_sd_of_all_but_a_few_odd_cells():
    sizes = 0.3 * torch.randn(1, 2000, 1, generator=torch.Generator().manual_seed(0))
    assert spread_of(sizes).item() == pytest.approx(0.3, rel=0.05)
    odd = sizes.clone()
    odd[:, :40] -= 50.0
    assert spread_of(odd).item() == pytest.approx(0.3, rel=0.1)
    same = torch.zeros(1, 50, 1)
    same[:, 0] = 7.0
    assert spread_of(same).item() == pytest.approx(same.std(correction=0).item()), (
        "nothing else to tell it by"
    )


def test_zeros_without_controls_scale_what_is_left():
    values = torch.tensor([[0.2, 0.2], [0.4, 0.4], [2.0, 0.6], [4.0, 0.8]])[None]
    found = make_zeros(values, torch.tensor([1.0, 5.0]))[0]
    assert found[:, 0].tolist() == pytest.approx([0, 0, 2.2, 4.4])
    assert torch.equal(found[:, 1], values[0, :, 1]), "nothing is left: as it was"


def test_zeros_are_made_and_the_means_of_genes_stay():
    values = torch.tensor([[0.2, 0.2], [0.4, 0.4], [2.0, 0.6], [4.0, 0.8]])[None]
    control = torch.zeros(1, 4, 2)  # the levels are not moved
    found = match_zeros(values, torch.tensor([1.0, 0.0]), control)[0]
    assert (found[:2, 0] == 0).all()
    assert found[:, 0].tolist() == pytest.approx([0, 0, 2.6, 4.0]), "moved towards the largest"
    assert torch.equal(found[:, 1], values[0, :, 1])
    one = match_zeros(values, torch.tensor([3.0, 0.0]), control)[0]
    assert one[:, 0].tolist() == pytest.approx([0, 0, 0, 6.6]), "the only one left takes all"
    none = match_zeros(values, torch.tensor([5.0, 0.0]), control)
    assert torch.equal(none[..., 0], values[..., 0]), "nothing is left: as it was"


def test_cells_differ_in_detected_genes_as_their_controls_do():
    predicted = torch.rand(2, S, G, generator=torch.Generator().manual_seed(0)) * 4
    control = cells(1, 0.3)
    found = match_zeros(predicted, torch.full((G,), 1.0), control)
    difference = detected(found) - detected(control)
    assert (difference.std(1) < 1).all()
    assert (detected(control).std(1) > 5).all()
    assert detected(found).mean() == pytest.approx((predicted >= 1).sum(-1).float().mean().item(), abs=1.5)
    torch.testing.assert_close(found.mean(1), predicted.mean(1))


def test_totals_vary_no_more_than_those_of_the_controls():
    wide, narrow = cells(2, 1.0), cells(3, 0.2)
    found = match_totals(wide, narrow)
    torch.testing.assert_close(spread(total(found)), spread(total(narrow)), rtol=0.02, atol=0)
    torch.testing.assert_close(total(found).mean(1), total(wide).mean(1), rtol=0.01, atol=0)
    in_order = total(found).gather(1, total(wide).argsort(1))
    assert (in_order.diff(dim=1) > -1e-4).all(), "the order of the cells stays"
    assert torch.equal(found > 0, wide > 0)
    torch.testing.assert_close(match_totals(narrow, wide), narrow)


def test_no_total_is_above_the_depth():
    wide, control = cells(2, 1.0), cells(3, 1.0)
    most = total(wide).median().item()
    found = total(match_totals(wide, control, largest=most))
    assert found.max() <= most + 1e-4
    torch.testing.assert_close(found, total(match_totals(wide, control)).clamp_max(most))


def test_a_perturbation_can_narrow_and_widen_what_the_controls_say():
    narrower = Spread(torch.tensor([0.5, 0.1])[:, None, None], torch.tensor([1.0, 0.0])[:, None, None])
    wide, control = cells(2, 1.0), cells(3, 0.2)
    found = spread(total(match_totals(wide, control, narrower)))
    assert found[0] == pytest.approx(0.5 * spread(total(control))[0].item(), rel=0.03)
    assert found[1] == pytest.approx(0.1, rel=0.03), "whatever the controls say"
    predicted = torch.rand(2, S, G, generator=torch.Generator().manual_seed(0)) * 4
    control, level = cells(1, 0.3), torch.full((G,), 1.0)
    wider = Spread(torch.tensor([1.0, 1.5])[:, None, None])
    found = spread(detected(match_zeros(predicted, level, control, wider))) / spread(detected(control))
    assert found.tolist() == pytest.approx([1.0, 1.5], abs=0.1)


def test_cells_that_hold_all_genes_add_up_to_the_depth():
    closed = cells(4)
    closed = torch.log1p(torch.expm1(closed) * 1e4 / torch.expm1(closed).sum(-1, keepdim=True))
    torch.testing.assert_close(torch.expm1(match_totals(cells(5), closed)).sum(-1), torch.full((2, S), 1e4))


def test_without_control_cells_nothing_is_known_of_sizes():
    predicted, none = cells(7), torch.zeros(2, S, G)
    assert torch.equal(match_totals(predicted, none), predicted)
    level = torch.full((G,), 1.0)
    left = (predicted >= level).any(-2, keepdim=True)
    assert torch.equal(
        match_zeros(predicted, level, none) > 0, torch.where(left, predicted >= level, predicted > 0)
    )
    empty = torch.zeros(2, S, G)
    assert torch.equal(match_totals(match_zeros(empty, level, cells(6)), cells(6)), empty)
