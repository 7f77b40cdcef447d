"""Losses between a predicted and a true set of cells: energy distance and mean squared error (paper, §3.3)."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from perturbdiff.runtime.errors import UserError

_SMALLEST_SQUARE = 1e-8
_SMALLEST_SET_SQUARE = 1e-6  # below what rounding makes of the squared distance of two equal sets


class LossSettings(Protocol):
    """The settings that `hybrid_loss` reads."""

    @property
    def mmd_weight(self) -> float: ...  # noqa: D102
    @property
    def mmd_factor(self) -> Literal["paper", "half"]: ...  # noqa: D102
    @property
    def mmd_statistic(self) -> Literal["V", "U", "cross", "set"]: ...  # noqa: D102
    @property
    def set_power(self) -> float: ...  # noqa: D102
    @property
    def mse_weight(self) -> float: ...  # noqa: D102
    @property
    def mse_reduction(self) -> Literal["sum", "mean"]: ...  # noqa: D102


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the Euclidean distances between the rows of ``x`` [..., n, G] and ``y`` [..., m, G]: [..., n, m].

    Uses |x|² + |y|² - 2 x·y, so that no [n, m, G] tensor is formed. The square is kept above 1e-8.
    """
    return _distances(x, y, (x * x).sum(-1), (y * y).sum(-1))


def _distances(x: Tensor, y: Tensor, x_square: Tensor, y_square: Tensor) -> Tensor:
    """Return `distances`, given the squared norms of the rows."""
    square = x_square[..., :, None] + y_square[..., None, :] - 2 * (x @ y.transpose(-1, -2))
    return square.clamp_min(_SMALLEST_SQUARE).sqrt()


def _mean_within(x: Tensor, square: Tensor, statistic: Literal["V", "U"]) -> Tensor:
    """Return the mean distance among the rows of ``x`` [..., n, G], with (V) or without (U) the diagonal."""
    between = _distances(x, x, square, square)
    n = x.shape[-2]
    off_diagonal = 1.0 - torch.eye(n, dtype=x.dtype, device=x.device)
    to_others = (between * off_diagonal).sum((-1, -2))
    if statistic == "U":
        return to_others / (n * (n - 1))
    # detached: a cell's distance to itself is the root of a rounding error, and its large slope means nothing
    to_itself = between.detach().diagonal(dim1=-2, dim2=-1).sum(-1)
    return (to_others + to_itself) / (n * n)


def energy_distance(
    x: Tensor,
    y: Tensor,
    *,
    factor: Literal["paper", "half"] = "paper",
    statistic: Literal["V", "U"] = "V",
) -> Tensor:
    """Return the energy distance of each pair of sets (paper, Eq. energy_distance), float32 [...].

    Parameters
    ----------
    x, y
        Sets of cells [..., n, G] and [..., m, G] in the same unit, with at least two cells each.
    factor
        ``paper``: 2 E|x-y| - E|x-x'| - E|y-y'|. ``half``: half of it, as in geomloss and the released code.
    statistic
        ``V`` keeps each cell's zero distance to itself. ``U`` leaves it out, so that the expectation over sets
        drawn from equal distributions is zero. Single values can then be negative.

    Notes
    -----
    It is a difference of nearly equal means, so it is always computed in float32, also under autocast.
    """
    if x.shape[-2] < 2 or y.shape[-2] < 2:
        raise ValueError("the energy distance needs sets of at least two cells")
    with torch.autocast(x.device.type, enabled=False):
        x, y = x.float(), y.float()
        x_square, y_square = (x * x).sum(-1), (y * y).sum(-1)
        between = _distances(x, y, x_square, y_square).mean((-1, -2))
        within = _mean_within(x, x_square, statistic) + _mean_within(y, y_square, statistic)
        return between - 0.5 * within if factor == "half" else 2 * between - within


