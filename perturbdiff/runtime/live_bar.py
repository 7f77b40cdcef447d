"""Where a bar of progress is drawn: on one line of a terminal that is written over, or in the output of a notebook.

The line hides no cursor and changes no setting of the terminal, so nothing has to be put back, however a command
ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

_ERASE = "\r\x1b[2K"
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_NO_LINES = ("dumb", "unknown")  # values of TERM: such a terminal cannot go back to the start of a line
_WIDEST, _NARROWEST = 40, 5  # columns of the bar; with less room there is none
_SEPARATOR = " · "


class Bar(Protocol):
    """Something that shows progress.

    Attributes
    ----------
    every
        Least number of seconds between two drawings.
    """

    every: float

    def draw(self, share: float, parts: Sequence[str]) -> None:
        """Show the finished share (0 to 1) beside texts, the most important first."""

    def erase(self) -> None:
        """Make room for other output. The next drawing shows the bar again."""

    def close(self, *, erase: bool) -> None:
        """Leave the last drawing behind, or erase it where that is possible."""


def bar() -> Bar | None:
    """Return the bar that fits where this process runs, or None if there is neither terminal nor notebook."""
    import multiprocessing  # here, because every command imports this module before it says anything

    # torchrun lets all its processes write to one terminal, and so do worker processes
    if os.environ.get("RANK", "0") != "0" or multiprocessing.parent_process() is not None:
        return None
    if in_notebook():
        return NotebookBar()
    return TerminalBar() if on_terminal() else None


def on_terminal() -> bool:
    """Return whether standard error is a terminal on which a line can be written over."""
    # a notebook runs commands (!perturbdiff …) on a terminal of its own, and keeps every line of it
    inside_notebook = "JPY_PARENT_PID" in os.environ
    return sys.stderr.isatty() and os.environ.get("TERM") not in _NO_LINES and not inside_notebook


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class TerminalBar:
    """A line at the bottom of a terminal."""

    every = 0.1

    def __init__(self) -> None:
        self._shown = False
        blocks = "utf" in (sys.stderr.encoding or "").lower()
        self._full, self._empty = ("━", "─") if blocks else ("#", ".")
        self._colours = (_GREEN, _PLAIN) if not os.environ.get("NO_COLOR") else ("", "")

    def draw(self, share: float, parts: Sequence[str]) -> None:
        """Write the line over the last one. Texts for which the terminal is too narrow are left out."""
        room = _columns() - 1  # a full line would move to the next one
        text = parts[0][:room]
        for part in parts[1:]:
            if len(text) + len(_SEPARATOR) + len(part) > room:
                break
            text += _SEPARATOR + part
        width = min(_WIDEST, room - len(text) - 1)
        if width >= _NARROWEST:
            full = min(width, int(share * width))
            start, end = self._colours
            text = f"{start}{self._full * full}{end}{self._empty * (width - full)} {text}"
        self._shown = True
        _write(_ERASE + text)

    def erase(self) -> None:
        """Erase the line, which the next drawing shows again."""
        if self._shown:
            self._shown = False
            _write(_ERASE)

    def close(self, *, erase: bool) -> None:
        """Erase the line, or leave it behind and go to the next one."""
        if erase:
            self.erase()
        elif self._shown:
            self._shown = False
            _write("\n")


class NotebookBar:
    """A bar in the output of a cell. A saved notebook keeps its last state."""

    every = 0.5

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, share: float, parts: Sequence[str]) -> None:
        """Show the bar in the output of the running cell, or change it."""
        import html

        from IPython.display import display

        text = _SEPARATOR.join(parts)
        shown = {
            "text/plain": text,
            "text/html": f'<progress value="{share:.4f}" max="1" style="width: 30%"></progress> '
            f"<code>{html.escape(text)}</code>",
        }
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def erase(self) -> None:
        """Do nothing: other output of the cell appears below the bar."""

    def close(self, *, erase: bool) -> None:
        """Leave the bar as it is."""


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone ends no work
        sys.stderr.write(text)
        sys.stderr.flush()
