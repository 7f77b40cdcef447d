"""Where the output of a method of others goes, so that it can be read when the method has failed."""

from __future__ import annotations

import re
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from perturbdiff.runtime.progress import log_file

_KEPT = 200
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b")
_REFUSED = "refused: "


class OutputLog:
    """Appends lines to the run's log (``PD_LOG``), or writes them to ``OUT.log`` beside the output.

    Parameters
    ----------
    out
        The output.
    name
        Of the method; begins the lines in the run's log.

    Attributes
    ----------
    path
        The file.
    shared
        Whether it is the run's log.
    """

    def __init__(self, out: Path, name: str) -> None:
        shared = log_file()
        self.shared = shared is not None
        self.path = shared or out.with_name(f"{out.name}.log")
        self._prefix = f"{name} | " if shared else ""
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = self.path.open("a" if shared else "w", encoding="utf-8", buffering=1)

    def write(self, line: str) -> None:
        """Add a line."""
        self._kept.append(line)
        self._handle.write(f"{self._prefix}{line}\n")

    def say(self, text: str) -> None:
        """Add a line of our own, with the time."""
        self._handle.write(f"{self._prefix}{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def last(self, number: int) -> list[str]:
        """Return the last lines of the method that are not empty."""
        return [line for line in self._kept if line.strip()][-number:]

    def error(self) -> str:
        """Return the line that most likely tells why the method failed: of its last error, else its last one."""
        said = [line.strip() for line in self._kept if line.strip()]
        errors = [line for line in said if _ERROR.match(line)]
        return [*said, *errors][-1] if said else "it said nothing"

    def refusal(self) -> str:
        """Return the reason that the method gave for not doing what it was asked."""
        said = [line for line in self._kept if line.startswith(_REFUSED)]
        return said[-1].removeprefix(_REFUSED) if said else [*self.last(1), "it gave no reason"][0]

    def __enter__(self) -> OutputLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()
