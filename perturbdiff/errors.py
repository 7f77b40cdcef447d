"""What the package says to a person: every expected failure is one of these, with one line and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED_EARLY = 75
EXIT_INTERRUPTED = 130
EXIT_KILLED = 137

INTERRUPTED = "interrupted: what was finished is kept; run the same command again to go on"


class UserError(Exception):
    """The user can mend it: the message names the file, column or gene and says what to do. Exit code 2."""


class StoppedEarly(Exception):
    """Training ended itself before its allocation did and left a checkpoint. Exit code 75: run it again."""


class Interrupted(Exception):
    """A person ended the command, with Ctrl-C. Exit code 130, as a shell says it."""


class Killed(Exception):
    """A process that did the work was killed from outside. Exit code 137, as a shell says it: more memory may help."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the closest of ``choices``, or an empty string if none is close."""
    options = [str(c) for c in choices]
    exact = {c.lower(): c for c in options}
    if word.lower() in exact:
        return f", did you mean '{exact[word.lower()]}'?"
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else ""


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Return ``names`` comma-separated, cut after ``limit`` with a count of the rest."""
    items = [str(n) for n in names]
    rest = f", … ({len(items) - limit} more)" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
