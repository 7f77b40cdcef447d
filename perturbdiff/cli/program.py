"""What all commands have in common: a first line at once, and a sentence when a person ends them."""

from __future__ import annotations

import logging
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from perturbdiff.runtime.errors import Interrupted

logger = logging.getLogger(__name__)


class Work(TyperCommand):
    """A command that takes longer than a second: it says so before it imports what it needs."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Say what begins, then run the command."""
        names, at = [], ctx
        while at.parent is not None:
            names.append(str(at.info_name or ""))
            at = at.parent
        logger.info("%s: loading libraries and inputs", " ".join(filter(None, reversed(names))))
        return super().invoke(ctx)


class Program(TyperGroup):
    """The whole command line."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run a command.

        Raises
        ------
        Interrupted
            After Ctrl-C, which Typer would answer without a word.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except SystemExit as stop:  # Lightning's answer to a second Ctrl-C
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise Interrupted from None
            raise
