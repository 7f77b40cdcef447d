"""Why a method failed, from the logs of its stages: one line for a person."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_ATTEMPT = re.compile(r"^\S+ \S+ =+ ")
_STAMP = re.compile(
    r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?\s+(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+)?"
)
_END = re.compile(r"^exit code (\d+) after [^:]*(?:: (.*))?$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NOISE = re.compile(
    r"^(progress \d+/\d+|.*\d+ \S+/s(, \d+ s left)?$|Traceback \(most recent|  |\^+$|[-=~*#_\s]*$)"
)
_MOST = 64 * 1024  # bytes of a log's end that are read
_LONGEST = 400


def reason(logs: Sequence[Path]) -> str:
    """Return why the first stage that did not end well did not.

    Parameters
    ----------
    logs
        Files of the stages in their order; those of stages that were never begun are not there. A log of ours ends
        with an exit code and what was said last; of another, the last line that says something counts.

    Returns
    -------
    str
        Empty if no log can be read or none tells of a failure.
    """
    for path in logs:
        if found := _failure(_last_attempt(path)):
            return found[:_LONGEST]
    return ""


def _last_attempt(path: Path) -> list[str]:
    """Return the lines of the last attempt that a log tells of, its beginning too; none if it cannot be read."""
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
    """Return what a log says of a failure; empty if it ended well or says nothing."""
    ours = bool(lines) and bool(_ATTEMPT.match(lines[0]))
    said = [_STAMP.sub("", line) for line in lines[ours:]]
    ended = next((match for line in reversed(said) if (match := _END.match(line))), None)
    if ended and ended[1] == "0":
        return ""
    if ended and ended[2]:
        return ended[2].removeprefix("error: ").strip()
    last = _meaningful(said)
    if ended:
        return f"{last} (exit code {ended[1]})" if last else f"exit code {ended[1]}"
    if ours:  # whoever ends by itself says so
        return f"killed or cut off{f', after: {last}' if last else ''}"
    return last.removeprefix("error: ")


def _meaningful(lines: Iterable[str]) -> str:
    """Return the last line that is no progress, frame of a trace or rule; an error rather than what follows it."""
    found = [
        line.strip() for line in lines if line.strip() and not _NOISE.match(line) and not _END.match(line)
    ]
    errors = [line for line in found if line.startswith("error: ")]
    return (errors or found or [""])[-1]
