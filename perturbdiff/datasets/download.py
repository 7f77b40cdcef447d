"""One file over HTTP: an interrupted transfer is taken up again, and the file appears when it is whole and checked.

Beside the file lies the folder ``.NAME.partial`` while it is on its way: what has come, and what the server called the
version (its ETag or date). A later attempt asks for the rest of that version (``Range``, ``If-Range``). If the server
has another version by now, or knows no ranges, it sends everything and the file is begun anew.
"""

from __future__ import annotations

import contextlib
import email.message
import http.client
import json
import logging
import os
import platform
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perturbdiff import __version__
from perturbdiff.datasets.registry import host, web_address
from perturbdiff.runtime import files, locks, untrusted
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import Track, track

logger = logging.getLogger(__name__)


def by_hand(url: str, folder: str) -> str:
    """Return how a user can fetch a file that a program is not given."""
    if url.startswith("gs://"):
        return (
            "where the reader pays, the bucket wants to know whom to bill: "
            f"gcloud storage cp --billing-project=YOUR_PROJECT {url} {folder}/"
        )
    if url.startswith("hf://"):
        return "look at its page on the Hugging Face Hub, which may ask you to accept terms"
    return f"download {url} with a browser into {folder}"


PAUSES = (1.0, 4.0, 15.0, 60.0)
"""Seconds to wait after each failed attempt that brought nothing new."""
TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as broken."""

_BLOCK = 1 << 20
_LATER = (408, 425, 429, 500, 502, 503, 504)
_BROKEN = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError)
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+|\*)")


@dataclass(frozen=True)
class Version:
    """What a server calls the version of a file. A resumed transfer is of the same version.

    Attributes
    ----------
    url
        Address in the registry.
    mark
        Strong ETag, else the date of the last change; empty if the server gives neither.
    total
        Size in bytes, or None if the server does not tell it.
    """

    url: str
    mark: str
    total: int | None


def download(url: str, target: Path, check: Callable[[Path], None], *, size: int | None = None) -> Version:
    """Fetch a file. It appears at ``target`` when ``check`` has accepted it.

    Parameters
    ----------
    url
        Address, as in the registry.
    target
        The new file.
    check
        Raises a `UserError` if the whole file is not what it should be. Then nothing of it is kept.
    size
        Bytes that the file must have, if known.

    Raises
    ------
    UserError
        If the server cannot be reached or refuses, the disk is too full, or the file is another one. What came over
        a broken connection is kept for the next attempt.
    """
    partial = files.temporary_name(target)
    with files.explain_os_errors(target, kept_at=partial):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locks.locked(partial, f"another download of {target.name}"):
            with track(f"fetching {target.name}", (size or 0) // 1000, "kB") as work:
                version = _transferred(url, partial, size, work)
            try:
                check(partial / "data")
                files.replace(partial / "data", target)
            finally:
                files.discard(partial)
    return version


def _transferred(url: str, partial: Path, size: int | None, work: Track) -> Version:
    """Fetch until all is there. Attempts that bring something are not counted as failures.

    Where there is no connection at all, such as on a compute node, it is said at once.
    """
    failures, first = 0, _length(partial / "data")
    while True:
        before = _length(partial / "data")
        try:
            return _attempt(url, partial, size, work)
        except urllib.error.HTTPError as error:
            if error.code not in _LATER:
                raise _refused(url, error, partial.parent) from None
            reason: Exception = error
        except _BROKEN as error:
            reason = error
        failures = 1 if _length(partial / "data") > before else failures + 1
        unconnected = type(reason) is urllib.error.URLError and before == first
        if unconnected or failures > len(PAUSES):
            raise _unreachable(url, reason, partial) from None
        logger.info("%s: %s; trying again in %.0f s", host(url), _why(reason), PAUSES[failures - 1])
        time.sleep(PAUSES[failures - 1])


def _attempt(url: str, partial: Path, size: int | None, work: Track) -> Version:
    """Ask for what is missing and write it."""
    data, known = partial / "data", _version(partial, url)
    done = _length(data) if known and known.mark else 0
    if known and done and done == known.total:
        return known
    request = urllib.request.Request(web_address(url), headers=_headers(done, known))
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT, context=_trust())
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not done:
            raise
        files.remove(data)  # there is less than was fetched: another file
        raise ConnectionError("it has another file by now") from None
    with contextlib.closing(answer):
        if answer.status not in (http.HTTPStatus.OK, http.HTTPStatus.PARTIAL_CONTENT):
            raise urllib.error.HTTPError(url, answer.status, "no file", answer.headers, None)
        start, version = _begin(answer.status, answer.headers, url)
        if done and start != done:
            logger.info(
                "%s: sends the file from the beginning (it has another version, or knows no ranges)",
                host(url),
            )
        _check_size(version, size, partial.parent, start)
        (partial / "version.json").write_text(json.dumps(asdict(version)))
        work.restart((version.total or 0) // 1000, start // 1000)
        _write(answer, data, start, work)
    if version.total is not None and _length(data) < version.total:
        raise ConnectionError("the connection ended early")
    return version


def _trust() -> ssl.SSLContext:
    """Return whose certificates are trusted: the system's (or those in ``SSL_CERT_FILE``), and Mozilla's."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _headers(done: int, known: Version | None) -> dict[str, str]:
    headers = {"User-Agent": f"perturbdiff/{__version__}", "Accept-Encoding": "identity"}
    if done and known:
        headers |= {"Range": f"bytes={done}-", "If-Range": known.mark}
    return headers


