"""Checksums of a store's files, in the form that ``sha256sum -c`` reads.

``checksums.sha256`` covers every file of the store but ``manifest.json`` and ``run.json``. The manifest holds the
SHA-256 of ``checksums.sha256`` itself, so that no change of a file goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from perturbdiff.runtime import files, provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner

CHECKSUMS = "checksums.sha256"
NOT_COVERED = frozenset({"manifest.json", "run.json", CHECKSUMS})


def write_checksums(store: Path, known: Mapping[str, str] | None = None) -> str:
    """Write ``checksums.sha256`` of a store that is complete but for its manifest.

    Parameters
    ----------
    store
        Its folder.
    known
        SHA-256 of files that need not be read again, by path below ``store``.

    Returns
    -------
    str
        The SHA-256 of the file written, which belongs into the manifest's results as ``checksums``.
    """
    known = {} if known is None else dict(known)
    for name, path in _covered(store).items():
        if name not in known:
            known[name] = files.sha256(path)
    target = store / CHECKSUMS
    target.write_text("".join(f"{_line(name, known[name])}\n" for name in sorted(known)))
    return files.sha256(target)


def read_checksums(store: Path) -> dict[str, str] | None:
    """Return the recorded SHA-256 of each file by its path below ``store``; None for a store without any.

    Raises
    ------
    UserError
        If the record is gone, or is not the one that the manifest knows.
    """
    results = (provenance.read_manifest(store) or {}).get("results", {})
    digest = results.get("checksums")
    path = store / CHECKSUMS
    if not path.is_file():
        if digest is None:
            return None
        raise UserError(f"{path}: is missing; run preprocess again with --force")
    if digest is not None and files.sha256(path) != digest:
        raise UserError(f"{path}: was changed since the store was made; run preprocess again with --force")
    try:
        return dict(map(_parsed, path.read_text().splitlines()))
    except ValueError:
        raise UserError(f"{path}: is not a list of checksums; run preprocess again with --force") from None


def confirm(store: Path, names: Iterable[str]) -> dict[str, str]:
    """Compare the metadata and small files of a store with its checksums, if it has any; return all its checksums.

    Raises
    ------
    UserError
        If one was changed or is a link, or metadata are missing. Another file that is missing is left to whoever
        reads it.
    """
    recorded = read_checksums(store) or {}
    metadata = [name for name in recorded if name.endswith("/zarr.json")]
    for name in metadata:
        if not (store / name).is_file():
            raise UserError(f"{store / name}: is missing; run preprocess again with --force")
    for name in [*names, *metadata]:
        path = store / name
        if path.is_symlink():
            raise UserError(f"{path}: is a link, which is not followed; copy the whole store")
        if name in recorded and path.is_file() and files.sha256(path) != recorded[name]:
            raise UserError(
                f"{path}: was changed since the store was made; run preprocess again with --force"
            )
    return recorded


def require(store: Path, recorded: Mapping[str, str], prefix: str) -> None:
    """Refuse to go on if a recorded file whose name begins with ``prefix`` is gone, because Zarr would read zeros.

    Raises
    ------
    UserError
        If one is missing.
    """
    for name in recorded:
        if name.startswith(prefix) and not (store / name).is_file():
            raise UserError(f"{store / name}: is missing; run preprocess again with --force")


def changed_files(store: Path, recorded: Mapping[str, str], runner: TaskRunner) -> list[str]:
    """Return a line for every file of a store that is missing, was changed, or was not there when it was made."""
    present = _covered(store)
    problems = {name: "is missing" for name in recorded if name not in present}
    problems |= {name: "is not part of the store; delete it" for name in present if name not in recorded}
    names = sorted(name for name in recorded if name in present)
    paths = [present[name] for name in names]
    sizes = [path.stat().st_size for path in paths]
    digests = runner.run(_digest, paths, weights=sizes, label="checking files", unit="bytes")
    for name, digest in zip(names, digests, strict=True):
        if digest != recorded[name]:
            problems[name] = digest if digest.startswith("cannot") else "was changed since the store was made"
    return [f"{store / name}: {problems[name]}" for name in sorted(problems)]


def _covered(store: Path) -> dict[str, Path]:
    """Return the files of a store that have a checksum, by name; hidden files do not belong to it."""
    paths = {p.relative_to(store).as_posix(): p for p in store.rglob("*") if p.is_file()}
    return {name: path for name, path in paths.items() if name not in NOT_COVERED and "/." not in f"/{name}"}


def _digest(path: Path) -> str:
    try:
        return files.sha256(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _line(name: str, digest: str) -> str:
    """Return a line of a checksum file; names with a backslash or a line break are escaped as sha256sum does."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "" if escaped == name else "\\"
    return f"{mark}{digest}  {escaped}"


def _parsed(line: str) -> tuple[str, str]:
    """Return name and SHA-256 of a line of a checksum file."""
    digest, gap, name = line.rstrip("\n").partition("  ")
    if digest.startswith("\\"):
        digest = digest[1:]
        name = name.replace("\\\\", "\0").replace("\\n", "\n").replace("\\r", "\r").replace("\0", "\\")
    outside = name.startswith("/") or ".." in name.split("/")
    if len(digest) != 64 or not gap or not name or outside:
        raise ValueError(line)
    return name, digest
