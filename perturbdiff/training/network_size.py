"""How large a network is: parameters by group, and work per cell."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from perturbdiff.config.settings import Config
from perturbdiff.model import Covariates, Denoiser

GROUPS: dict[str, tuple[str, ...]] = {
    "input layers": ("input_layers", "control_layers", "gene_embedding", "gene_table"),
    "covariates": ("covariate_encoder", "covariate_projection", "null_covariates"),
    "time": ("time_embedding", "fusion"),
    "blocks": ("blocks",),
    "output": ("final_modulation", "output_layer", "gain_layer"),
}
"""Groups of parameters, and the first words of their names."""


def group_of(name: str) -> str:
    """Return the group that a parameter of the denoiser belongs to."""
    first = name.split(".", 1)[0]
    return next((group for group, members in GROUPS.items() if first in members), "other")


def by_group(model: Denoiser) -> dict[str, int]:
    """Return the number of learned parameters in each group."""
    numbers = dict.fromkeys(GROUPS, 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = group_of(name)
            numbers[group] = numbers.get(group, 0) + parameter.numel()
    return numbers


def listed(numbers: Mapping[str, int]) -> str:
    """Return ``1,234 parameters (blocks 1,000, output 234)``; empty groups are left out."""
    parts = ", ".join(f"{group} {number:,}" for group, number in numbers.items() if number)
    total = f"{sum(numbers.values()):,} parameters"
    return f"{total} ({parts})" if parts else total


def flops_per_cell(model: Denoiser, size: int, *, self_condition: bool = True) -> int:
    """Return the floating-point operations of one forward pass on a set of ``size`` cells, per cell.

    Two for each multiply-add of a matrix product. They are a polynomial of the second degree in the number of
    cells (attention is the square), so three passes over very small sets determine it.
    """
    one, two, three = (_flops(model, number, self_condition) for number in (1, 2, 3))
    square = (three - 2 * two + one) // 2
    each = two - one - 3 * square
    return (one - each - square) // size + each + square * size


def _flops(model: Denoiser, size: int, self_condition: bool) -> int:  # noqa: FBT001
    from torch.utils.flop_counter import FlopCounterMode  # imported here, because it loads Triton

    ids = torch.zeros(1, dtype=torch.int64, device=model.unit.device)
    cells = torch.zeros(1, size, model.num_genes, device=model.unit.device)
    earlier = cells if self_condition else None
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(cells, ids, cells, Covariates(ids, ids, ids), self_condition=earlier, dataset=ids)
    return counter.get_total_flops()


def flops_per_step(model: Denoiser, config: Config) -> float:
    """Return the floating-point operations of one optimiser step.

    A backward pass counts as two forward passes, and self-conditioning adds a forward pass without gradient in its
    share of the sets. The optimiser's own work, loss and input are left out.
    """
    train = config.train
    forward = flops_per_cell(model, train.set_size, self_condition=train.self_condition > 0)
    return forward * (3 + train.self_condition) * train.set_size * train.sets_per_step


def describe(model: Denoiser, config: Config) -> list[str]:
    """Return lines for the log: parameters by group, work per cell and per optimiser step."""
    train = config.train
    forward = flops_per_cell(model, train.set_size, self_condition=train.self_condition > 0)
    return [
        f"network: {listed(by_group(model))}",
        f"work: {forward / 1e6:.3g} MFLOP per cell and pass, "
        f"{flops_per_step(model, config) / 1e12:.3g} TFLOP per optimiser step",
    ]
