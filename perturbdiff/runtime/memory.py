"""How much memory there is for this process: the machine's, or what its job or container may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

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
