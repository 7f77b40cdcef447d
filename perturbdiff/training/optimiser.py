"""AdamW's parameter groups and the learning rate as a function of the step (paper, App. Training Details)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from perturbdiff.config.settings import TrainConfig


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Return AdamW's groups: everything decays but biases (layer norms have no parameters here)."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[not name.endswith("bias")].append(parameter)
    decay = {"params": groups[True], "weight_decay": weight_decay}
    return [decay, {"params": groups[False], "weight_decay": 0.0}]


def optimizer(module: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over a module's parameters; the training loop sets the rate of each step."""
    groups = parameter_groups(module, settings.weight_decay)
    found = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=1e-8, fused=True)
    # Fused steps could undo a loss scale, so the trainer would not clip; float32 and bfloat16 have none.
    found._step_supports_amp_scaling = False  # pyright: ignore[reportAttributeAccessIssue]
    return found


def rate_factor(step: int, settings: TrainConfig) -> float:
    """Return the share of the learning rate at optimiser step ``step`` (from 0).

    Linear from 0 over ``warmup_steps``; optionally flat over ``plateau_fraction`` of all steps; then half a
    cosine down to 0 at ``max_steps``, but not below ``final_rate``.
    """
    if step < settings.warmup_steps:
        return step / settings.warmup_steps
    top = settings.warmup_steps + int(settings.plateau_fraction * settings.max_steps)
    if step < top:
        return 1.0
    progress = min((step - top) / max(settings.max_steps - top, 1), 1.0)
    return max(settings.final_rate, 0.5 * (1 + math.cos(math.pi * progress)))
