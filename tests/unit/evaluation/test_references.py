"""References made of real cells: which rows they are, and that halves share nothing."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from evaluation_pair import pair_side

from perturbdiff.conditions.condition import Condition
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cells_by_condition import Cells
from perturbdiff.evaluation.readers.inputs import open_truth
from perturbdiff.evaluation.references import REFERENCES, pair_reference
from perturbdiff.evaluation.scoring.condition_pass import score_cells
from perturbdiff.runtime.errors import UserError

CONFIG = EvaluateConfig(metrics=("PDCorr", "MSE"), bootstrap=0)


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> Cells:
    path = tmp_path_factory.mktemp("truth") / "real.h5ad"
    adata = pair_side(0, perturbations=("p1", "p2", "p3", "p4"), cells=13)
    changes = np.zeros(adata.shape, np.float32)
    changes[(adata.obs["source"] == "predicted").to_numpy(), 20:] = 1.5  # what all perturbations share
    adata.X = sp.csr_matrix(adata.X + changes)
    adata.write_h5ad(path)
    return open_truth(path, CONFIG)


def perturbations_of(truth, rows):
    """Return the perturbation of each row."""
    name = {row: c.perturbation for c, some in truth.rows.items() for row in some}
    return [name.get(row, "control") for row in rows]


@pytest.mark.parametrize("name", REFERENCES)
def test_every_reference_is_judged_by_the_same_cells_and_its_own_half_of_the_controls(truth, name):
    first = pair_reference(truth, truth.rows, "technical_duplicate", seed=3)
    pairing = pair_reference(truth, truth.rows, name, seed=3)
    assert pairing.conditions == sorted(truth.rows)
    for condition in pairing.conditions:
        real, known = pairing.real.rows[condition], pairing.predicted.rows[condition]
        np.testing.assert_array_equal(real, first.real.rows[condition])
        assert (len(real), len(known)) == (7, 6)
        assert len(np.unique(known)) == 6
        assert not set(real) & set(known)
    judged = np.concatenate(list(pairing.real.rows.values()))
    made_of = np.concatenate(list(pairing.predicted.rows.values()))
    assert not set(judged) & set(made_of)  # the mean, too, is of cells that judge nobody
    assert pairing.predicted_controls is not None
    for group, rows in truth.controls.items():
        both = [pairing.controls[group], pairing.predicted_controls[group]]
        assert [len(half) for half in both] == [8, 7]
        np.testing.assert_array_equal(np.sort(np.concatenate(both)), rows)


def test_the_seed_and_the_labels_alone_decide(truth):
    condition = min(truth.rows)
    for name in REFERENCES:
        every, one, other = (
            pair_reference(truth, wanted, name, seed=seed)
            for wanted, seed in ((truth.rows, 5), ([condition], 5), (truth.rows, 6))
        )
        np.testing.assert_array_equal(every.predicted.rows[condition], one.predicted.rows[condition])
        np.testing.assert_array_equal(every.real.rows[condition], one.real.rows[condition])
        assert set(every.real.rows[condition]) != set(other.real.rows[condition])


def test_what_the_cells_of_each_reference_are(truth):
    condition = Condition("p2", "B", "d1")
    rows = {n: pair_reference(truth, truth.rows, n, seed=0).predicted.rows[condition] for n in REFERENCES}
    names = {n: perturbations_of(truth, some) for n, some in rows.items()}
    assert names["technical_duplicate"] == ["p2"] * 6
    assert names["control"] == ["control"] * 6
    assert sorted(names["perturbed_mean"]) == ["p1"] * 2 + ["p3"] * 2 + ["p4"] * 2
    assert sorted(names["interpolated_duplicate"]) == ["p1", "p2", "p2", "p2", "p3", "p4"]
    here = {row for c, some in truth.rows.items() if c.group == condition.group for row in some}
    assert set(rows["perturbed_mean"]) | set(rows["interpolated_duplicate"]) <= here
    assert set(rows["control"]) <= set(truth.controls[condition.group])


def test_a_small_perturbation_leaves_its_share_to_the_others(tmp_path):
    adata = pair_side(0)
    small = np.flatnonzero((adata.obs["perturbation"] == "p1") & (adata.obs["cell_type"] == "B"))
    adata[np.setdiff1d(np.arange(len(adata)), np.concatenate([small[2:12], small[14:]]))].copy().write_h5ad(
        tmp_path / "real.h5ad"
    )
    truth = open_truth(tmp_path / "real.h5ad", CONFIG)
    rows = pair_reference(truth, truth.rows, "perturbed_mean", seed=0).predicted.rows[
        Condition("p2", "B", "d1")
    ]
    assert sorted(perturbations_of(truth, rows)) == ["p1"] + ["p3"] * 5


def test_references_rank_as_they_should(truth):
    """Each knows more than the next, and a metric that works says so."""
    found = {}
    for name in REFERENCES:
        scored = score_cells(pair_reference(truth, truth.rows, name, seed=1), CONFIG, threads=1)
        comparison = next(iter(scored.comparisons.values()))
        found[name] = float(((comparison.real.delta - comparison.predicted.delta) ** 2).mean())
    assert list(found) == sorted(found, key=found.__getitem__)


def test_the_controls_of_both_halves_are_not_shared(tmp_path):
    """Without any effect, changes from the same controls correlate; from controls of their own they do not."""
    adata = pair_side(0, perturbations=tuple(f"q{i}" for i in range(10)), cells=40)
    rng = np.random.default_rng(0)
    adata.X = np.log1p(rng.poisson(1.0, adata.shape)).astype(np.float32)
    adata.write_h5ad(tmp_path / "real.h5ad")
    truth = open_truth(tmp_path / "real.h5ad", CONFIG)
    correlations = {}
    pairing = pair_reference(truth, truth.rows, "technical_duplicate", seed=1)
    for name in ("own", "same"):
        comparisons = score_cells(pairing, CONFIG, threads=1).comparisons
        comparison = comparisons["pooled", "pooled"]
        sides = zip(comparison.real.delta, comparison.predicted.delta, strict=True)
        correlations[name] = np.mean([np.corrcoef(one, other)[0, 1] for one, other in sides])
        pairing.controls, pairing.predicted_controls = truth.controls, None
    assert abs(correlations["own"]) < 0.15
    assert correlations["same"] > 0.3


def test_what_cannot_be_halved_is_told(tmp_path, caplog):
    adata = pair_side(0)
    labels = adata.obs["perturbation"].astype(str) + adata.obs["batch"].astype(str)
    labels += adata.obs["cell_type"].astype(str)
    drop = np.concatenate([np.flatnonzero(labels == which)[1:] for which in ("p1d1B", "controld2T")])
    adata[np.setdiff1d(np.arange(len(adata)), drop)].copy().write_h5ad(tmp_path / "real.h5ad")
    truth = open_truth(tmp_path / "real.h5ad", CONFIG)
    pairing = pair_reference(truth, truth.rows, "perturbed_mean", seed=1)
    assert pairing.facts["conditions_too_small"] == 1
    assert [finding["kind"] for finding in pairing.findings] == ["few_cells", "controls"]
    assert "1 conditions of one cell cannot be halved" in caplog.text
    assert "T|d2" in pairing.findings[1]["text"]
    assert ("T", "d2") not in pairing.controls


def test_one_perturbation_has_no_mean_of_others(tmp_path):
    pair_side(0, perturbations=("p1",)).write_h5ad(tmp_path / "real.h5ad")
    truth = open_truth(tmp_path / "real.h5ad", CONFIG)
    with pytest.raises(UserError, match=r"real\.h5ad.*'p1' is the only perturbation.*perturbed_mean"):
        pair_reference(truth, truth.rows, "perturbed_mean", seed=0)
    assert pair_reference(truth, truth.rows, "control", seed=0).conditions
