"""What the report says of sets of cells, where it is known which cells were a set."""

from report_runs import make_run

from perturbdiff.reporting.figures.svg import looks
from perturbdiff.reporting.loading.metric_columns import further_columns
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.sections.cell_sections import set_scores
from perturbdiff.reporting.sections.chapter_data import subject


def about(tmp_path, *, sets):
    made = [make_run(tmp_path / m, m, shown=2, cells=6, sets=sets) for m in ("perturbdiff", "linear")]
    found = read_runs(made)
    return subject("d1", found, looks([run.method for run in found], []), None)


def test_true_and_sampled_sets_are_points_and_scores_a_table(tmp_path):
    chapter = about(tmp_path, sets=True)
    section = set_scores(chapter)
    (plot, _), (table,) = section.figures[0], section.tables
    assert len(plot.data) == 2 * 2 * 6
    named = {plot.points.names[i]: plot.points.methods[i] for i in range(len(plot.points.x))}
    assert named == {"true set": "", "sampled set": "perturbdiff"}
    assert [row.head for row in table.rows] == ["perturbdiff", "linear"]
    heads = " ".join(table.columns)
    assert "Variance between sets" in heads
    assert "Energy score of sets" in heads
    assert not [c for c in further_columns(chapter.every) if c.family == "sets"]


def test_the_section_is_empty_where_sets_are_unknown(tmp_path):
    section = set_scores(about(tmp_path, sets=False))
    assert not section.filled
    assert not section.intro
