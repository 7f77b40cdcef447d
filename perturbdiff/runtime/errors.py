"""Errors for the user. Every expected failure is one of these, with a one-line message and a remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED_EARLY = 75
EXIT_INTERRUPTED = 130
EXIT_KILLED = 137

INTERRUPTED = "interrupted: what was finished is kept; run the same command again to go on"

# Control characters, Unicode line ends and writing direction marks, which can disguise a text as another one.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def visible(text: str) -> str:
    """Return a text in which characters that hide or reorder others are replaced by their codes. Line breaks stay."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a text as one line of visible characters, because messages quote labels and other libraries."""
    return visible(re.sub(r"\s*[\r\n]+\s*", " ", text).strip())


class UserError(Exception):
    """An error that the user can fix. The message names the file, column or gene and says what to do. Exit code 2.

    The message is one line. Several problems that are found at once are its ``details``, with a numbered line each.
    """

    def __init__(self, message: str, details: Iterable[str] = ()) -> None:
        lines = [one_line(message), *(f"  {k}. {one_line(text)}" for k, text in enumerate(details, 1))]
        super().__init__("\n".join(lines))


class NeedsForce(UserError):
    """An output that took long to make is there, with other settings. It is replaced only with ``--force``."""


class StoppedEarly(Exception):
    """Training stopped before its time limit and left a checkpoint. Exit code 75: run it again."""


class Interrupted(Exception):
    """The user ended the command with Ctrl-C. Exit code 130, as in a shell."""


class Killed(Exception):
    """A worker process was killed from outside. Exit code 137, as in a shell: more memory may help."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the closest of ``choices``, or an empty string if none is close."""
    options = [str(c) for c in choices]
    exact = {c.lower(): c for c in options}
    if word.lower() in exact:
        return f", did you mean '{exact[word.lower()]}'?"
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else ""


def _label(text: str) -> str:
    """Return a label for a list, with its line ends written out."""
    return visible(re.sub(r"[\t\r\n]", lambda found: repr(found[0])[1:-1], text))


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Return ``names`` comma-separated, cut after ``limit`` with a count of the rest."""
    items = [_label(str(n)) for n in names]
    rest = f", … ({len(items) - limit} more)" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