def _begin(status: int, headers: email.message.Message, url: str) -> tuple[int, Version]:
    """Return the position of the first byte that follows, and the version of the file."""
    etag = headers.get("ETag", "")
    mark = etag if etag.startswith('"') else headers.get("Last-Modified", "")
    length = headers.get("Content-Length")
    if status == http.HTTPStatus.PARTIAL_CONTENT and (
        found := _RANGE.match(headers.get("Content-Range", ""))
    ):
        total = None if found["total"] == "*" else int(found["total"])
        return int(found["first"]), Version(url, mark, total)
    return 0, Version(url, mark, int(length) if length is not None else None)


def _write(answer: Any, data: Path, start: int, work: Track) -> None:
    with data.open("r+b" if data.exists() else "wb") as handle:
        handle.seek(start)
        handle.truncate()
        while block := answer.read(_BLOCK):
            handle.write(block)
            work.advance(handle.tell() // 1000 - work.done)


def _check_size(version: Version, size: int | None, folder: Path, start: int) -> None:
    if version.total is None:
        return
    if size is not None and version.total != size:
        raise UserError(
            f"{host(version.url)}: the file there has {version.total:,} bytes, but {size:,} are registered: the "
            "publisher has changed it, or this is a page instead of the file; nothing was fetched"
        )
    check_room(folder, version.total - start)


def check_room(folder: Path, needed: float) -> None:
    """Raise a `UserError` if the disk of a folder has less free bytes than are needed."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(
            f"{folder}: {needed / 1e9:.3g} GB are needed and {free / 1e9:.3g} GB are free; free some space, or name "
            "another folder (--out)"
        )


def _version(partial: Path, url: str) -> Version | None:
    """Return the version that an earlier attempt began, if it is of the same address."""
    path = partial / "version.json"
    if not path.is_file():
        return None
    try:
        version = Version(**untrusted.read(path, "JSON"))
    except (UserError, TypeError):
        return None
    return version if version.url == url else None


def _length(data: Path) -> int:
    return data.stat().st_size if data.is_file() else 0


def _refused(url: str, error: urllib.error.HTTPError, folder: Path) -> UserError:
    if error.code in (404, 410):
        return UserError(
            f"{host(url)}: has no file {url} any more (HTTP status {error.code}); look at its source "
            "(perturbdiff data list NAME)"
        )
    return UserError(
        f"{host(url)}: refuses {url} (HTTP status {error.code}); {by_hand(url, str(folder))}, and run the same command "
        "again, which checks the file"
    )


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered with HTTP status {error.code}"
    reason = getattr(error, "reason", None) or error
    return str(reason) or type(error).__name__


def _unreachable(url: str, error: Exception, partial: Path) -> UserError:
    if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
        return UserError(
            f"{host(url)}: its certificate is not trusted here ({_why(error)}); if a proxy of your site answers in its "
            "place, name your site's bundle of certificates in SSL_CERT_FILE"
        )
    came = _length(partial / "data")
    kept = f"; {came / 1e6:.0f} MB have come and are kept" if came else ""
    job = f" (job {os.environ['SLURM_JOB_ID']})" if "SLURM_JOB_ID" in os.environ else ""
    return UserError(
        f"{host(url)}: cannot be reached from {platform.node()}{job}: {_why(error)}{kept}; compute nodes often have no "
        "network: run the same command on a login node, which goes on where it stopped"
    )
