"""Tables of experiments get into a document between its marks, and only there."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ARMS = """\
collection,part,arm,level,metric,mean,sd,low,high,datasets,conditions,seeds,reference,difference,difference_low,difference_high
kang,test,ours,,energy_distance,0.51234,0.1,0.4,0.6,5,10,3,ours,,,
kang,test,linear,,energy_distance,0.75,,0.7,0.8,5,10,1,ours,0.24,0.1,0.3
kang,test,ours,,PDCorr,-0.8,0.01,-0.9,,5,10,3,ours,,,
kang,test,linear,,PDCorr,,,,,5,10,1,ours,,,
kang,valid,ours,,PDCorr,0.5,,,,5,10,1,ours,,,
few,test,ours,1,PDCorr,0.1,,,,5,10,1,ours,,,
few,test,ours,20,PDCorr,0.2,,,,5,10,1,ours,,,
few,test,linear,20,PDCorr,0.3,,,,5,10,1,ours,,,
"""
DOCUMENT = """\
# Results

<!-- table small collection=kang metrics=energy_distance,PDCorr -->

| old |
|---|
<!-- end -->

Text stays.
<!-- table other collection=x metrics=R2 -->
| kept |
<!-- end -->
"""


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "small" / "report_tables"
    folder.mkdir(parents=True)
    (folder / "arms.csv").write_text(ARMS)
    return tmp_path / "results"


def test_tables_are_made_anew_between_marks(tables: ModuleType, results: Path) -> None:
    found, missing = tables.rewrite(DOCUMENT, results)
    assert missing == ["other"]
    assert found == DOCUMENT.replace(
        "\n| old |\n|---|\n",
        """
|  | energy distance ↓ | PDCorr ↑ |
| --- | --- | --- |
| ours | 0.512 ± 0.100 [0.400, 0.600] | −0.800 ± 0.010 |
| linear | 0.750 [0.700, 0.800] | n/a |

""",
    )
    assert tables.rewrite(found, results)[0] == found


def test_arms_can_be_chosen_and_compared(tables: ModuleType, results: Path) -> None:
    mark = "<!-- table small collection=kang metrics=energy_distance arms=linear difference=yes -->\n<!-- end -->\n"
    found, _ = tables.rewrite(mark, results)
    assert "| linear | 0.240 [0.100, 0.300] |" in found
    assert "ours" not in found


@pytest.mark.parametrize(
    ("arms", "rows"),
    [
        ("", ["ours, 1", "ours, 20", "linear, 20"]),
        (" arms=ours", ["ours, 1", "ours, 20"]),
        (" arms=ours, 20|linear", ["ours, 20", "linear, 20"]),
    ],
)
def test_levels_have_rows_of_their_own(tables: ModuleType, results: Path, arms: str, rows: list[str]) -> None:
    found, _ = tables.rewrite(
        f"<!-- table small collection=few metrics=PDCorr{arms} -->\n<!-- end -->\n", results
    )
    assert [line.split(" | ")[0][2:] for line in found.splitlines() if line.startswith("| ")][2:] == rows


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (
            "<!-- table small collection=kang metrics=R2 -->",
            "no metric R2; there are PDCorr, energy_distance",
        ),
        (
            "<!-- table small collection=kong metrics=R2 -->",
            r"no kong \(test\); there are few \(test\), kang \(test\)",
        ),
        ("<!-- table small collection=kang metrics=PDCorr arms=a b -->", "no arm a b"),
        ("<!-- table small metrics=R2 -->", "without collection"),
        ("<!-- table small collection=a metrics=R2 colour=red -->", "unknown colour"),
        ("<!-- table -->", "not a mark"),
    ],
)
def test_mistakes_in_marks_are_told(tables: ModuleType, results: Path, mark: str, message: str) -> None:
    with pytest.raises(tables.UserError, match=message):
        tables.rewrite(f"{mark}\n<!-- end -->\n", results)


def test_a_mark_without_end_is_told(tables: ModuleType, results: Path) -> None:
    with pytest.raises(tables.UserError, match="has no <!-- end -->"):
        tables.rewrite("<!-- table small collection=kang metrics=PDCorr -->\n| a |\n", results)


def test_the_command(
    tables: ModuleType, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "results.md"
    document.write_text(DOCUMENT)
    with pytest.raises(SystemExit, match="tables differ"):
        tables.main([str(document), "--results", str(results), "--check"])
    assert document.read_text() == DOCUMENT
    tables.main([str(document), "--results", str(results)])
    assert "their tables stay: other" in capsys.readouterr().out
    tables.main([str(document), "--results", str(results), "--check"])


@pytest.mark.parametrize(("page", "fewest"), [("docs/results.md", 3), ("lab/results.md", 6)])
def test_every_table_of_the_results_says_the_command_that_made_it(
    tables: ModuleType, page: str, fewest: int
) -> None:
    text = (ROOT / page).read_text()
    experiment, seen = "", 0
    for line in text.splitlines():
        if mark := tables.Mark.read(line):
            experiment, seen = mark.experiment, seen + 1
            assert (ROOT / "assets" / "experiments" / f"{experiment}.csv").is_file(), line
            assert f"--experiment {experiment} " in text, line
        elif line == tables.END:
            experiment = ""
        elif line.startswith("|"):
            assert experiment, f"a table without a mark: {line}"
    assert seen >= fewest


def rows_of(tables: ModuleType, page: str) -> dict[tuple[str, str, str, str], str]:
    """Return the fields of a page's tables (not of differences) by experiment, collection, arm and column."""
    found, mark, heading = {}, None, []
    for line in (ROOT / page).read_text().splitlines():
        mark = None if line == tables.END else tables.Mark.read(line) or mark
        fields = [field.strip() for field in line.strip("|").split("|")]
        if mark is None or mark.difference or not line.startswith("|") or fields[1] == "---":
            continue
        if not fields[0]:
            heading = fields
            continue
        for column, field in zip(heading[1:], fields[1:], strict=True):
            found[mark.experiment, mark.collection, fields[0], column] = field
    return found


def test_the_summary_of_the_results_has_the_numbers_of_the_lab_notes(tables: ModuleType) -> None:
    summary, notes = (rows_of(tables, page) for page in ("docs/results.md", "lab/results.md"))
    assert len(summary) > 90
    assert {key: notes.get(key) for key in summary} == summary
