"""Which cells are compared with which, what is refused, and what a person is told."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from evaluation_pair import GENES, pair_side

from perturbdiff.conditions.condition import Condition
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cells_by_condition import ExpressionView
from perturbdiff.evaluation.readers.inputs import open_predictions, open_truth
from perturbdiff.evaluation.readers.pairing import pair
from perturbdiff.io import row_file
from perturbdiff.runtime.errors import UserError

CONFIG = EvaluateConfig()


@pytest.fixture
def paired(tmp_path_factory):
    """A function that writes both sides and pairs them."""

    def of(predicted, real, config=CONFIG):
        tmp_path = tmp_path_factory.mktemp("pair")
        predicted.write_h5ad(tmp_path / "pred.h5ad")
        real.write_h5ad(tmp_path / "real.h5ad")
        predictions = open_predictions(tmp_path / "pred.h5ad", config)
        return pair(
            predictions, open_truth(tmp_path / "real.h5ad", config, control=predictions.control), config
        )

    return of


def kinds(pairing):
    return [finding["kind"] for finding in pairing.findings]


def without(adata, perturbation, **labels):
    """Return ``adata`` without the cells of one perturbation (and cell type, batch)."""
    drop = adata.obs["perturbation"] == perturbation
    for name, label in labels.items():
        drop &= adata.obs[name] == label
    return adata[~drop].copy()


def test_an_equal_pair_has_nothing_to_report(paired):
    pairing = paired(pair_side(1), pair_side(0))
    assert pairing.findings == []
    assert len(pairing.conditions) == 12
    assert pairing.perturbations == ["p1", "p2", "p3"]
    assert pairing.predicted_controls is None
    assert pairing.facts == {
        "control_groups": 4,
        "control_groups_replaced": 0,
        "controls": "real",
        "made_by": {},
        "conditions_missing": 0,
        "genes_left_out": 0,
        "genes_reordered": 0,
        "conditions_seen": None,
    }


def test_genes_are_matched_by_name_and_extra_ones_left_out(paired, caplog):
    caplog.set_level(logging.INFO)
    predicted = pair_side(1)
    order = np.random.default_rng(0).permutation(len(GENES))
    real = pair_side(0)[:, :-3].copy()
    pairing = paired(predicted[:, order].copy(), real)
    assert kinds(pairing) == ["genes", "genes"]
    assert pairing.facts["genes_left_out"] == 3
    assert pairing.facts["genes_reordered"] > 0
    assert "3 genes" in caplog.text
    assert "another order" in caplog.text
    condition = Condition("p2", "T", "d1")
    rows = pairing.predicted.rows[condition]
    np.testing.assert_array_equal(
        pairing.predicted.cells(rows).toarray(), predicted.X[rows][:, :-3].toarray()
    )


def test_missing_genes_are_refused(paired):
    with pytest.raises(UserError, match="2 of the truth's 30 genes are missing: g0, g1"):
        paired(pair_side(1)[:, 2:].copy(), pair_side(0))


def test_a_missing_condition_is_refused_or_counted(paired):
    predicted = without(pair_side(1), "p2", cell_type="B", batch="d2")
    with pytest.raises(UserError, match=r"1 of the 12 conditions .* B\|d2\|p2 .*--missing skip"):
        paired(predicted, pair_side(0))
    pairing = paired(predicted, pair_side(0), EvaluateConfig(missing="skip"))
    assert len(pairing.conditions) == 11
    assert (kinds(pairing), pairing.facts["conditions_missing"]) == (["missing"], 1)


def test_a_condition_without_real_cells_is_refused(paired):
    with pytest.raises(UserError, match=r"4 predicted conditions have no real cells .* B\|d1\|p2"):
        paired(pair_side(1), without(pair_side(0), "p2"))


@pytest.mark.parametrize("lacking", ["pred", "real"])
def test_a_covariate_of_one_side_only_is_pooled_over(paired, lacking):
    sides = {"pred": pair_side(1), "real": pair_side(0)}
    del sides[lacking].obs["batch"]
    pairing = paired(sides["pred"], sides["real"])
    assert [c.group for c in pairing.conditions[:2]] == [("B", "all"), ("T", "all")]
    assert all(len(pairing.real.rows[c]) == len(pairing.predicted.rows[c]) == 24 for c in pairing.conditions)
    assert {g: len(rows) for g, rows in pairing.controls.items()} == {("B", "all"): 30, ("T", "all"): 30}
    assert pairing.contexts["p1", "T", "all"] == "T"
    assert kinds(pairing) == ["covariates"]
    assert pairing.facts["control_groups_replaced"] == 0


def test_without_cell_types_there_are_no_contexts(paired):
    sides = [pair_side(1), pair_side(0)]
    del sides[0].obs["cell_type"]
    pairing = paired(*sides)
    assert pairing.contexts == {}
    assert len(pairing.conditions) == 6


def test_own_controls_are_used_only_if_asked_for(paired):
    predicted = pair_side(1)
    control = (predicted.obs["perturbation"] == "control").to_numpy()
    predicted.X = predicted.X.multiply(1 + 0.1 * control[:, None]).tocsr()
    real = paired(predicted, pair_side(0))
    assert (real.predicted_controls, real.facts["control_groups_replaced"]) == (None, 4)
    assert kinds(real) == ["controls"]
    own = paired(predicted, pair_side(0), EvaluateConfig(controls="own"))
    assert own.predicted_controls is not None
    assert set(own.predicted_controls) == set(own.controls)
    rows = own.predicted_controls["B", "d1"]
    np.testing.assert_allclose(own.predicted.cells(rows).toarray(), predicted.X[rows].toarray(), rtol=1e-6)
    assert kinds(own) == ["controls"]
    bare = paired(without(predicted, "control"), pair_side(0))
    assert (kinds(bare), bare.facts["control_groups_replaced"]) == ([], 0)
    with pytest.raises(UserError, match="no controls of its own"):
        paired(without(predicted, "control"), pair_side(0), EvaluateConfig(controls="own"))


@pytest.mark.parametrize("number", [np.int32, np.uint16, np.float64])
def test_counts_may_be_of_any_number_type(paired, number):
    sides = pair_side(1, counts=True), pair_side(0, counts=True)
    expected = paired(*sides).predicted
    sides[0].X = sides[0].X.toarray().astype(number)
    found = paired(*sides).predicted
    for condition, rows in expected.rows.items():
        np.testing.assert_array_equal(
            found.cells(rows).toarray(), expected.cells(rows).toarray(), str(condition)
        )


@pytest.mark.parametrize("suffix", ["h5ad", "zarr"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_threads_may_read_one_side_together(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(row_file, "HELD_VALUES", 0)
    adata, path = pair_side(0), tmp_path / f"real.{suffix}"
    adata.write_h5ad(path) if suffix == "h5ad" else adata.write_zarr(path)
    cells = open_truth(path, CONFIG)
    side = ExpressionView(cells.reader, cells.rows)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(side.cells, list(cells.rows.values()) * 5))
    for rows, read in zip(list(cells.rows.values()) * 5, found, strict=True):
        np.testing.assert_array_equal(read.toarray(), adata.X[rows].toarray())
    assert side.highest == max(r.data.max() for r in found)


@pytest.mark.parametrize("held", [True, False])
def test_counts_become_log1p_of_the_truths_median_depth(paired, monkeypatch, held):
    if not held:
        monkeypatch.setattr(row_file, "HELD_VALUES", 0)
    sides = pair_side(1, counts=True), pair_side(0, counts=True)
    pairing = paired(*sides)
    depth = np.median(np.asarray(sides[1].X.sum(axis=1)))
    for side, adata in zip((pairing.predicted, pairing.real), sides, strict=True):
        rows = side.rows["p1", "T", "d2"]
        counts = adata.X[rows].toarray()
        expected = np.log1p(counts / counts.sum(axis=1, keepdims=True) * depth)
        np.testing.assert_allclose(side.cells(rows).toarray(), expected, rtol=2e-6)
    assert pairing.facts["control_groups_replaced"] == 0


def test_counts_against_log1p_take_the_declared_depth(paired):
    counts = pair_side(1, counts=True)
    with pytest.raises(UserError, match="does not say to what depth"):
        paired(counts, pair_side(0))
    pairing = paired(counts, pair_side(0, declared={"target_sum": 50.0}))
    rows = pairing.predicted.rows["p1", "B", "d1"]
    sums = np.expm1(pairing.predicted.cells(rows).toarray()).sum(axis=1)
    np.testing.assert_allclose(sums, 50, rtol=1e-5)
    assert pairing.real.depth is None


def test_a_cell_without_counts_stays_zero(paired):
    predicted = pair_side(1, counts=True)
    row = int(np.flatnonzero(predicted.obs["perturbation"] == "p1")[0])
    predicted.X = predicted.X.multiply((np.arange(len(predicted)) != row)[:, None]).tocsr()
    side = paired(predicted, pair_side(0, counts=True)).predicted
    assert side.cells(np.array([row])).nnz == 0


def test_what_the_model_was_trained_on_is_said(paired, caplog):
    predicted = pair_side(1, declared={"conditions_seen": 2, "first_seen": ["B|d1|p1", "T|d1|p1"]})
    pairing = paired(predicted, pair_side(0))
    assert pairing.facts["conditions_seen"] == 2
    assert pairing.findings[0]["kind"] == "seen"
    assert pairing.findings[0]["count"] == 2
    assert "trained on 2 of the 12 predicted conditions (B|d1|p1, T|d1|p1)" in caplog.text


@pytest.mark.parametrize("factor", [0.1, 3.5])
def test_grossly_different_scales_are_refused_unless_the_depths_are_declared(paired, factor):
    predicted = pair_side(1)
    predicted.X.data *= factor
    with pytest.raises(
        UserError, match=r"pred\.h5ad: its values .*real\.h5ad .* different scales.*target_sum"
    ):
        paired(predicted, pair_side(0))
    predicted.uns["perturbdiff"]["target_sum"] = 1e4
    real = pair_side(0, declared={"target_sum": 1e4})
    assert kinds(paired(predicted, real)) == ["scale", "controls"]


def test_a_smaller_difference_of_scale_is_told(paired, caplog):
    predicted = pair_side(1)
    predicted.X.data *= 1.8
    assert "scale" in kinds(paired(predicted, pair_side(0)))
    assert "times as large as those of" in caplog.text
