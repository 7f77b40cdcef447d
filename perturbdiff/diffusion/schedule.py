"""The variance-preserving noise schedule (paper, Eq. vp_forward), in float64 tables.

Levels are counted 0 .. T-1 here, and the paper's t is the level plus one. ``alpha_bar`` is the paper's α_t, the
cumulative product of 1 - β.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ReverseStep:
    """The coefficients of one reverse step, from a level to the next one visited.

    Attributes
    ----------
    level
        0 .. T-1.
    last
        Whether the step ends at the clean cells.
    inverse_signal, inverse_noise
        sqrt(1/α) and sqrt(1/α - 1) of the level.
    weight_of_estimate, weight_of_x
        Factors in the posterior mean of the cells below, given the clean cells and the cells at this level.
    log_variance
        Log variance of the noise that ancestral sampling adds.
    alpha_bar, below
        α of the level and of the next one.
    single
        Whether the coefficients and their products are rounded as in the released code.

    The coefficients are NumPy scalars of the precision set by ``arithmetic``. What follows from them is computed in
    that precision.
    """

    level: int
    last: bool
    inverse_signal: float
    inverse_noise: float
    weight_of_estimate: float
    weight_of_x: float
    log_variance: float
    alpha_bar: float
    below: float
    single: bool = False

    @property
    def posterior_sd(self) -> float:
        """SD of the noise that ancestral sampling adds."""
        return float(np.exp(0.5 * self.log_variance))

    def ddim(self, eta: float) -> tuple[float, float, float]:
        """Return the factors of the estimate, of the implied noise and of fresh noise in a DDIM step."""
        here, below = self.alpha_bar, self.below
        sigma = eta * np.sqrt((1 - below) / (1 - here)) * np.sqrt(1 - here / below)
        along = np.sqrt(np.maximum(1 - below - sigma**2, 0))
        return float(np.sqrt(below)), float(along), float(sigma)


class NoiseSchedule:
    """A schedule of linear betas.

    Parameters
    ----------
    num_steps
        T. The betas run from 0.1 / T to 20 / T, so that T = 1000 has the usual 1e-4 to 0.02.
    kind
        Only ``linear``.

    Attributes
    ----------
    betas, alpha_bar
        float64 [T].
    """

    def __init__(self, num_steps: int = 1000, kind: Literal["linear"] = "linear") -> None:
        if kind != "linear":
            raise ValueError(f"unknown noise schedule '{kind}'")
        if num_steps < 2:
            raise ValueError(f"a noise schedule needs at least 2 steps, not {num_steps}")
        self.num_steps = num_steps
        self.betas = np.linspace(0.1 / num_steps, min(20.0 / num_steps, 0.999), num_steps, dtype=np.float64)
        self.alpha_bar = np.cumprod(1.0 - self.betas)
        self._roots: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def add_noise(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return sqrt(α_t) x0 + sqrt(1 - α_t) noise.

        Parameters
        ----------
        x0, noise
            [B, S, G].
        t
            Level of each set, int64 [B].
        """
        key = (x0.dtype, x0.device)
        if key not in self._roots:  # kept, so that a GPU need not wait for them at every step
            roots = np.sqrt([self.alpha_bar, 1.0 - self.alpha_bar])
            self._roots[key] = torch.as_tensor(roots, dtype=x0.dtype, device=x0.device)
        signal, spread = self._roots[key][:, t, None, None]
        return torch.addcmul(signal * x0, spread, noise)

    def twin_noise(self, own: Tensor, common: Tensor, t: Tensor) -> Tensor:
        """Return the noise of two sets that are generated for one true set, from one cleaner view of it.

        Both are the true set seen at the level where α is √α_t (which ``common`` makes), noised further on their own.
        So the score of the two is one of the law of the true set given that view (see docs/family.md). Their noises
        have the correlation √α / (1 + √α): none at the highest level. Each is standard normal as before.

        Parameters
        ----------
        own, common
            Noise of each generated set [2B, S, G], and of each true set [B, S, G].
        t
            Level of each true set, int64 [B].
        """
        signal = np.sqrt(self.alpha_bar)
        share = torch.as_tensor(signal / (1 + signal), dtype=own.dtype, device=own.device)[t][:, None, None]
        both = (share.sqrt() * common).repeat_interleave(2, 0)
        return torch.addcmul(both, (1 - share).sqrt().repeat_interleave(2, 0), own)

    def levels(self, num_levels: int, start: int | None = None) -> np.ndarray:
        """Return the decreasing levels that sampling visits, int64 [K], evenly spaced over start-1 .. 0.

        Without ``start``, they span all T levels (paper). The released code starts at K and visits the last K levels.
        """
        if not 1 <= num_levels <= self.num_steps:
            raise ValueError(f"cannot visit {num_levels} levels of a schedule of {self.num_steps}")
        top = self.num_steps if start is None else start
        if not num_levels <= top <= self.num_steps:
            raise ValueError(f"cannot visit {num_levels} levels below level {top} of {self.num_steps}")
        return np.linspace(top - 1, 0, num_levels).round().astype(np.int64)

    def reverse(
        self,
        levels: np.ndarray,
        *,
        variance: Literal["posterior", "beta"] = "posterior",
        arithmetic: Literal["double", "single"] = "double",
    ) -> list[ReverseStep]:
        """Return the steps through decreasing ``levels`` down to clean cells.

        Parameters
        ----------
        levels
            int64 [K] (see `levels`).
        variance
            Variance in ancestral sampling: that of the posterior, or β ("fixed large", released). The posterior
            variance of the last step is 0 and has no logarithm, so that of the second-last step stands in its
            place. Noise of that step is never drawn.
        arithmetic
            ``single`` rounds each table to float32 before it is used, as the released code does.
        """
        number: Any = np.float64 if arithmetic == "double" else np.float32
        here = self.alpha_bar[levels]
        below = np.append(here[1:], 1.0)
        beta = 1 - here / below
        spread = beta * (1 - below) / (1 - here)
        lowest = spread[-2:-1] if len(levels) > 1 else beta
        logs = np.log(np.append((beta if variance == "beta" else spread)[:-1], lowest))
        tables = {
            "inverse_signal": np.sqrt(1 / here),
            "inverse_noise": np.sqrt(1 / here - 1),
            "weight_of_estimate": np.sqrt(below) * beta / (1 - here),
            "weight_of_x": np.sqrt(1 - beta) * (1 - below) / (1 - here),
            "log_variance": logs,
            "alpha_bar": here,
            "below": below,
        }
        return [
            ReverseStep(
                level=int(level),
                last=i + 1 == len(levels),
                single=arithmetic == "single",
                **{name: number(table[i]) for name, table in tables.items()},
            )
            for i, level in enumerate(levels)
        ]
