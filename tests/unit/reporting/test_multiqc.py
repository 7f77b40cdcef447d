"""The files for MultiQC hold what its custom content needs, and nothing that JSON cannot hold."""

import json

import pytest
from report_runs import make_run

from perturbdiff.reporting.page.page import write_report


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multiqc")
    runs = [make_run(folder / m, m, shown=1, cells=5) for m in ("perturbdiff", "linear", "ceiling")]
    runs.append(make_run(folder / "b", "perturbdiff", dataset="b", perturbations=1))
    for run in runs:
        for name in ("embedding", "de_real", "de_pred"):
            (run / f"{name}.parquet").unlink()
    write_report(runs, folder / "report.html")
    return folder / "report_mqc"


def read(folder, name):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / f"perturbdiff_{name}_mqc.json").read_text(), parse_constant=refuse)


def test_files_and_their_kinds(written):
    kinds = {path.name: json.loads(path.read_text())["plot_type"] for path in written.iterdir()}
    assert kinds == {
        "perturbdiff_scores_mqc.json": "table",
        "perturbdiff_general_mqc.json": "generalstats",
        "perturbdiff_energy_distance_mqc.json": "box",
    }
    ids = [json.loads(path.read_text())["id"] for path in written.iterdir()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["scores", "general"])
def test_tables_hold_numbers_under_their_headers(written, name):
    found = read(written, name)
    assert set(found["data"]) == {"toy | perturbdiff", "toy | linear", "toy | ceiling", "b | perturbdiff"}
    for values in found["data"].values():
        assert set(values) <= set(found["headers"])
        assert all(isinstance(v, float) for v in values.values())
    for header in found["headers"].values():
        assert header["title"]
        assert header["scale"] is False or isinstance(header["scale"], str)
    names = [n.removeprefix("perturbdiff_") for n in found["headers"]]
    assert {"PDCorr", "energy_distance"} <= set(names)
    undefined = "perturbdiff_PDS_cos" if name == "general" else "PDS_cos"
    assert undefined not in found["data"]["b | perturbdiff"]  # a single perturbation


def test_scores_carry_the_verdict(written):
    assert "toy: perturbdiff: " in read(written, "scores")["description"]


def test_boxes_hold_a_value_per_condition(written):
    found = read(written, "energy_distance")
    assert len(found["data"]["toy | linear"]) == 10
    assert found["data"]["toy | linear"] == sorted(found["data"]["toy | linear"])
