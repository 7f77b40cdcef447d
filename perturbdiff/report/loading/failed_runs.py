"""Methods that were to be run and have no scores: they are shown as failed, with the reason, and take no rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from perturbdiff.report.loading.results import Run
from perturbdiff.report.loading.stage_logs import reason
from perturbdiff.report.loading.text_tables import read_texts
from perturbdiff.runtime.errors import UserError, listing

_LONGEST_NAME = 255  # bytes, in every usual file system
_COLUMNS = ("dataset", "method", "kind", "log")
_CLIPPED = 160


@dataclass(frozen=True)
class FailedRun:
    """A method without scores on a data set.

    Attributes
    ----------
    kind
        'model', or any other word for a baseline.
    reason
        What its log says of the failure; empty if that is unknown.
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
        found: dict[tuple[str, str], FailedRun] = {}
        for dataset, method, kind, log in self.table.itertuples(index=False):
            if (dataset, method) not in there:
                names = _names(log)
                files = tuple(self.logs[name] for name in names if name in self.logs)
                shown = tuple(Path(name).name for name in names)
                one = FailedRun(dataset, method, kind, reason(files), shown, files)
                found.setdefault((dataset, method), one)
        return list(found.values())


def read_expected(path: Path | None, folders: Sequence[Path] = ()) -> Expected:
    """Read the table of what was to be run; without one nothing was.

    Parameters
    ----------
    path
        CSV with the columns dataset, method, kind and log. ``log`` names files, ``;`` between them, in the order
        of the stages that a method needs; names alone, and a link that leads out of its folder is not followed.
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