def cross_energy_distance(x: Tensor, y: Tensor, *, factor: Literal["paper", "half"] = "paper") -> Tensor:
    """Return the energy distance of twin sets [2n, m, G] from pairs of cells across twins only, float32 [n].

    Sets 2i and 2i + 1 are twins: two independent draws from one condition. The estimate is unbiased, like the
    U-statistic. Unlike it, it does not reward cells of one set for keeping away from each other. A network that sees
    whole sets can learn to do that, and then its sets look right while its cells do not.
    """
    with torch.autocast(x.device.type, enabled=False):
        x, y = (cells.float().unflatten(0, (-1, 2)) for cells in (x, y))  # [n, 2, m, G]
        (x1, x2), (y1, y2) = x.unbind(1), y.unbind(1)
        (sx1, sx2), (sy1, sy2) = ((cells * cells).sum(-1).unbind(1) for cells in (x, y))
        between = _distances(x1, y2, sx1, sy2).mean((-1, -2)) + _distances(x2, y1, sx2, sy1).mean((-1, -2))
        within = _distances(x1, x2, sx1, sx2).mean((-1, -2)) + _distances(y1, y2, sy1, sy2).mean((-1, -2))
        return 0.5 * (between - within) if factor == "half" else between - within


def set_energy_score(
    x: Tensor, y: Tensor, *, power: float = 1.0, factor: Literal["paper", "half"] = "paper"
) -> Tensor:
    """Return the energy score of predicted sets against true sets, with whole sets as its points, [n].

    The distance of two sets is the norm of the difference of their kernel mean embeddings, the root of the energy
    distance (V-statistic). A score is E|μ(x) - μ(y)|^β - ½ E|μ(x) - μ(x')|^β. For 0 < β < 2 it is strictly proper: it
    is least, on average over true sets, where predicted sets have the law of the true ones. For β = 2 it is least
    wherever the mean embeddings agree, and then equals `cross_energy_distance` with each true set as its own twin.

    Parameters
    ----------
    x
        Predicted sets [2n, m, G]. Sets 2i and 2i + 1 are two independent draws for true set i.
    y
        True sets [n, k, G], same unit.
    power
        β, above 0 and at most 2.
    factor
        As in `energy_distance`.

    Returns
    -------
    float32 [n], or float64 for sets in float64.

    Notes
    -----
    Squared distances get 1e-6 added before the root, so that the slope is finite where two sets are equal. This is
    still a strictly proper score (Schoenberg: a Bernstein function of the squared distance). Sources: Székely and
    Rizzo 2013; Lyons 2013; Gneiting and Raftery 2007, section 5.
    """
    with torch.autocast(x.device.type, enabled=False):
        x, y = (cells if cells.dtype == torch.float64 else cells.float() for cells in (x, y))
        to_true, among = _mean_distances(x, y)
        of_x, of_y = among.diagonal(dim1=-2, dim2=-1), _without_itself(distances(y, y)).mean((-1, -2))
        half = 0.5 if factor == "half" else 1.0
        error = _to_power(half * (2 * to_true - of_x - of_y[:, None]), power)
        spread = _to_power(half * (among[:, 0, 1] + among[:, 1, 0] - of_x.sum(-1)), power)
        return error.mean(-1) - 0.5 * spread


