"""Says what a file or folder is, for the message about one that was given in place of another."""

from __future__ import annotations

from pathlib import Path

from perturbdiff.io.token_parquet import is_token_parquet
from perturbdiff.runtime import outputs
from perturbdiff.runtime.errors import UserError

_STAGES = {
    "simulate": "a folder of simulated counts",
    "preprocess": "a store",
    "split": "a split",
    "stats": "a folder of statistics",
    "vocabulary": "a gene vocabulary",
    "pretrain": "a model bundle",
    "train": "a model bundle",
    "finetune": "a model bundle",
    "import-checkpoint": "a model bundle",
    "sample": "a predictions file",
    "baseline": "a predictions file",
    "evaluate": "a folder of scores",
    "ceiling": "a folder of scores",
    "calibrate": "a calibration",
    "report": "a report",
    "embed": "a table of vectors",
}
_ZARR, _TENX, _TOKENS = "a Zarr file of cells", "a 10x folder", "Parquet files of cells"
_FOLDERS = {
    "conditions.parquet": "a store",
    "model.safetensors": "a model bundle",
    "metrics.parquet": "a folder of scores",
    "genes.txt": "a gene vocabulary",
    "zarr.json": _ZARR,
    ".zgroup": _ZARR,
    "matrix.mtx.gz": _TENX,
    "matrix.mtx": _TENX,
}
_ENDINGS = {
    ".yaml": "a recipe",
    ".yml": "a recipe",
    ".toml": "a TOML file",
    ".html": "a report",
    ".safetensors": "a file of weights",
}
_HDF5, _PARQUET = b"\x89HDF\r\n\x1a\n", b"PAR1"


COUNTS = ("an h5ad file of cells", _ZARR, _TENX, _TOKENS)
"""What may hold counts."""


def is_hdf5(path: Path) -> bool:
    """Return whether a file begins as HDF5 does."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as handle:
            return handle.read(len(_HDF5)) == _HDF5
    except OSError:
        return False


def what_is(path: Path) -> str:
    """Return what a path is, such as "a store"; empty if there is nothing or it is not known."""
    record = outputs.read_record(path, "manifest") if path.exists() else None
    if (made := _STAGES.get(str((record or {}).get("stage")))) is not None:
        return made
    if path.is_dir():
        found = next((kind for name, kind in _FOLDERS.items() if (path / name).exists()), "")
        found = found or (_TOKENS if is_token_parquet(path) else "")
        return _cells(path, found) if found == _ZARR else found
    if not path.is_file():
        return ""
    if is_hdf5(path):
        return _cells(path, "an h5ad file of cells")
    return _parquet(path) or _ENDINGS.get(path.suffix, "")


def _cells(path: Path, otherwise: str) -> str:
    """Return what a file of cells is; one that cannot be read is told of where it is opened."""
    from perturbdiff.io.layouts import declared
    from perturbdiff.io.opening import open_root

    try:
        root = open_root(path)
    except UserError:
        return ""
    try:
        kind = declared(root).get("kind")
    except (OSError, LookupError, ValueError, TypeError, RuntimeError):
        return ""
    finally:
        if path.is_file():
            root.close()
    return "a predictions file" if kind == "predictions" else otherwise


def _parquet(path: Path) -> str:
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as handle:
            if handle.read(len(_PARQUET)) != _PARQUET:
                return ""
        names = parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError, ValueError):
        return ""
    if is_token_parquet(path):
        return _TOKENS
    return "a split" if {"perturbation", "part"} <= set(names) else "a parquet table"


def confusion(path: Path, wanted: str, *also: str) -> str:
    """Return a sentence on what a path is instead of ``wanted``; empty if that is not known.

    Parameters
    ----------
    path
        What was given.
    wanted
        What is needed.
    also
        What will do, in the words of `what_is`.
    """
    found = what_is(path)
    return "" if found in ("", wanted, *also) else f"this is {found}, not {wanted} (did you swap them?)"
