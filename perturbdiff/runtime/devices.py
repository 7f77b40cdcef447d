"""Where tensors live: on the CPU or on a GPU."""

from __future__ import annotations

import os
from typing import Literal

import torch

from perturbdiff.runtime.errors import UserError


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


def resolve_devices(device: str) -> list[str]:
    """Return the devices that a text names, e.g. ``auto``, ``cuda`` or ``cuda:0,cuda:1``.

    Raises
    ------
    UserError
        If it is not written like this, names a device twice or one that is not there.
    """
    names = [name.strip() for name in device.split(",")]
    for name in names:
        kind, colon, index = name.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (colon and not (kind == "cuda" and index.isdigit())):
            raise UserError(f"--device {device}: write auto, cpu, cuda, or GPUs by number like cuda:0,cuda:1")
        if colon and int(index) >= torch.cuda.device_count():
            raise UserError(
                f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs here; see perturbdiff doctor"
            )
    if len(set(names)) < len(names):
        raise UserError(f"--device {device}: a device is named twice; several workers on one: --processes N")
    return [name if ":" in name and resolve_device("cuda") else resolve_device(name) for name in names]
