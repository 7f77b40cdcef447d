"""Bundles in repositories of the Hugging Face Hub: `push` one there, `pull` one from there.

A bundle's manifest decides which files travel and is what they are compared with after a download. Nothing else of a
repository is taken. The library ``huggingface_hub`` (extra ``hub``) keeps the account's token; it is never read here,
and messages quote neither it nor an address, because addresses of uploads and downloads can hold signatures.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbdiff import __version__
from perturbdiff.checkpoint.bundle_record import CARD, FILES, STEPS, TABLES, read_record
from perturbdiff.embeddings.embedding_tables import SEMANTIC_KINDS
from perturbdiff.runtime import files, locks, outputs
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import track

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

_MANIFEST, _RUN = "manifest.json", "run.json"
_DATA = (*FILES, "seen.parquet", "training.csv", *(f"{TABLES}/{kind}.npz" for kind in SEMANTIC_KINDS))
"""All that a manifest of a bundle can list, apart from the card and kept steps."""
_FOREIGN = (".gitattributes", CARD)
"""What a new repository has before anything is pushed."""
_FETCHED = "download"
_LARGEST = 1 << 28  # bytes of a manifest


def push(bundle: Path, repository: str, *, public: bool = False) -> str:
    """Upload a bundle in one commit, after it was compared with its manifest. Kept steps and logs stay here.

    Parameters
    ----------
    bundle
        A bundle's folder.
    repository
        ``OWNER/NAME``. It is created if it is not there.
    public
        Whether everybody may see it. A new repository is private otherwise, and a public one is refused.

    Returns
    -------
    str
        Address of the repository.

    Raises
    ------
    UserError
        If it is no whole bundle, the repository holds something else or is public, or the Hub refuses.
    """
    names = _names_to_push(bundle)
    api = _api(needs_account=True)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with _explained(repository, "write to it"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a parquet file is no model; that tags are unknown
        address = api.create_repo(repository, private=not public, exist_ok=True)
        there = api.model_info(address.repo_id)
        present = {file.rfilename for file in there.siblings or ()}
        foreign = present - {*_FOREIGN, *_DATA, _MANIFEST, _RUN}
        if foreign or (present - set(_FOREIGN) and _MANIFEST not in present):
            what = listing(sorted(foreign or present - set(_FOREIGN)))
            raise UserError(f"{repository}: holds something else ({what}); choose another repository")
        if not there.private and not public:
            raise UserError(
                f"{repository}: everybody can see this repository; add --public if the bundle may be seen, or choose "
                "another one"
            )
        if CARD in present:
            logger.warning(
                "%s: its model card is replaced; the history of the repository keeps it", repository
            )
        megabytes = sum((bundle / name).stat().st_size for name in names) / 1e6
        logger.info("uploading %d files, %.1f MB, to %s", len(names), megabytes, repository)
        stale = [
            CommitOperationDelete(path_in_repo=name) for name in sorted(present & set(_DATA) - set(names))
        ]
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=bundle / name) for name in names]
        api.create_commit(
            address.repo_id, [*stale, *added], commit_message=f"Bundle of perturbdiff {__version__}"
        )
    logger.info("%s is %s", repository, "private" if there.private else "public")
    return str(address)


def pull(repository: str, out: Path, *, revision: str | None = None) -> Path:
    """Download a bundle. It appears when all its files agree with its manifest.

    A broken connection is taken up again. The next call after an interruption keeps the files that are complete.

    Parameters
    ----------
    repository
        ``OWNER/NAME``.
    out
        The new folder.
    revision
        Branch, tag or commit; by default the newest state.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If the folder is there and is another one, the repository cannot be read or holds no bundle, or a file was
        changed.
    """
    outputs.check_place(out)
    api = _api()
    partial = files.temporary_name(out)
    fetched = partial / _FETCHED
    with (
        files.explain_os_errors(out, kept_at=partial),
        locks.locked(partial, f"another run that writes {out.name}"),
        _cleaned(partial),
    ):
        with _explained(repository, "read it", revision):
            commit = api.model_info(repository, revision=revision).sha
            fetch = functools.partial(api.hf_hub_download, repository, revision=commit, local_dir=fetched)
            fetch(_MANIFEST)
            listed = _listed(fetched / _MANIFEST, repository)
            if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
                _check_same(out, fetched / _MANIFEST)
                return out
            fetch(_RUN)
            with contextlib.suppress(_missing_file()):
                fetch(CARD)
            with track(
                f"pulling {repository}", sum(e["size"] for e in listed.values()) // 1000, "kB"
            ) as work:
                for name, entry in listed.items():
                    fetch(name)
                    work.advance(entry["size"] // 1000)
        if changed := [name for name, entry in listed.items() if not _agrees(fetched / name, entry)]:
            raise UserError(
                f"{repository}: {listing(changed)} was changed since the bundle was made (see {_MANIFEST}); "
                "nothing was kept: take another --revision, or ask its owner to push it again"
            )
        _put_together(fetched, partial / out.name, [*listed, _MANIFEST, _RUN, CARD])
        if out.is_dir():
            out.rmdir()  # an empty one
        (partial / out.name).rename(out)
    logger.info("%s: commit %s of %s", out, commit, repository)
    return out


class _Unfinished(UserError):
    """The Hub could not be reached, or not to the end: the same command can go on."""


@contextlib.contextmanager
def _cleaned(partial: Path) -> Iterator[None]:
    """Remove the working folder at the end, unless an interrupted download can be continued in it."""
    kept = False
    try:
        yield
    except (_Unfinished, KeyboardInterrupt, OSError):
        kept = (partial / _FETCHED).exists()
        raise
    finally:
        if partial.exists() and not kept:
            files.discard(partial)


def _names_to_push(bundle: Path) -> list[str]:
    """Return the files of a bundle that are shared, after they were compared with its manifest."""
    unchanged = read_record(bundle).unchanged
    if unchanged is None or not (bundle / _MANIFEST).is_file() or not (bundle / _RUN).is_file():
        raise UserError(
            f"{bundle}: has no {_MANIFEST} that lists its files, so that nobody could tell whether they were changed; "
            "push the folder that train wrote (a kept step: train again with train.max_steps of that step)"
        )
    beside = [name for name in (CARD, _MANIFEST, _RUN) if (bundle / name).is_file()]
    return sorted({*unchanged, *beside} & {*_DATA, CARD, _MANIFEST, _RUN})


def _listed(path: Path, repository: str) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of the files that a downloaded manifest lists, after a look at their names."""
    manifest = outputs.check_record(path) if path.stat().st_size < _LARGEST else None
    entries = (manifest or {}).get("files")
    if not isinstance(entries, dict):
        raise UserError(f"{repository}: holds no bundle ({_MANIFEST} lists no files)")
    listed = {name: entry for name, entry in entries.items() if name.split("/")[0] != STEPS}
    if unknown := sorted(listed.keys() - {*_DATA, CARD}):
        raise UserError(f"{repository}: holds no bundle that this version reads ({listing(unknown)} in it)")
    if missing := [name for name in FILES if name not in listed]:
        raise UserError(f"{repository}: holds no bundle ({listing(missing)} missing)")
    for name, entry in listed.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("size"), int):
            raise UserError(f"{repository}: {_MANIFEST} tells no size of {name}")
    return listed


