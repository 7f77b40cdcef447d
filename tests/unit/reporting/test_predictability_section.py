"""What the report says of a calibrated data set beyond its first screen."""

import json

import pytest
from report_runs import make_run

from perturbdiff.reporting.figures.svg import looks
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.sections.chapter_data import subject
from perturbdiff.reporting.sections.reference_sections import predictability
from perturbdiff.reporting.sections.score_sections import score_tables

KNOWN = {
    "units": 15,
    "above_noise": 3,
    "quartiles": {"replicate_cosine": [-0.01, 0.25, 0.5], "signal_to_noise": [None, "x", None], "other": 3},
    "best": {"PDCorr": {"reference": "technical_duplicate", "score": 0.21}, "energy_distance": 7},
}
VERDICTS = {"PDCorr": ("weak", "so it is"), "energy_distance": ("keep", "so it is too")}


@pytest.fixture
def about(tmp_path):
    """Return the chapter's data of two methods, with a function that writes what a calibration said of them."""
    made = [make_run(tmp_path / m, m, shown=1, cells=4) for m in ("perturbdiff", "linear")]

    def build(**known):
        path = made[0] / "summary.json"
        metrics = {name: {"verdict": verdict, "reason": why} for name, (verdict, why) in VERDICTS.items()}
        calibration = {"metrics": metrics, **known}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"calibration": calibration}))
        found = read_runs(made)
        return subject("d1", found, looks([run.method for run in found], []), None)

    return build


def test_a_calibrated_data_set_says_how_predictable_it_is(about):
    section = predictability(about(predictability=KNOWN))
    assert section.folded
    assert "3 of 15 perturbations have more signal than noise" in section.intro
    effects, metrics = section.tables
    assert [[cell.text for cell in row.cells] for row in effects.rows] == [["−0.01", "0.25", "0.50"]]
    rows = {row.head: [cell.text for cell in row.cells] for row in metrics.rows}
    assert rows["PDCorr"] == ["0.21", "the other half of the cells", "weak", "so it is"]
    assert rows["Energy distance"] == ["n/a", "", "keep", "so it is too"]


@pytest.mark.parametrize("known", [{}, {"predictability": "none"}])
def test_without_a_calibration_the_section_is_empty(about, known):
    assert not predictability(about(**known)).filled


def test_scores_of_metrics_that_cannot_tell_are_grey_and_carry_the_reason(about):
    tables = score_tables(about(predictability=KNOWN)).shown
    cells = {
        head.split("\u00a0")[0]: [row.cells[place] for row in table.rows]
        for table in tables
        for place, head in enumerate(table.columns[1:])
    }
    assert all(cell.kind.endswith("faint") for cell in cells["PDCorr"])
    assert {cell.hint for cell in cells["PDCorr"]} == {"weak on these data: so it is"}
    assert not any("faint" in cell.kind for cell in cells["Energy distance"])
    assert any("best" in cell.kind for cell in cells["Energy distance"])
