"""What the package says when it is used from Python."""

from __future__ import annotations

import logging
import re
import sys
import tempfile

from perturbdiff.runtime.errors import visible

PREFIX = "perturbdiff-"
"""What the names of temporary folders begin with."""

_PACKAGE = "perturbdiff"


def short(text: str) -> str:
    """Return a text in which files in our temporary folders have their names alone."""
    return re.sub(re.escape(f"{tempfile.gettempdir()}/{PREFIX}") + r"\w+/", "", text)


class Fallback(logging.Handler):
    """Writes the package's messages to standard error as long as nobody else listens to them.

    A program that sets up logging itself, for all loggers or for ``perturbdiff``, gets the messages there alone.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, with its level if it is a warning or an error."""
        others = [h for h in logging.getLogger(_PACKAGE).handlers if h is not self]
        if others or logging.getLogger().handlers:
            return
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        try:
            sys.stderr.write(f"{level}{visible(short(record.getMessage()))}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # a closed stream is no reason to end a training
            self.handleError(record)


def show_messages() -> None:
    """Make the package's messages visible, unless the program listens to them. A level that was set stays."""
    package = logging.getLogger(_PACKAGE)
    if not package.handlers:
        package.addHandler(Fallback())
        if package.level == logging.NOTSET:
            package.setLevel(logging.INFO)
