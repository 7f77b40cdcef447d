"""How large a network is: parameters by group, and work per cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from perturbdiff.config.settings import Config
from perturbdiff.model import Covariates, Denoiser
from perturbdiff.model.covariates import DoseTable
from perturbdiff.model.layers import Attention, InputLayers

GROUPS: dict[str, tuple[str, ...]] = {
    "input layers": ("input_layers", "control_layers", "gene_embedding", "gene_table"),
    "covariates": ("covariate_encoder", "covariate_projection", "null_covariates"),
    "time": ("time_embedding", "fusion"),
    "blocks": ("blocks",),
    "output": ("final_modulation", "output_layer", "gain_layer", "noise_layer"),
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
    # PyTorch's own counter loads its compiler, which takes longer than a small training's first steps.
    products: list[int] = []

    def count(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        products.append(_products(module, inputs, output))

    hooks = [module.register_forward_hook(count) for module in model.modules()]
    ids = torch.zeros(1, dtype=torch.int64, device=model.unit.device)
    cells = torch.zeros(1, size, model.num_genes, device=model.unit.device)
    earlier = cells if self_condition else None
    try:
        with torch.no_grad():
            model(cells, ids, cells, Covariates(ids, ids, ids), self_condition=earlier, dataset=ids)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(products)


def _products(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> int:
    """Return the operations of a module's own matrix products, without those of the modules in it."""
    if isinstance(module, nn.Linear):
        return 2 * output.numel() * module.in_features
    if isinstance(module, InputLayers):
        return sum(2 * part.numel() * module.width for part in inputs[0] if part is not None)
    if isinstance(module, Attention):  # queries with keys, and weights with values
        sets, cells, width = inputs[0].shape
        return 4 * sets * cells**2 * width
    if isinstance(module, DoseTable):
        return 2 * output.numel() * module.weights.shape[1]
    return 0


def flops_per_step(model: Denoiser, config: Config) -> float:
    """Return the floating-point operations of one optimiser step.

    A backward pass counts as two forward passes, and self-conditioning adds a forward pass without gradient in its
    share of the sets. Two sets are generated for each true one with ``loss.mmd_statistic: set``. The optimiser's own
    work, loss and input are left out.
    """
    train = config.train
    generated = train.sets_per_step * (2 if config.loss.mmd_statistic == "set" else 1)
    forward = flops_per_cell(model, train.set_size, self_condition=train.self_condition > 0)
    return forward * (3 + train.self_condition) * train.set_size * generated


def describe(model: Denoiser, config: Config) -> list[str]:
    """Return lines for the log: parameters by group, work per cell and per optimiser step."""
    train = config.train
    forward = flops_per_cell(model, train.set_size, self_condition=train.self_condition > 0)
    return [
        f"network: {listed(by_group(model))}",
        f"work: {forward / 1e6:.3g} MFLOP per cell and pass, "
        f"{flops_per_step(model, config) / 1e12:.3g} TFLOP per optimiser step",
    ]
