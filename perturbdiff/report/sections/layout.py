"""How a chapter of the page is laid out: sections of figures and tables that one template renders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from perturbdiff.report.figures.page_tables import Table
from perturbdiff.report.figures.svg import Plot


@dataclass
class Section:
    """A heading with what stands below it, in this order: intro, links, legend, figures, tables, note, parts.

    Attributes
    ----------
    title, anchor
        Heading and the id that links lead to; the anchor starts with the chapter's.
    intro, note
        Sentences above and below.
    links
        Pairs of words and an anchor elsewhere on the page.
    legend
        Pairs of a colour of the figures and what it stands for.
    figures
        Figures with their captions.
    tables
        Tables; a title of theirs stands above each.
    folded
        Whether the section is closed until the reader opens it.
    small
        Whether the figures stand in narrow columns.
    parts
        Sections within this one.
    """

    title: str
    anchor: str
    intro: str = ""
    links: list[tuple[str, str]] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    figures: list[tuple[Plot, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    note: str = ""
    folded: bool = False
    small: bool = False
    parts: list[Section] = field(default_factory=list)

    @property
    def filled(self) -> bool:
        """Return whether there is anything to show."""
        return bool(self.figures or self.tables or any(part.filled for part in self.parts))


def drawn(sections: Sequence[Section]) -> Iterator[Plot]:
    """Yield the figures of sections and of the sections within them, in the order of the page."""
    for section in sections:
        yield from (plot for plot, _ in section.figures)
        yield from drawn(section.parts)
