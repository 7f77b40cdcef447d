"""A condition: one perturbation of one cell type in one batch."""

from __future__ import annotations

from typing import Any, NamedTuple

Group = tuple[str, str]
"""Cell type and batch. The conditions of a group share its control cells."""


class Condition(NamedTuple):
    """The three labels of a condition. They sort by perturbation first and print as 'cell type|batch|perturbation'."""

    perturbation: str
    cell_type: str
    batch: str

    @property
    def group(self) -> Group:
        """Cell type and batch."""
        return self.cell_type, self.batch

    def __str__(self) -> str:
        return f"{self.cell_type}|{self.batch}|{self.perturbation}"


LABELS: tuple[str, ...] = Condition._fields
"""Names of the three labels. They are columns of every table of conditions."""


def conditions_of(table: Any) -> list[Condition]:
    """Return the condition of each row of a table with the columns `LABELS`, in the order of the rows."""
    return [Condition(*labels) for labels in zip(*(table[name].astype(str) for name in LABELS), strict=True)]
