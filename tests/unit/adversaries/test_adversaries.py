"""Known attacks on a small simulated screen: none is called good, and no key metric is beaten by more than chance."""

from __future__ import annotations

import json
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.spatial.distance import cdist

from perturbdiff.adversaries.adversary_stage import adversaries
from perturbdiff.adversaries.attacks import ATTACKS, HONEST
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.ceiling_stage import CEILING
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.predictions import read_predictions
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.overview import verdict_of
from perturbdiff.reporting.sections.verdict import Verdict

GENES = [f"g{i}" for i in range(60)]
PERTURBATIONS = [
    f"g{i}" for i in range(8)
]  # each knocks the gene of its name down, and changes genes of its own
QUICK = EvaluateConfig(control="control", scale="counts", bootstrap=300, embed_conditions=0, ceiling_splits=1)


def screen(seed: int, *, drawn: int = 40) -> ad.AnnData:
    """Counts of 8 knock-downs in one context, all from the same effects; ``seed`` draws the cells."""
    fixed, rng = np.random.default_rng(7), np.random.default_rng(seed)
    means = np.exp(fixed.normal(0.5, 1.0, len(GENES)))
    shared = np.exp(np.where(fixed.random(len(GENES)) < 0.2, fixed.normal(0.0, 0.8, len(GENES)), 0.0))
    blocks, labels = [], []
    for k, name in enumerate(("control", *PERTURBATIONS)):
        mean = means.copy()
        if name != "control":
            own = np.where(fixed.random(len(GENES)) < 0.25, fixed.normal(0.0, 1.2, len(GENES)), 0.0)
            mean = mean * shared * np.exp(own)
            mean[GENES.index(name)] *= 0.1
        cells = 3 * drawn if name == "control" else drawn + k
        depth = np.exp(rng.normal(0.0, 0.3, cells))[:, None]
        blocks.append(rng.poisson(mean * depth))
        labels += [name] * cells
    obs = pd.DataFrame({"perturbation": labels}, index=[f"c{i}" for i in range(len(labels))])
    return ad.AnnData(sp.csr_matrix(np.vstack(blocks).astype(np.float32)), obs, pd.DataFrame(index=GENES))


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Path:
    """The output folder of all attacks on one screen."""
    folder = tmp_path_factory.mktemp("adversaries")
    screen(0).write_h5ad(folder / "real.h5ad")
    adversaries(folder / "real.h5ad", folder / "out", QUICK, threads=1)
    return folder / "out"


