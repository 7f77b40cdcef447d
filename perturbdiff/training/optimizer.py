"""The optimiser: AdamW over few long vectors instead of many small tensors, its learning rate, and the running average.

A network has dozens of weight tensors, most of them small. One after the other, clipping, AdamW and the average cost an
eighth of a small step. Side by side in one buffer they are a handful of operations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

if TYPE_CHECKING:
    from perturbdiff.config.settings import TrainConfig

EPS = 1e-8

Module = TypeVar("Module", bound=nn.Module)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Return AdamW's groups: everything decays but biases (layer norms have no parameters here)."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[not name.endswith("bias")].append(parameter)
    decay = {"params": groups[True], "weight_decay": weight_decay}
    return [decay, {"params": groups[False], "weight_decay": 0.0}]


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


class FlatWeights:
    """The weights of a module, side by side in one vector for each of AdamW's groups.

    The module's parameters become views of the vectors, so both always agree.

    Attributes
    ----------
    members
        The module's parameters, by group.
    vectors
        float32 [numbers in the group].
    """

    def __init__(self, module: nn.Module, weight_decay: float) -> None:
        groups = [group for group in parameter_groups(module, weight_decay) if group["params"]]
        self.members: list[list[nn.Parameter]] = [group["params"] for group in groups]
        self.vectors: list[Tensor] = []
        for members in self.members:
            vector = torch.cat([parameter.detach().flatten() for parameter in members])
            pieces = vector.split([parameter.numel() for parameter in members])
            for parameter, piece in zip(members, pieces, strict=True):
                parameter.data = piece.view_as(parameter)
            self.vectors.append(vector)
        self.decays = [group["weight_decay"] for group in groups]


class Optimizer:
    """AdamW with clipped gradients and a learning rate that follows `rate_factor`.

    PyTorch's own class does the same, but loads its compiler for it: one and a half seconds.

    Parameters
    ----------
    module
        The network, on its device. Its parameters become views of long vectors.
    settings
        ``learning_rate``, ``betas``, ``weight_decay``, ``clip_norm`` and the schedule.
    """

    def __init__(self, module: nn.Module, settings: TrainConfig) -> None:
        self.settings = settings
        self.weights = FlatWeights(module, settings.weight_decay)
        vectors = self.weights.vectors
        self._means = [torch.zeros_like(vector) for vector in vectors]
        self._squares = [torch.zeros_like(vector) for vector in vectors]
        self._steps = [torch.zeros((), device=vector.device) for vector in vectors]
        for vector in vectors:
            vector.grad = torch.zeros_like(vector)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.settings.learning_rate * rate_factor(step, self.settings)

    @torch.no_grad()
    def step(self, number: int) -> None:
        """Take optimiser step ``number``, counted from 0, with the gradients of the module, and drop these.

        Raises
        ------
        RuntimeError
            If a weight has no gradient.
        """
        settings, vectors = self.settings, self.weights.vectors
        gradients = [self._gather(*pair) for pair in zip(vectors, self.weights.members, strict=True)]
        if settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(vectors, settings.clip_norm)
        states = zip(
            vectors, gradients, self._means, self._squares, self._steps, self.weights.decays, strict=True
        )
        for vector, gradient, mean, square, steps, decay in states:
            adamw(
                [vector], [gradient], [mean], [square], [], [steps],
                fused=True, amsgrad=False, beta1=settings.betas[0], beta2=settings.betas[1],
                lr=self.learning_rate(number), weight_decay=decay, eps=EPS, maximize=False,
            )  # fmt: skip

    def _gather(self, vector: Tensor, members: list[nn.Parameter]) -> Tensor:
        """Move the members' gradients into the vector's, and return it."""
        pieces = [parameter.grad.flatten() for parameter in members if parameter.grad is not None]
        if len(pieces) < len(members):  # AdamW would leave out such a weight; the vector cannot
            raise RuntimeError("a weight of the network has no gradient")
        assert vector.grad is not None
        torch.cat(pieces, out=vector.grad)
        for parameter in members:
            parameter.grad = None
        return vector.grad

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return what a checkpoint keeps, besides the weights."""
        return {"means": self._means, "squares": self._squares, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Take up what a checkpoint kept."""
        for name, own in self.state_dict().items():
            for tensor, kept in zip(own, state[name], strict=True):
                tensor.copy_(kept)


class RunningAverage(Generic[Module]):
    """The exponential moving average of the weights: a ← d · a + (1 - d) · w.

    It is updated after steps 1, 1 + n, 1 + 2n, …, and the first update copies the weights (paper, App. Training).

    Parameters
    ----------
    module
        What is averaged; copied here.
    decay
        d, the share of the average that is kept.
    every
        n, steps between updates.

    Attributes
    ----------
    module
        The copy with averaged weights.
    """

    def __init__(self, module: Module, decay: float, every: int) -> None:
        self.decay, self.every = decay, every
        self.module = copy.deepcopy(module)
        self._average = FlatWeights(self.module, 0.0)

    @torch.no_grad()
    def update(self, weights: FlatWeights, step: int) -> None:
        """Update with the weights after ``step`` steps if it is time."""
        if (step - 1) % self.every:
            return
        for average, new in zip(self._average.vectors, weights.vectors, strict=True):
            if step == 1:
                average.copy_(new)
            else:
                average.mul_(self.decay).add_(new * (1 - self.decay))
