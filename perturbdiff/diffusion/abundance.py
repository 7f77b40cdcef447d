"""Amounts judged one by one: a distance that sees the totals of cells and the spread of abundant genes.

The energy distance between cells of thousands of genes hardly sees a single gene, and in log1p it hardly sees amounts.
But a dozen abundant genes make most of a cell's total.
"""

from __future__ import annotations

import torch
from torch import Tensor

ABUNDANT = 16  # genes with the largest true mean
_LARGEST = 15.0  # log1p beyond which no amount is told apart, so that none overflows
_LEAST_SPREAD = (
    0.1  # spread that counts at least, as a share of the mean: totals may be the same in all true cells
)


def abundance_distance(
    prediction: Tensor, target: Tensor, unit: Tensor | float = 1.0, *, twins: bool = False
) -> Tensor:
    """Return the mean energy distance of the amounts of abundant genes and of cells' totals, a float32 scalar.

    Each amount has a distribution over the cells of a set: 2 E|x - y| - E|x - x'| - E|y - y'|, self-pairs left out. An
    amount is the value before log1p, divided by its spread over the true cells of the set, or of both twins. Nothing
    is taken from other sets, so that the loss of a step is the same however its sets are spread over processes.

    Parameters
    ----------
    prediction, target
        Predicted and true cells [B, S, G], model units.
    unit
        Model values are log1p / unit.
    twins
        Neighbouring sets are independent draws from one condition: only cells of different twins are compared. With
        two predicted sets for each true one, [2B, S, G], this is so for the predicted sets anyway, and the distance
        among true cells, which teaches nothing, is left out.
    """
    with torch.autocast(prediction.device.type, enabled=False):
        amounts = [torch.expm1((cells.float() * unit).clamp_max(_LARGEST)) for cells in (prediction, target)]
        paired = twins and len(prediction) == len(target)
        true = amounts[1].unflatten(0, (-1, 2)).flatten(1, 2) if paired else amounts[1]
        genes = true.mean(1).topk(min(ABUNDANT, true.shape[-1])).indices  # of each condition [C, K]
        spread = _spread(_chosen(true, genes))
        x, y = (
            _chosen(cells, genes) / spread.repeat_interleave(len(cells) // len(genes), 0) for cells in amounts
        )
        if len(x) == 2 * len(y):
            x1, x2 = x.unflatten(0, (-1, 2)).unbind(1)
            between, within = _gap(x1, y) + _gap(x2, y), _gap(x1, x2)
        elif paired:
            (x1, x2), (y1, y2) = (cells.unflatten(0, (-1, 2)).unbind(1) for cells in (x, y))
            between, within = _gap(x1, y2) + _gap(x2, y1), _gap(x1, x2) + _gap(y1, y2)
        else:
            others = x.shape[1] / (x.shape[1] - 1)
            between, within = 2 * _gap(x, y), others * (_gap(x, x) + _gap(y, y))
        return (between - within).mean()


def _chosen(cells: Tensor, genes: Tensor) -> Tensor:
    """Return the amounts of genes [C, K] and the totals of cells [n · C, S, G], the n sets of a condition together."""
    places = genes.repeat_interleave(len(cells) // len(genes), 0)[:, None].expand(-1, cells.shape[1], -1)
    return torch.cat([cells.gather(-1, places), cells.sum(-1, keepdim=True)], -1)


def _spread(cells: Tensor) -> Tensor:
    """Return the spread of each amount of cells [C, S, K] by which it is divided: [C, 1, K]."""
    least = _LEAST_SPREAD * cells.mean(1, keepdim=True)
    return torch.maximum(cells.std(1, keepdim=True), least).clamp_min(1e-6)


def _gap(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean absolute difference over pairs of cells [B, K] of ``x`` and ``y`` [B, S, K]."""
    return (x[:, :, None] - y[:, None]).abs().mean((1, 2))