def table(out: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(out / "table" / f"{name}.csv", keep_default_na=False, na_values=[""])


def summary(out: Path, name: str) -> dict:
    return json.loads((out / "scores" / name / "summary.json").read_text())


def kinds(out: Path, name: str) -> set[str]:
    return {finding["kind"] for finding in summary(out, name)["findings"]}


SUSPICIOUS = {"no_spread", "repeated", "zeros", "too_many_de", "scale"}
KEY = ("energy_distance", "PDCorr", "PDS_cos", "PDS_L1", "DEOver_10", "DEOver", "AUPRC", "DirAgr")


def test_no_attack_is_called_good(tried):
    judged = table(tried, "adversaries").set_index("attack")
    assert list(judged.index) == list(ATTACKS)
    assert not (judged["level"] == "good").any(), judged["verdict"].to_dict()
    text = (tried / "table" / "adversaries.txt").read_text()
    assert text.endswith(f"0 of {len(ATTACKS)} attacks are called good.\n")


def judged_beside_honest(tried: Path, handed: ad.AnnData, folder: Path) -> tuple[Verdict, set[str]]:
    """Return the verdict on predictions, and the kinds of findings on them."""
    handed.write_h5ad(folder / "handed.h5ad")
    config = QUICK.model_copy(update={"missing": "skip"})
    evaluate(folder / "handed.h5ad", tried.parent / "real.h5ad", folder / "handed", config, threads=1)
    runs = read_runs([folder / "handed", *(tried / "scores" / name for name in (*HONEST, CEILING))])
    about = ChapterData("handed", runs, {}, runs[0], None)
    assert about.focus.method == "handed"
    return verdict_of(about), {f["kind"] for f in about.focus.findings}


def test_an_experiment_done_again_is_called_good(tried, tmp_path):
    again = screen(1)
    again = again[(again.obs["perturbation"] != "control").to_numpy()].copy()
    verdict, found = judged_beside_honest(tried, again, tmp_path)
    assert verdict.level == "good", verdict
    assert not found & SUSPICIOUS


def test_no_method_is_called_good_on_conditions_of_its_choice(tried, tmp_path):
    again = screen(1)
    chosen = again[again.obs["perturbation"].isin(PERTURBATIONS[:6]).to_numpy()].copy()
    verdict, _ = judged_beside_honest(tried, chosen, tmp_path)
    assert verdict.level == "unknown"
    assert verdict.title == ("Cannot be judged: 2 of the 8 conditions that others are scored on are left out")


def test_no_metric_of_the_default_score_is_beaten_by_more_than_chance(tried):
    """The calibration of these very cells says which metrics count for a verdict."""
    gained = table(tried, "gains")
    default = summary(tried, "noise")["calibration"]["default"]
    assert {"PDCorr", "PDS_cos"} <= set(default)
    assert set(gained.loc[gained["default"], "metric"]) == set(default)
    key = gained[gained["metric"].isin({*KEY, *default})]
    assert set(key["attack"]) == set(ATTACKS)
    assert not key["beats"].any(), key[key["beats"]].to_string()
    said = (tried / "table" / "adversaries.txt").read_text()
    assert f"default score on these data: {', '.join(default)}; none is beaten by more than chance." in said


def test_controls_of_their_own_are_used_where_an_attack_hands_them_in(tried):
    own = [name for name in ATTACKS if summary(tried, name)["controls"] == "own"]
    assert own == ["own-controls"]
    gained = table(tried, "gains").set_index(["attack", "metric"])
    assert gained.loc[("own-controls", "DE_recall"), "gain"] > 0  # it does something


def test_some_metrics_rise_and_so_does_their_chance(tried):
    gained = table(tried, "gains").set_index(["attack", "metric"])
    row = gained.loc[("log1p-twice", "DE_recall")]
    assert row["gains"]
    assert row["low"] > 0
    assert row["over_chance"] != "better"


@pytest.mark.parametrize(
    ("attack", "kind"),
    [
        ("mean-profile", "no_spread"),
        ("repeated-cells", "repeated"),
        ("noise", "zeros"),
        ("all-genes-de", "too_many_de"),
        ("scaled-values", "scale"),
        ("log1p-twice", "scale"),
        ("clipped", "scale"),
        ("own-controls", "controls"),
        ("few-cells", "few_cells"),
        ("rows-left-out", "missing"),
        ("best-known", "collapse"),
    ],
)
def test_what_an_attack_does_is_found(tried, attack, kind):
    assert kind in kinds(tried, attack)


@pytest.mark.parametrize("name", [*HONEST, CEILING])
def test_honest_cells_are_not_suspicious(tried, name):
    assert not kinds(tried, name) & SUSPICIOUS


def test_attacks_know_no_cell_of_the_condition_that_they_predict(tried):
    real = ad.read_h5ad(tried.parent / "real.h5ad")
    for name in ("permuted-labels", "best-known", "perturbed_mean", "rows-left-out"):
        predicted = read_predictions(tried / "predictions" / f"{name}.h5ad")
        predicted = predicted[(predicted.obs["source"] == "predicted").to_numpy()]
        for label in predicted.obs["perturbation"].unique():
            handed = _shares(predicted.X[(predicted.obs["perturbation"] == label).to_numpy()].expm1())
            of = real.obs["perturbation"].astype(str).to_numpy()
            own, others = of == label, np.isin(of, PERTURBATIONS) & (of != label)
            assert cdist(handed, _shares(real.X[own])).min() > 1e-3, (name, label)
            assert cdist(handed, _shares(real.X[others])).min(axis=1).max() < 1e-5


def _shares(cells) -> np.ndarray:
    """Return the genes' shares of each cell, which scaling does not change."""
    dense = cells.toarray().astype(np.float64)
    return dense / dense.sum(axis=1, keepdims=True)


def test_what_is_finished_is_left(tried):
    files = sorted(p for p in tried.rglob("*") if p.is_file())
    before = {p: p.stat().st_mtime_ns for p in files}
    adversaries(tried.parent / "real.h5ad", tried, QUICK, threads=1)
    assert {p: p.stat().st_mtime_ns for p in files} == before


def test_one_perturbed_condition_cannot_be_attacked(tmp_path, run_cli):
    cells = screen(0)
    cells[cells.obs["perturbation"].isin(["control", "g1"])].copy().write_h5ad(tmp_path / "one.h5ad")
    line = ("adversaries", tmp_path / "one.h5ad", "--out", tmp_path / "out")
    found = run_cli(
        *line, "--control", "control", "--scale", "counts", "--set", "evaluate.embed_conditions=0"
    )
    assert found.code == 2
    assert "all|all|g1 is the only perturbed condition" in found.err
    assert "error: --shard: adversaries has no parts" in run_cli(*line, "--shard", "0/2").err
