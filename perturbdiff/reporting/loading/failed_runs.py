"""Methods that were expected but have no scores. They are shown as failed, with the reason, and have no rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from perturbdiff.reporting.loading.results import Run
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.tabular import read_texts

_ATTEMPT = re.compile(r"^\S+ \S+ =+ ")
_STAMP = re.compile(
    r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?\s+(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+)?"
)
_END = re.compile(r"^exit code (\d+) after [^:]*(?:: (.*))?$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NOISE = re.compile(
    r"^(progress \d+/\d+|.*\d+ \S+/s(, [\d.]+ (s|min|h) left)?$|Traceback \(most recent|  |\^+$|[-=~*#_\s]*$)"
)
_MOST = 64 * 1024  # bytes of a log's end that are read
_LONGEST = 400
_LONGEST_NAME = 255  # bytes, in every usual file system
_COLUMNS = ("dataset", "method", "kind", "log")
_CLIPPED = 160


def reason(logs: Sequence[Path]) -> str:
    """Return the reason why the first failed stage failed.

    Parameters
    ----------
    logs
        Files of the stages in their order. Those of stages that were never begun are not there. A log of ours ends
        with an exit code and what was said last. Of another, the last line that says something counts.

    Returns
    -------
    str
        Empty if no log can be read or none tells of a failure.
    """
    for path in logs:
        if failure := _failure(_last_attempt(path)):
            return failure[:_LONGEST]
    return ""


def _last_attempt(path: Path) -> list[str]:
    """Return the lines of the last attempt that a log tells of, its beginning too, or none if it cannot be read."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _MOST))
            text = handle.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [_COLOUR.sub("", line).rsplit("\r", 1)[-1].rstrip() for line in text.splitlines()]
    begun = [i for i, line in enumerate(lines) if _ATTEMPT.match(line)]
    return lines[begun[-1] :] if begun else lines


def _failure(lines: Sequence[str]) -> str:
    """Return what a log says of a failure. Empty if it ended well or says nothing."""
    ours = bool(lines) and bool(_ATTEMPT.match(lines[0]))
    messages = [_STAMP.sub("", line) for line in lines[ours:]]
    ended = next((match for line in reversed(messages) if (match := _END.match(line))), None)
    if ended and ended[1] == "0":
        return ""
    if ended and ended[2]:
        return ended[2].removeprefix("error: ").strip()
    last = _meaningful(messages)
    if ended:
        return f"{last} (exit code {ended[1]})" if last else f"exit code {ended[1]}"
    if ours:  # whoever ends by itself says so
        return f"killed or cut off{f', after: {last}' if last else ''}"
    return last.removeprefix("error: ")


def _meaningful(lines: Iterable[str]) -> str:
    """Return the last line that is no progress, frame of a trace or rule. An error rather than what follows it."""
    candidates = [
        line.strip() for line in lines if line.strip() and not _NOISE.match(line) and not _END.match(line)
    ]
    errors = [line for line in candidates if line.startswith("error: ")]
    return (errors or candidates or [""])[-1]


@dataclass(frozen=True)
class FailedRun:
    """A method without scores on a data set.

    Attributes
    ----------
    kind
        'model', or any other word for a baseline.
    reason
        What its log says of the failure. Empty if that is unknown.
    logs
        Names of its logs.
    files
        Those that can be read.
    """

    dataset: str
    method: str
    kind: str
    reason: str
    logs: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def why(self) -> str:
        """Return the reason, else where it may be found."""
        if self.reason:
            return self.reason
        return f"no reason known, see {listing(self.logs, 3)}" if self.logs else "no reason known, and no log"

    @property
    def short(self) -> str:
        """Return the reason, cut to what a table takes."""
        return self.why if len(self.why) <= _CLIPPED else f"{self.why[: _CLIPPED - 1]}…"


@dataclass(frozen=True)
class Expected:
    """What was to be run: the table, and the files of the logs that it names, as far as they are there."""

    table: pd.DataFrame
    logs: dict[str, Path]

    def missing(self, runs: Sequence[Run]) -> list[FailedRun]:
        """Return what was expected and has no run, in the order of the table."""
        there = {(run.dataset, run.base) for run in runs}
        failed: dict[tuple[str, str], FailedRun] = {}
        for dataset, method, kind, log in self.table.itertuples(index=False):
            if (dataset, method) not in there:
                names = _names(log)
                files = tuple(self.logs[name] for name in names if name in self.logs)
                shown = tuple(Path(name).name for name in names)
                one = FailedRun(dataset, method, kind, reason(files), shown, files)
                failed.setdefault((dataset, method), one)
        return list(failed.values())


def read_expected(path: Path | None, folders: Sequence[Path] = ()) -> Expected:
    """Read the table of what was to be run. Without one nothing was.

    Parameters
    ----------
    path
        CSV with the columns dataset, method, kind and log. ``log`` names files, ``;`` between them, in the order
        of the stages that a method needs. Names alone, and a link that leads out of its folder is not followed.
    folders
        Where the logs are looked for besides the table's own folder.

    Raises
    ------
    UserError
        If the table is missing, cannot be read or lacks a column.
    """
    if path is None:
        return Expected(pd.DataFrame(columns=pd.Index(_COLUMNS)), {})
    table = read_texts(path, "expected methods", _COLUMNS, _COLUMNS)
    logs = {}
    for name in dict.fromkeys(n for log in table["log"] for n in _names(log)):
        if Path(name).name != name or name == ".." or len(name.encode()) > _LONGEST_NAME:
            raise UserError(
                f"{path}: log '{name}' is no name of a file; give names alone, and their folders with --logs"
            )
        for folder in (*folders, path.parent):
            file = folder / name
            if file.is_file() and file.resolve().parent == folder.resolve():
                logs[name] = file
                break
    return Expected(pd.DataFrame(table[list(_COLUMNS)]), logs)


def _names(log: str) -> list[str]:
    return [name.strip() for name in log.split(";") if name.strip()]
