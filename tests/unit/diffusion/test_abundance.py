"""The distance of single amounts: a plain formula, what it sees, and what it does not mind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbdiff.config.settings import LossConfig
from perturbdiff.diffusion.abundance import abundance_distance
from perturbdiff.diffusion.losses import energy_distance, hybrid_loss


def cells(seed, sets=4, size=6, genes=20):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.log1p(rng.poisson(np.linspace(0.1, 9, genes), (sets, size, genes)))).float()


def amounts(x, y, together=1):
    """Return the 16 genes with the most true counts and the totals, in units of the true spread of each condition.

    ``together`` true sets are of one condition.
    """
    x, y = np.expm1(x.numpy()), np.expm1(y.numpy())
    found = ([], [])
    for true in np.split(np.arange(len(y)), len(y) // together):
        own = np.split(np.arange(len(x)), len(y) // together)[true[0] // together]
        pool = y[true].reshape(-1, y.shape[-1])
        top = np.argsort(-pool.mean(0), kind="stable")[:16]
        pool, *sides = (
            np.concatenate([z[..., top], z.sum(-1, keepdims=True)], -1) for z in (pool, x[own], y[true])
        )
        scale = np.maximum(pool.std(0, ddof=1), 0.1 * pool.mean(0))
        for side, cells_of in zip(found, sides, strict=True):
            side.extend(cells_of / scale)
    return found


def gap(x, y):
    return np.abs(x[:, None] - y[None]).mean((0, 1))


def test_it_is_the_mean_of_the_energy_distances_of_amounts():
    x, y = cells(0), cells(1)
    a, b = amounts(x, y)
    plain = [2 * gap(p, q) - 6 / 5 * (gap(p, p) + gap(q, q)) for p, q in zip(a, b, strict=True)]
    assert float(abundance_distance(x, y)) == pytest.approx(np.mean(plain), rel=1e-4)
    assert float(abundance_distance(x / 2, y / 2, 2.0)) == pytest.approx(np.mean(plain), rel=1e-4)
    a, b = amounts(x, y, together=2)
    across = [
        gap(a[i], b[i + 1]) + gap(a[i + 1], b[i]) - gap(a[i], a[i + 1]) - gap(b[i], b[i + 1]) for i in (0, 2)
    ]
    assert float(abundance_distance(x, y, twins=True)) == pytest.approx(np.mean(across), rel=1e-4)
    a, b = amounts(x, y[:2])  # two predicted sets for each true one
    score = [gap(a[2 * i], b[i]) + gap(a[2 * i + 1], b[i]) - gap(a[2 * i], a[2 * i + 1]) for i in (0, 1)]
    assert float(abundance_distance(x, y[:2])) == pytest.approx(np.mean(score), rel=1e-4)


@pytest.mark.parametrize("twins", [False, True])
def test_no_distance_is_expected_between_sets_of_one_condition(twins):
    # of single sets the spread that divides is of few cells, which moves the mean by a share of one over their number
    sizes = {"sets": 600, "size": 6} if twins else {"sets": 100, "size": 64}
    found = abundance_distance(cells(2, **sizes), cells(3, **sizes), twins=twins)
    assert abs(float(found)) < 0.01


def test_a_set_is_judged_by_itself():
    x, y = cells(7), cells(8)
    parts = [abundance_distance(x[i : i + 2], y[i : i + 2], twins=True) for i in (0, 2)]
    assert float(abundance_distance(x, y, twins=True)) == pytest.approx(float(sum(parts)) / 2, rel=1e-5)


def test_it_sees_totals_that_the_distance_of_cells_hardly_sees():
    truth, together = cells(4, sets=40, size=32), cells(5, sets=40, size=32)
    level = torch.randn(40, 32, 1, generator=torch.Generator().manual_seed(0))
    wrong = (together + 0.3 * level * (together > 0)).clamp_min(0)  # all genes of a cell up or down together
    share = {
        name: float(distance(wrong).mean() / distance(cells(6, sets=40, size=32) * 0.5).mean())
        for name, distance in {
            "cells": lambda x: energy_distance(x, truth, statistic="U"),
            "amounts": lambda x: abundance_distance(x, truth),
        }.items()
    }
    assert share["amounts"] > 1.5 * share["cells"]


def test_equal_totals_and_silent_genes_are_no_trouble():
    closed = torch.log1p(100 * torch.softmax(cells(7), -1))
    closed[..., 3:] = 0
    guess = closed.clone().requires_grad_()
    abundance_distance(guess, closed).backward()
    assert guess.grad is not None
    assert guess.grad.isfinite().all()


def test_it_is_a_term_of_the_loss():
    x, y = cells(8), cells(9)
    found = hybrid_loss(x, y, LossConfig(mse_weight=0, abundance_weight=3.0), 2.0)
    torch.testing.assert_close(found["abundance"], abundance_distance(x, y, 2.0))
    torch.testing.assert_close(found["total"], found["mmd"] + 3 * found["abundance"])
