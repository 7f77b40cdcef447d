"""The variance-preserving noise schedule (paper, Eq. vp_forward), in float64 tables.

Levels are counted 0 .. T-1 here; the paper's t is this plus one. ``alpha_bar`` is the paper's α_t, the
cumulative product of 1 - β.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor


class NoiseSchedule:
    """Linear betas and what follows from them.

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

    def add_noise(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return sqrt(α_t) x0 + sqrt(1 - α_t) noise.

        Parameters
        ----------
        x0, noise
            [B, S, G].
        t
            Level of each set, int64 [B].
        """
        signal = torch.as_tensor(np.sqrt(self.alpha_bar), dtype=x0.dtype, device=x0.device)[t]
        spread = torch.as_tensor(np.sqrt(1.0 - self.alpha_bar), dtype=x0.dtype, device=x0.device)[t]
        return signal[:, None, None] * x0 + spread[:, None, None] * noise

    def levels(self, num_levels: int, start: int | None = None) -> np.ndarray:
        """Return the decreasing levels that sampling visits, int64 [K]: evenly over start-1 .. 0.

        Without ``start`` all T levels are spanned (paper); the released code starts at K, so it visits the last K.
        """
        if not 1 <= num_levels <= self.num_steps:
            raise ValueError(f"cannot visit {num_levels} levels of a schedule of {self.num_steps}")
        top = self.num_steps if start is None else start
        if not num_levels <= top <= self.num_steps:
            raise ValueError(f"cannot visit {num_levels} levels below level {top} of {self.num_steps}")
        return np.linspace(top - 1, 0, num_levels).round().astype(np.int64)