def _mean_distances(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean distances of pairs of sets [2n, m, G] to true sets [n, k, G], [n, 2], and among them, [n, 2, 2].

    All distances are made by one product. Among the pairs it sees the second cell of each two as a constant, and the
    slope is doubled instead, because a distance is symmetric: a third of the work.
    """
    size = x.shape[-2]
    x = x.unflatten(0, (-1, 2)).flatten(1, 2)  # [n, 2m, G]
    others = torch.cat([x.detach(), y], dim=1)
    every = _distances(x, others, (x * x).sum(-1), (others * others).sum(-1))
    own, to_true = _without_itself(every[..., : 2 * size]), every[..., 2 * size :]
    among = own.unflatten(-1, (2, size)).unflatten(-3, (2, size)).mean((-3, -1))
    return to_true.unflatten(-2, (2, size)).mean((-1, -2)), 2 * among - among.detach()


def _without_itself(within: Tensor) -> Tensor:
    """Return the distances among cells [..., n, n] with each cell's distance to itself exactly 0, and without a slope.

    What rounding makes of it has a root, and would be seen in the root of the small difference of two sets.
    """
    itself = torch.eye(within.shape[-1], dtype=torch.bool, device=within.device)
    return within.masked_fill(itself, 0.0)


def _to_power(square: Tensor, power: float) -> Tensor:
    """Return a distance to a power, from its square."""
    return square if power == 2 else (square.clamp_min(0) + _SMALLEST_SET_SQUARE) ** (power / 2)


def population_energy_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the energy distance between the populations that sets [n, m, G] were drawn from, a float32 scalar.

    The n sets of ``x`` belong to one condition, as do those of ``y``. Distances within a population are taken
    between cells of different sets, so that sets whose cells only look right together do not score well. With a
    single set, the U-statistic is used. The estimate is unbiased, so it can be negative.
    """
    x, y = x.float(), y.float()
    if len(x) == 1 and len(y) == 1:
        return energy_distance(x, y, statistic="U")[0]
    if len(x) < 2 or len(y) < 2:
        raise ValueError("populations of several sets can only be compared with each other")
    between = _mean_between_sets(x, y, with_diagonal=True)
    return 2 * between - _mean_between_sets(x, x) - _mean_between_sets(y, y)


def _mean_between_sets(x: Tensor, y: Tensor, *, with_diagonal: bool = False) -> Tensor:
    """Return the mean distance between cells of set i of ``x`` and of set j of ``y``, by default for i ≠ j only."""
    means = torch.stack([distances(one, y).mean((-1, -2)) for one in x])  # [n, n], a set at a time
    if with_diagonal:
        return means.mean()
    return (means.sum() - means.diagonal().sum()) / (len(x) * (len(x) - 1))


def hybrid_loss(prediction: Tensor, target: Tensor, settings: LossSettings) -> dict[str, Tensor]:
    """Return the training objective and its terms (paper, Eq. train_objective), each a float32 scalar.

    Parameters
    ----------
    prediction, target
        Predicted and true cells [B, S, G], model units. Cell j of the one belongs to cell j of the other. With
        the statistic ``cross``, twin sets are neighbours. With ``set``, there are two predicted sets for each true one,
        [2B, S, G], next to each other, and the squared error is the mean over both.

    Returns
    -------
    ``total``, and the terms before weighting: ``mmd`` (mean over sets) and ``mse`` (mean over sets and cells, sum or
    mean over genes). A term whose weight is 0 is not computed and not returned.

    Raises
    ------
    UserError
        If both weights are zero.
    """
    prediction, target = prediction.float(), target.float()
    terms: dict[str, Tensor] = {}
    if settings.mmd_weight:
        terms["mmd"] = _mmd(prediction, target, settings).mean()
    if settings.mse_weight:
        true = target.repeat_interleave(2, 0) if settings.mmd_statistic == "set" else target
        square = (prediction - true).square()
        terms["mse"] = (square.sum(-1) if settings.mse_reduction == "sum" else square.mean(-1)).mean()
    if not terms:
        raise UserError("loss.mmd_weight and loss.mse_weight are both 0: there is nothing to learn from")
    weights = {"mmd": settings.mmd_weight, "mse": settings.mse_weight}
    total = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
    return {"total": total, **terms}


def _mmd(prediction: Tensor, target: Tensor, settings: LossSettings) -> Tensor:
    """Return the energy distance of each set or of each pair of twins, or the score of each true set."""
    if settings.mmd_statistic == "cross":
        return cross_energy_distance(prediction, target, factor=settings.mmd_factor)
    if settings.mmd_statistic == "set":
        return set_energy_score(prediction, target, power=settings.set_power, factor=settings.mmd_factor)
    return energy_distance(prediction, target, factor=settings.mmd_factor, statistic=settings.mmd_statistic)
