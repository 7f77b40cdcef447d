"""Sections on differential expression: who finds the genes, how many, and the strongest ones by name."""

from __future__ import annotations

from perturbdiff.report.figures import gene_plots
from perturbdiff.report.figures.gene_plots import MOST_PANELS
from perturbdiff.report.figures.gene_tables import gene_table
from perturbdiff.report.figures.score_plots import MOST_METHODS
from perturbdiff.report.figures.svg import Plot
from perturbdiff.report.sections.chapter_data import ChapterData
from perturbdiff.report.sections.layout import Section

TRUTH = "real cells (truth)"


def genes(subject: ChapterData) -> Section:
    """Return the section on differentially expressed genes."""
    found = Section("Differentially expressed genes", f"{subject.anchor}-genes")
    shown = [r for r in subject.panels(len(subject.runs)) if r.method in subject.effects]
    if shown:
        found.figures += _pooled(subject, [r.method for r in shown])
    found.parts = [part for part in (_by_name(subject), _tables(subject)) if part.filled]
    return found


def _pooled(subject: ChapterData, methods: list[str]) -> list[tuple[Plot, str]]:
    known = subject.effects
    found = []
    groups = {TRUTH: known[methods[0]].truth, **{m: known[m].predicted for m in methods}}
    if groups[TRUTH].true.sum():
        title = f"Adjusted p of true DE genes and other genes on {subject.name}"
        plot = gene_plots.separations(f"{subject.anchor}-separation", title, groups, subject.focus.alpha)
        found.append((plot, _SEPARATION + _left(len(groups), MOST_METHODS + 1, "rows")))
    tables_ = {m: known[m].table for m in methods}
    plot = gene_plots.sizes(
        f"{subject.anchor}-de-counts",
        f"Numbers of DE genes on {subject.name}",
        tables_,
        ("de_real", "de_predicted"),
        ("DE genes, real cells", "DE genes, predicted"),
        subject.look,
    )
    found.append((plot, _COUNTS + _left(len(methods), MOST_PANELS, "panels")))
    return found


_SEPARATION = (
    "Pooled over perturbations; genes are split by the real test. A good method follows the first row: true DE genes "
    "(orange, above the line) to the right of the dashed threshold, all others (blue, below) to its left. Blue to the "
    "right of it: genes called without a reason, as by a method with too little spread between cells. The number is "
    "the probability that a true DE gene has the smaller p (0.5: no better than a coin)."
)
_COUNTS = (
    "A dot is a perturbation: its number of DE genes in real cells and as predicted. On the dashed line strong and "
    "weak perturbations are told apart rightly; a flat row of dots means that the method gives all the same strength. "
    "ES is the rank correlation of this picture."
)


def _left(total: int, shown: int, what: str) -> str:
    return f" The first {shown} of {total} {what}; the CSV holds all." if total > shown else ""


def _by_name(subject: ChapterData) -> Section:
    """Return the figures of the strongest genes of the perturbations that change most."""
    methods = [r.method for r in (subject.focus, subject.other) if r is not None]
    found = Section("The strongest genes", f"{subject.anchor}-top-genes", intro=_TOP, small=True)
    for i, table in enumerate(subject.genes):
        shown = [m for m in methods if m in table]
        name = f"{subject.anchor}-genes-{i}"
        plot = gene_plots.paired_dots(name, table, shown, subject.focus.alpha, subject.look)
        found.figures.append((plot, ""))
    return found


_TOP = (
    "The strongest truly changed genes of the perturbations that change most. The bar is the truth; a method is right "
    "where its mark lies on it. An open mark: the method does not call the gene DE. ±4.32 is the limit (20-fold) that "
    "the default definition sets where a mean is zero."
)


def _tables(subject: ChapterData) -> Section:
    focus = subject.focus
    prefix = f"{subject.anchor}-genes"
    listed = [
        gene_table(table, focus.method, focus.alpha, f"{prefix}-{i}") for i, table in enumerate(subject.genes)
    ]
    intro = f"As {focus.method} predicts them. Bars share one scale within a table."
    anchor = f"{subject.anchor}-gene-tables"
    return Section("The strongest genes in numbers", anchor, intro=intro, tables=listed, folded=True)
