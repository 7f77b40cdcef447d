"""Where tensors live: on the CPU or on a GPU."""

from __future__ import annotations

import os
from typing import Literal

import torch

from perturbdiff.errors import UserError


def resolve_device(device: str) -> Literal["cpu", "cuda"]:
    """Return where to compute; ``auto`` is a GPU if there is one.

    Raises
    ------
    UserError
        If ``cuda`` is asked for and there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine offers no GPU to PyTorch; see perturbdiff doctor")
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    return "cuda"
