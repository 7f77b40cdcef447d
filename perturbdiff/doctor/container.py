"""The container that this process is in: which image, and that it gets on without a home folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from perturbdiff.doctor.findings import Check

_MARK = Path("/.singularity.d")
_CACHES = {"MPLCONFIGDIR": "Matplotlib", "NUMBA_CACHE_DIR": "Numba"}


def is_inside() -> bool:
    """Whether this process runs in an Apptainer container."""
    return bool(os.environ.get("APPTAINER_CONTAINER")) or _MARK.is_dir()


def describe() -> Check:
    """File, version, commit and digest of the image."""
    try:
        labels = json.loads((_MARK / "labels.json").read_text())
    except (OSError, ValueError):
        labels = {}
    said = {name.rsplit(".", 1)[-1]: value for name, value in labels.items() if "opencontainers" in name}
    parts = [os.environ.get("APPTAINER_CONTAINER") or "unknown file"]
    parts += [f"{name} {said[name]}" for name in ("version", "revision") if said.get(name)]
    parts += [os.environ["PD_IMAGE_ID"]] if os.environ.get("PD_IMAGE_ID") else []
    if said.get("title") != "perturbdiff":
        remedy = (
            "this is not an image of bin/build-image; the versions of requirements.lock are not certain in it"
        )
        return Check("image", "note", ", ".join(parts), remedy)
    return Check("image", "ok", ", ".join(parts))


def home() -> Check:
    """Whether caches go elsewhere than to the home folder, which the workflow does not mount."""
    here = Path(os.environ.get("HOME", "/nonexistent"))
    there = "visible" if here.is_dir() else "not visible"
    stray = [
        kind
        for name, kind in _CACHES.items()
        if not os.environ.get(name) or Path(os.environ[name]).is_relative_to(here)
    ]
    if stray:
        remedy = f"set {', '.join(n for n, kind in _CACHES.items() if kind in stray)} to a folder outside it"
        return Check("home", "note", f"{there}; {' and '.join(stray)} would write caches there", remedy)
    caches = " and ".join(os.environ[name] for name in _CACHES)
    return Check("home", "ok", f"{there}, not needed: caches go to {caches}")
