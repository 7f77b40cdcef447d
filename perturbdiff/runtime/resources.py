"""What this process may use: memory, as the machine, the job or the container allows it, and the CPU or a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import torch

from perturbdiff.runtime.errors import UserError

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def available() -> int:
    """Return the bytes that are free on the machine, and no more than the job or container may use in all."""
    free = psutil.virtual_memory().available
    return min(free, cgroup_limit() or free)


def cgroup_limit() -> int | None:
    """Return the memory limit in bytes that the kernel sets for this process, if any: cgroup v2 or v1."""
    limits = []
    for file in _limit_files():
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdigit() else []
    smallest = min(limits, default=None)
    return (
        smallest if smallest is not None and smallest < 1 << 60 else None
    )  # v1 writes a huge number for none


def _limit_files() -> Iterator[Path]:
    """Files that hold the limits of this process's group and of the groups above."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for _, kinds, name in groups:
        if kinds and "memory" not in kinds.split(","):
            continue
        top, file = (_CGROUPS / "memory", "memory.limit_in_bytes") if kinds else (_CGROUPS, "memory.max")
        group = top / name.lstrip("/")
        yield from (folder / file for folder in (group, *group.parents) if folder.is_relative_to(top))
    yield _CGROUPS / "memory.max"


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
