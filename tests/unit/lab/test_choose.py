"""The recipe is chosen by validation conditions: the rule, and that nothing else is opened."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from perturbdiff.runtime.errors import UserError

HEADER = "dataset,method,part,collection,arm,level,seed,init\n"


@pytest.fixture
def choose() -> ModuleType:
    return importlib.import_module("choose")


class Results:
    """An output folder of the workflow, with scores typed in."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, HEADER
        (path / "pipeline_info").mkdir(parents=True)

    def add(
        self, arm: str, energy: float, pdcorr: float, over: float = 0.5, *, dataset="d", seed=0,
        collection="c", part="valid", baseline="", realism=1.0, level="",
    ) -> None:  # fmt: skip
        method = baseline or f"{arm}{level}-{seed}"
        folder = self.path / "metrics" / f"{dataset}-{part}.{method}.metrics"
        folder.mkdir(parents=True)
        made_by = {"baseline": baseline} if baseline else {"recipe_key": arm}
        facts = {"dataset": f"{dataset}-{part}", "method": method, "made_by": made_by}
        (folder / "summary.json").write_text(json.dumps(facts))
        cells = {
            "energy_distance": [energy - 0.1, energy + 0.1],
            "nonzero_ratio": realism,
            "gene_sd_ratio": 1.0,
        }
        pd.DataFrame(cells).to_csv(folder / "conditions.csv", index=False)
        pooled = {"PDCorr": pdcorr, "DEOver_10": over, "energy_distance": 99.0}
        rows = [{"scope_kind": "pooled", "metric": name, "nanmean": value} for name, value in pooled.items()]
        pd.DataFrame(rows).to_csv(folder / "aggregate.csv", index=False)
        self.lines += f"{dataset}-{part},{method},{part},{collection},{arm},{level},{seed},\n"
        (self.path / "pipeline_info" / "design.csv").write_text(self.lines)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path / "results")
    made.add("control", 1.2, 0.0, 0.0, baseline="control")
    return made


def ordered(choose: ModuleType, results: Results) -> pd.DataFrame:
    return choose.order(choose.arms(choose.runs(results.path)), "reference")[0]


def test_the_rule(choose: ModuleType, results: Results) -> None:
    results.add("linear", 0.5, 0.80, 0.4, baseline="linear")
    results.add("reference", 0.6, 0.80)  # farther than the baseline
    results.add("near", 0.3, 0.781)  # within the slack of PDCorr
    results.add("nearest", 0.2, 0.779)  # not within
    results.add("other", 0.3, 0.9, realism=1.2)
    results.add("few genes", 0.1, 0.9, 0.39)
    found = ordered(choose, results)
    assert list(found["arm"]) == ["near", "few genes", "nearest", "other", "reference"]
    assert list(found["missed"]) == [0, 1, 1, 1, 1]
    assert found["which"][1] == "c: DEOver_10"
    assert found["which"][3] == "c: nonzero_ratio"
    assert found["ED share"][0] == pytest.approx(0.25)


def test_means_are_over_data_sets_then_seeds(choose: ModuleType, results: Results) -> None:
    for seed, energy in ((0, 0.2), (1, 0.6)):
        results.add("reference", energy, 0.5, dataset="a", seed=seed)
        results.add("reference", energy + 0.2, 0.5, dataset="b", seed=seed)
    table = choose.arms(choose.runs(results.path))
    assert table.loc[~table["baseline"], "energy_distance"].tolist() == pytest.approx([0.5])


def test_levels_are_apart(choose: ModuleType, results: Results) -> None:
    results.add("reference", 0.6, 0.8)
    results.add("w", 0.5, 0.8, level="0.5")
    results.add("w", 0.4, 0.8, level="1.0")
    assert ordered(choose, results)["arm"].tolist() == ["w, 1.0", "w, 0.5", "reference"]


def test_scores_of_test_conditions_are_not_opened(choose: ModuleType, results: Results) -> None:
    results.add("reference", 0.6, 0.8)
    results.add("reference", 0.1, 0.9, part="test")
    for path in (results.path / "metrics").glob("*-test.*/*.csv"):
        path.write_text("not to be read")
    assert ordered(choose, results)["ED share"].tolist() == pytest.approx([0.5])


def test_arms_without_all_collections_are_apart(choose: ModuleType, results: Results) -> None:
    results.add("reference", 0.6, 0.8)
    results.add("reference", 0.6, 0.8, dataset="e", collection="second")
    results.add("screened only", 0.1, 0.9)
    with pytest.raises(UserError, match="no scores of the baseline 'control' on second"):
        ordered(choose, results)
    results.add("control", 1.2, 0.0, 0.0, dataset="e", collection="second", baseline="control")
    found, partial = choose.order(choose.arms(choose.runs(results.path)), "reference")
    assert list(found["arm"]) == ["reference"]
    assert partial == ["screened only"]


def test_several_folders_count_as_one(choose: ModuleType, results: Results, tmp_path: Path) -> None:
    other = Results(tmp_path / "other")
    for folder, collection, gain in ((results, "c", -0.1), (other, "far", 0.5)):
        folder.add("reference", 1.0, 0.5, collection=collection)
        folder.add("new", 1.0 + gain, 0.5, collection=collection)
    other.add("control", 2.0, 0.0, collection="far", baseline="control")
    assert ordered(choose, results)["arm"].tolist() == ["new", "reference"]
    both = choose.order(choose.arms(choose.gathered([results.path, other.path])), "reference")[0]
    assert both["arm"].tolist() == ["reference", "new"]
    with pytest.raises(UserError, match="collection 'c' is in .*results and in .*again"):
        shutil.copytree(results.path, tmp_path / "again")
        choose.gathered([results.path, tmp_path / "again"])


def test_mistakes_are_told(
    choose: ModuleType, results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="no design"):
        choose.main([str(tmp_path)])
    tested = Results(tmp_path / "tested")
    tested.add("reference", 0.6, 0.8, part="test")
    with pytest.raises(SystemExit, match="no run of part 'valid'"):
        choose.main([str(tested.path)])
    results.add("a", 0.6, 0.8)
    with pytest.raises(SystemExit, match="no arm 'recommended'"):
        choose.main([str(results.path)])
    choose.main([str(results.path), "--reference", "a", "--top", "1"])
    assert "ED share" in capsys.readouterr().out
    shutil.rmtree(results.path / "metrics")
    with pytest.raises(SystemExit, match="no validation run has scores yet"):
        choose.main([str(results.path)])