def _agrees(path: Path, entry: dict[str, Any]) -> bool:
    return path.stat().st_size == entry["size"] and files.sha256(path) == entry.get("sha256")


def _check_same(out: Path, manifest: Path) -> None:
    """Raise an error unless a folder already holds the bundle of a manifest."""
    theirs = out / _MANIFEST
    if not theirs.is_file() or theirs.read_bytes() != manifest.read_bytes():
        raise UserError(f"{out}: is there and holds something else; name a new folder, or move that one away")
    read_record(out)
    logger.info("%s: holds this bundle already, nothing to do", out)


def _put_together(fetched: Path, target: Path, names: list[str]) -> None:
    """Move the named files out of the folder in which the library keeps notes beside them."""
    files.remove(target)
    for name in names:
        if (fetched / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (fetched / name).replace(target / name)


def _api(*, needs_account: bool = False) -> HfApi:
    """Return the library's client, which says nothing by itself."""
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub import utils as hub
    except ModuleNotFoundError:
        raise UserError(
            "sharing bundles needs huggingface-hub, which is not installed: pip install 'perturbdiff[hub]'"
        ) from None
    hub.logging.set_verbosity(logging.CRITICAL)  # its warnings quote addresses
    hub.disable_progress_bars()
    if needs_account and get_token() is None:
        raise UserError(
            "push needs an account of the Hugging Face Hub: log in with 'hf auth login', or set HF_TOKEN"
        )
    return HfApi(
        endpoint=os.environ.get("HF_ENDPOINT"), library_name="perturbdiff", library_version=__version__
    )


def _missing_file() -> type[Exception]:
    from huggingface_hub.errors import EntryNotFoundError

    return EntryNotFoundError


@contextlib.contextmanager
def _explained(repository: str, doing: str, revision: str | None = None) -> Iterator[None]:
    """Turn the library's errors into a `UserError`.

    Parameters
    ----------
    repository, revision
        What is asked for.
    doing
        What the account has to be allowed to do.
    """
    from huggingface_hub import errors

    # requests or httpx, whose errors have different bases in different versions of the library
    connection: tuple[type[Exception], ...] = errors.HfHubHTTPError.__bases__  # pyright: ignore[reportAssignmentType]
    try:
        yield
    except errors.HFValidationError:
        raise UserError(f"{repository}: is no name of a repository; write it as OWNER/NAME") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{repository}: has no revision '{revision}'") from None
    except errors.LocalEntryNotFoundError:
        raise _unreachable(repository, "the connection failed") from None
    except errors.EntryNotFoundError:
        raise UserError(f"{repository}: holds no bundle (a file of it is missing)") from None
    except ValueError as error:
        if isinstance(error.__cause__, errors.BadRequestError):
            raise UserError(
                f"{repository}: the Hub refuses {CARD}: {str(error).partition(':')[2] or error}"
            ) from None
        raise _unreachable(repository, type(error).__name__) from None
    except (OSError, RuntimeError, *connection) as error:
        cause = error if hasattr(error, "response") else error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is None and isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        raise _refused(repository, doing, status, type(cause).__name__) from None


def _refused(repository: str, doing: str, status: int | None, kind: str) -> UserError:
    if status in (401, 404):
        return UserError(
            f"{repository}: the Hub has no such repository, or does not show it to you; check the name, and log in "
            "with 'hf auth login' or set HF_TOKEN"
        )
    if status == 403:
        return UserError(
            f"{repository}: your account may not {doing}; ask its owner, or take a token that may write"
        )
    return _unreachable(repository, kind if status is None else f"it answered with HTTP status {status}")


def _unreachable(repository: str, why: str) -> UserError:
    return _Unfinished(
        f"{repository}: the Hub does not answer as it should ({why}); check the network, and run the same command "
        "again, which keeps what is complete"
    )
