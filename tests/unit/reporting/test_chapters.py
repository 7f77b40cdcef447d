"""What a chapter says of runs that cannot be compared as they are."""

import pytest
from report_runs import make_run

from perturbdiff.reporting.figures.svg import looks
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.sections.chapters import chapter

NOTE = "their energy distances are too low beside the others'"


@pytest.mark.parametrize(("ours", "said"), [("balanced", False), ("shuffled", True), (None, False)])
def test_differently_chosen_control_cells_are_told(tmp_path, ours, said):
    made_by = {"recipe_key": "a"} | ({"controls": ours} if ours else {})
    linear = {"baseline": "linear", "controls": "balanced"}
    make_run(tmp_path / "ours", "perturbdiff", made_by=made_by, perturbations=2, cells=2, shown=1)
    make_run(tmp_path / "linear", "linear", made_by=linear, perturbations=2, cells=2, shown=1)
    runs = read_runs([tmp_path / "ours", tmp_path / "linear"])
    warnings = chapter(1, runs, looks([run.method for run in runs]), None).warnings
    assert any(NOTE in text for text in warnings) == said
    assert not said or any(text.startswith("toy: linear started from balanced") for text in warnings)
