"""Resources of this process: memory within the limits of machine, job and container, and the CPU or GPUs."""

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
    """Return the free memory of the machine in bytes, at most the limit of the job or container."""
    free = psutil.virtual_memory().available
    return min(free, cgroup_limit() or free)


def cgroup_limit() -> int | None:
    """Return the memory limit in bytes that the kernel sets for this process (cgroup v2 or v1), or None."""
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
    )  # cgroup v1 uses a huge number for no limit


def _limit_files() -> Iterator[Path]:
    """Yield the files with the limits of this process's group and of its parent groups."""
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
    """Return the device to compute on; ``auto`` is a GPU if there is one.

    Raises
    ------
    UserError
        If ``cuda`` is requested and there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: this machine offers no GPU to PyTorch; use --device cpu, or see perturbdiff doctor"
        )
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes matrix products deterministic
    return "cuda"


def resolve_devices(device: str) -> list[str]:
    """Return the devices that a text names, e.g. ``auto``, ``cuda`` or ``cuda:0,cuda:1``.

    Raises
    ------
    UserError
        If the text is malformed, or names a device twice or one that does not exist.
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
