"""Sizes of predicted cells: how many genes a cell shows, its total beside those of the other cells, and genes' means.

A predicted cell starts from a control cell, which tells both. A network that is trained on sets of cells does not: what
it draws for one gene goes with what it draws for others, and the totals of its cells vary too much.

Dimension letters: B sets, S cells in a set, G genes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_REACH = 4.0  # log1p: no cell's levels are moved further
_HALVINGS = 10  # of the reach, so that levels are moved to within .01
_EQUAL = 1e-3  # spread of log totals below which all cells have one total
_MOST_RAISED = 3.0  # factor on the values of a gene
_FEWEST = 16  # cells whose mean is settled
_MIDDLE = (0.1, 0.9)  # quantiles of the sizes that tell the spread
_NORMAL_RANGE = 2.563  # of these, of a normal distribution, in SD


class Spread(NamedTuple):
    """The `spread_of` cells' sizes under a perturbation, as it follows from that of their control cells.

    It is ``factor`` · spread ^ ``power``, each number [..., 1, 1] for sets [..., S, G]. By default it is the controls'
    own.
    """

    factor: Tensor | float = 1.0
    power: Tensor | float = 1.0

    def of(self, control: Tensor) -> Tensor:
        """Return the expected spread, given that of the control cells."""
        return self.factor * control.clamp_min(1e-6) ** self.power


_AS_CONTROLS = Spread()


def spread_of(sizes: Tensor) -> Tensor:
    """Return the spread of cells' sizes [..., S, 1] over a set, [..., 1, 1]: the SD of all but a few odd cells.

    It is what the SD of a normal distribution with the same tenth and ninetieth percentile would be. Where these are
    equal, it is the SD itself.
    """
    low, high = torch.quantile(sizes, sizes.new_tensor(_MIDDLE), dim=-2, keepdim=True)
    return torch.where(high > low, (high - low) / _NORMAL_RANGE, sizes.std(-2, keepdim=True, correction=0))


def make_zeros(log1p: Tensor, level: Tensor) -> Tensor:
    """Turn the small values of each gene into zeros, and scale its other values so that its mean over a set stays.

    Sets of cells [..., S, G] and the genes' levels [G] are in log1p. A gene without a value above its level in a set is
    not changed there.
    """
    kept = torch.where(log1p < level, 0.0, log1p)
    before, after = log1p.sum(-2, keepdim=True), kept.sum(-2, keepdim=True)
    return torch.where(after > 0, kept * (before / after), log1p)


def match_zeros(log1p: Tensor, level: Tensor, control: Tensor, spread: Spread = _AS_CONTROLS) -> Tensor:
    """Turn the small values of each gene into zeros, and raise its other values so that its mean over a set stays.

    A value is small if it is below the gene's level. Then each cell's levels are moved together, so that the cells of a
    set differ in their numbers of detected genes as their control cells do, more or less so by ``spread``. The values
    of a gene that are left are moved towards the largest of them, each by the same share of its distance.

    Parameters
    ----------
    log1p
        Decoded sets of cells [..., S, G].
    level
        log1p [G]. A gene with level 0 has small values only in cells whose levels are moved up.
    control
        The control cell that each cell starts from, log1p [..., S, G]. Sets whose control cells are all zero, as in
        pretraining, keep the levels as they are.
    spread
        Of the numbers of detected genes.

    Returns
    -------
    The sets, log1p. A gene without a value above its level in a set is not changed there.
    """
    kept = _kept(log1p, level, control, spread)
    values = torch.where(kept, log1p, 0.0)
    number, mean = kept.sum(-2, keepdim=True), values.sum(-2, keepdim=True)
    mean = mean / number.clamp_min(1)
    missing = log1p.sum(-2, keepdim=True) / number.clamp_min(1) - mean
    largest = values.amax(-2, keepdim=True)
    share = (missing / (largest - mean).clamp_min(1e-6)).clamp_max(1.0)
    beyond = missing - share * (largest - mean)  # if moving all values to the largest is not enough
    raised = torch.where(kept, values * (1 - share) + (share * largest + beyond), 0.0)
    return torch.where(number > 0, raised, log1p)


def _kept(log1p: Tensor, level: Tensor, control: Tensor, spread: Spread) -> Tensor:
    """Return which values are not made zeros, bool [..., S, G]."""
    above = torch.where(log1p > 0, log1p - level, -torch.inf)
    number = _count(above >= 0)
    detected = _count(control > 0)
    off = detected - detected.mean(-2, keepdim=True)
    own = spread_of(detected)
    wanted = number.mean(-2, keepdim=True) + off * spread.of(own) / own.clamp_min(1e-6)
    low, high = torch.full_like(wanted, -_REACH), torch.full_like(wanted, _REACH)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_many = _count(above >= middle) > wanted
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return above >= torch.where(detected.sum(-2, keepdim=True) > 0, high, 0.0)


def _count(of: Tensor) -> Tensor:
    return of.sum(-1, keepdim=True).float()


def match_totals(
    log1p: Tensor, control: Tensor, spread: Spread = _AS_CONTROLS, largest: float = math.inf
) -> Tensor:
    """Scale cells so that the totals of a set vary no more than those of its control cells tell.

    Log totals are moved towards their mean over the set, each by the same share. If the control cells have one total,
    because they hold every gene that counts were scaled with, so have the cells. Zeros stay zeros.

    Parameters
    ----------
    log1p
        Decoded sets of cells [..., S, G].
    control
        Their control cells, log1p [..., S, G]. Sets whose control cells are all zero are not changed.
    spread
        Of the log totals.
    largest
        log1p of the largest total that a cell can have.
    """
    total, real = _log_total(log1p), _log_total(control)
    predicted_spread, real_spread = spread_of(total), spread_of(real)
    off = total - total.mean(-2, keepdim=True)
    change = off * ((spread.of(real_spread) / predicted_spread.clamp_min(1e-6)).clamp_max(1.0) - 1.0)
    change = torch.where(real_spread < _EQUAL, real.mean(-2, keepdim=True) - total, change)
    change = torch.minimum(change, largest - total)
    known = (real.amax(-2, keepdim=True) > 0) & (total > 0)
    factor = torch.expm1(total + change) / torch.expm1(total)
    return torch.where(known, torch.log1p(torch.expm1(log1p) * factor), log1p)


def _log_total(log1p: Tensor) -> Tensor:
    return torch.expm1(log1p).sum(-1, keepdim=True).log1p()


class Pool(NamedTuple):
    """What is known of sets beyond their cells.

    Attributes
    ----------
    mean
        Mean of all matched control cells of each set, log1p [B, G].
    kept
        How many cells of each set are kept, the first of them, int64 [B].
    """

    mean: Tensor
    kept: Tensor


def settle_means(log1p: Tensor, control: Tensor, pool: Pool, told: Tensor, share: Tensor | float) -> Tensor:
    """Scale each gene of sets of an unseen condition so that its mean is the expected one.

    A network tells the mean of an unseen condition less surely than the shape of its cells. So the change of the mean
    lies between the one that is told otherwise and the network's, at ``share`` of the way. And it is a change from the
    mean of all matched control cells: the few that a set starts from have a mean of their own.

    Parameters
    ----------
    log1p
        Predicted sets of cells [B, S, G], log1p.
    control
        The control cells that they start from, log1p [B, S, G].
    pool
        Of all their matched control cells. The mean over the cells that are kept becomes the expected one, and over
        all cells if fewer than 16 are kept, which are too few to bear a mean.
    told
        The change that vectors or other contexts tell, log1p [B, G].
    share
        Share of the network's change, 0 to 1.

    Returns
    -------
    The sets, log1p. Zeros stay zeros, and no value is raised more than three times.
    """
    kept = torch.where(pool.kept < _FEWEST, log1p.shape[1], pool.kept)
    counts = torch.arange(log1p.shape[1], device=log1p.device) < kept[:, None]
    mean = torch.where(counts[..., None], log1p, 0.0).sum(-2) / kept[:, None]
    change = torch.lerp(told, log1p.mean(-2) - control.mean(-2), share)
    factor = (pool.mean + change).clamp_min(0) / mean.clamp_min(1e-6)
    return log1p * factor.clamp_max(_MOST_RAISED)[:, None]
