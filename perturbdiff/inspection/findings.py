"""What was found: facts, warnings, and problems that would stop a later stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from perturbdiff.runtime.errors import visible

Kind = Literal["fact", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One sentence on a study."""

    kind: Kind
    text: str


@dataclass
class Findings:
    """All that was found in a study, in the order in which it was looked at.

    Attributes
    ----------
    study
        Its name.
    found
        The findings.
    """

    study: str
    found: list[Finding] = field(default_factory=list)

    def fact(self, text: str) -> None:
        """Add a fact."""
        self.found.append(Finding("fact", text))

    def warning(self, text: str) -> None:
        """Add what a user should know, but which stops nothing."""
        self.found.append(Finding("warning", text))

    def problem(self, text: str) -> None:
        """Add what would stop a later stage."""
        self.found.append(Finding("problem", text))

    @property
    def problems(self) -> list[str]:
        """The problems."""
        return [one.text for one in self.found if one.kind == "problem"]


def render(studies: Iterable[Findings]) -> str:
    """Return everything that was found, a line each."""
    lines = []
    for study in studies:
        lines.append(study.study)
        lines += [f"  {one.kind.ljust(7)}  {visible(one.text)}" for one in study.found]
    return "\n".join(lines)
