"""The known attacks as counts, by the rules of cell-eval2: none reaches the mean response, which anybody can hand in.

Single metrics are lifted (sets of DE genes by whatever makes many genes DE), their mean is not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from counted_pair import CONTROL, PERTURBATIONS, counted_side, write_pair

from perturbdiff.adversaries.adversary_stage import adversaries
from perturbdiff.adversaries.attacks import ATTACKS
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.cell_eval2.metrics import SCORED
from perturbdiff.evaluation.cell_eval2.scores import SCORE
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.predictions import read_predictions

CONFIG = EvaluateConfig(definition="cell-eval2", perturbation_key="target", bootstrap=50)
REFUSED = {"rows-left-out": "cell-eval2 scores all of them", "own-controls": "--predicted-controls"}


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Path:
    """The output folder of all attacks, beside the pair of files."""
    folder = tmp_path_factory.mktemp("attacks")
    _, truth = write_pair(folder)
    adversaries(truth, folder / "out", CONFIG, threads=1)
    return folder / "out"


@pytest.fixture(scope="module")
def gained(tried) -> pd.DataFrame:
    return pd.read_csv(tried / "table" / "gains.csv").set_index(["attack", "metric"])


def test_no_attack_reaches_the_mean_response(tried, gained):
    of_all = gained.xs(SCORE, level="metric")
    assert set(of_all.index) == set(ATTACKS) - set(REFUSED)
    assert (of_all["attacked"] < 0).all(), of_all["attacked"].to_dict()
    assert of_all["default"].all()
    assert not of_all["beats"].any()
    said = (tried / "table" / "adversaries.txt").read_text()
    assert "default score on these data: score; none is beaten by more than the mean response.\n" in said
    assert said.endswith(f"0 of {len(ATTACKS)} attacks are called good.\n")


def test_a_prediction_that_knows_something_does(tried):
    ends = tried / "scores" / "control"
    out = tried.parent / "honest"
    evaluate(tried.parent / "predicted.h5ad", tried.parent / "real.h5ad", out, CONFIG, ends=ends, threads=1)
    assert pd.read_csv(out / "aggregate.csv").set_index("metric")["scaled"][SCORE] > 0.1


def test_what_the_rules_do_not_allow_is_refused(tried):
    judged = pd.read_csv(tried / "table" / "adversaries.csv").set_index("attack")
    refused = judged.loc[judged["level"] == "refused", "verdict"]
    assert set(refused.index) == set(REFUSED)
    assert all(reason in refused[name] for name, reason in REFUSED.items())


@pytest.mark.parametrize("name", ["pds_cosine", "expr_mse_unbiased_capped_norm", "de_wilcoxon_lfc_nmae"])
def test_errors_and_discrimination_are_not_lifted(gained, name):
    assert name in SCORED
    reached = gained.xs(name, level="metric")["attacked"]
    assert (reached <= 0).all(), reached.to_dict()


def test_single_metrics_of_de_sets_are_lifted(gained):
    """Why their mean with the others is the score: spiked controls share many called genes with the real cells."""
    lifted = gained.loc[("panel-spikes", "de_wilcoxon_sig_jaccard")]
    assert lifted["attacked"] > 0.3
    assert lifted["beats"]


def test_attacks_are_handed_in_as_counts_at_the_depths_of_real_cells(tried):
    real = counted_side(0)
    labels, counts = real.obs["target"].to_numpy(), real.X.toarray()
    name = PERTURBATIONS[0]
    handed = {}
    for attack in ("permuted-labels", "control-copies", "clipped"):
        cells = read_predictions(tried / "predictions" / f"{attack}.h5ad")
        assert cells.uns["perturbdiff"]["scale"] == "counts"
        chosen = (cells.obs["perturbation"] == name) & (cells.obs["source"] == "predicted")
        handed[attack] = cells.X[chosen.to_numpy()].toarray()
        assert (handed[attack] == np.rint(handed[attack])).all()
        assert np.allclose(cells.obs["n_counts"], np.asarray(cells.X.sum(axis=1)).ravel())
    for attack, among in (
        ("permuted-labels", (labels != name) & (labels != CONTROL)),
        ("control-copies", labels == CONTROL),
    ):
        pool = {tuple(row) for row in counts[among]}
        assert {tuple(row) for row in handed[attack]} <= pool  # unchanged cells keep their counts
    pool = counts[(labels != name) & (labels != CONTROL)]
    ratio = handed["clipped"].sum(axis=1).mean() / pool.sum(axis=1).mean()
    assert 0.4 < ratio < 1.0  # less 0.3 of each value's logarithm, at the same depth
