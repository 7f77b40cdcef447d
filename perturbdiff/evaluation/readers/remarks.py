"""Remarks on the inputs of an evaluation."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class Findings:
    """Remarks on the inputs, which are logged at once and kept for the summary.

    Parameters
    ----------
    quiet
        Keep them only.

    Attributes
    ----------
    entries
        ``kind``, ``text`` and ``count`` of each.
    facts
        Numbers by name.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.entries: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def add(self, kind: str, text: str, count: int, *, warn: bool = True) -> None:
        """Log and keep a sentence."""
        if not self._quiet:
            (logger.warning if warn else logger.info)("%s", text)
        self.entries.append({"kind": kind, "text": text, "count": count})
