"""Whether the sampled sets of a condition differ from one another as true sets do."""

from __future__ import annotations

from dataclasses import replace

from perturbdiff.reporting.figures import page_tables, set_plots
from perturbdiff.reporting.loading.metric_columns import set_columns
from perturbdiff.reporting.sections.chapter_data import ChapterData, Section

_INTRO = (
    "Real cells come in sets: wells, guides or donors. Sets of one condition differ because of what nobody recorded. A "
    "good method samples sets that differ just as much and in the same way."
)
_PICTURE = (
    "A point is a set of cells. Sampled sets should cover the true ones and go no farther. A tight heap in the middle: "
    "the method draws every set from the same distribution. Units are roots of energy distances."
)
_NOTE = (
    "Variance between sets is best at 1: at 0 sets are mere draws of cells. Range, recall and precision of a perfect "
    "method are near .9 with many sets, and the ceiling, half of the true sets against the other half, shows what can "
    "be reached here. The energy score counts the middle and the spread together. It is above 0 even for true sets."
)


def set_scores(subject: ChapterData) -> Section:
    """Return the section; it is empty where it is not known which cells were a set."""
    section = Section("Do sampled sets differ as true sets do?", f"{subject.anchor}-sets", "Sets")
    columns = set_columns(subject.every)
    if not columns:
        return section
    section.intro = _INTRO
    focus = subject.focus
    table = focus.table("sets")
    if table is not None and len(table):
        title = f"True and sampled sets on {subject.name}: {focus.method}"
        name = f"{subject.anchor}-sets"
        plot = set_plots.places(name, title, table, focus.method, subject.look[focus.method])
        section.figures.append((plot, _PICTURE))
    scores = page_tables.scores(subject.runs, columns, subject.look, absent=subject.absent)
    section.tables = [replace(scores, title="Scores of sets", name=f"{scores.name}-sets", note=_NOTE)]
    return section
