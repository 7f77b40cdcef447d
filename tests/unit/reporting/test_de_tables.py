"""The DE tables of a run as matrices, and the figures' numbers taken from them."""

import json

import numpy as np
import pandas as pd
import pytest

from perturbdiff.reporting.loading.de_tables import Side, Split, effects, paired_sides, read_side, top_genes
from perturbdiff.reporting.loading.results import Run
from perturbdiff.runtime.errors import UserError

GENES = ("a", "b", "c", "d")


def run(folder, **summary):
    return Run(folder, "m", "d", "model", pd.DataFrame(), pd.DataFrame(), summary, {}, {})


def side(q, fold=None, change=None, perturbations=None, genes=GENES):
    q = np.array(q, np.float32)
    fold = np.zeros_like(q) if fold is None else np.array(fold, np.float32)
    change = np.zeros_like(q) if change is None else np.array(change, np.float32)
    names = perturbations or tuple(f"p{i}" for i in range(len(q)))
    return Side(tuple(names), tuple(genes), q, fold, change)


def write(path, rows, row_group_size=None):
    columns = ["scope_kind", "scope", "perturbation", "gene", "p", "q", "log2fc", "mean", "control_mean"]
    pd.DataFrame(rows, columns=columns).to_parquet(path, row_group_size=row_group_size)


def row(kind, perturbation, gene, q, fold=1.0, mean=2.0, control=0.5):
    return (
        kind,
        kind,
        perturbation,
        gene,
        q,
        np.float32(q),
        np.float32(fold),
        np.float32(mean),
        np.float32(control),
    )


@pytest.mark.parametrize("size", [None, 1, 3])
def test_tables_become_matrices_whatever_the_order_and_the_row_groups(tmp_path, size):
    rows = [
        row("pooled", p, g, i + 4 * j, fold=i - j) for i, p in enumerate("xyz") for j, g in enumerate("ba")
    ]
    others = [row("context", p, "a", 99.0) for p in "xyz"]
    order = np.random.default_rng(0).permutation(9)
    write(tmp_path / "de_real.parquet", [(rows + others)[i] for i in order], size)
    found = read_side(run(tmp_path), "de_real")
    assert (found.perturbations, found.genes) == (("x", "y", "z"), ("a", "b"))
    np.testing.assert_array_equal(found.q, [[4, 0], [5, 1], [6, 2]])
    np.testing.assert_array_equal(found.fold, [[-1, 0], [0, 1], [1, 2]])
    np.testing.assert_array_equal(found.change, np.full((3, 2), 1.5))


def test_missing_or_broken_tables(tmp_path):
    assert read_side(run(tmp_path), "de_real") is None
    assert paired_sides(run(tmp_path)) is None
    write(tmp_path / "de_real.parquet", [row("context", "x", "a", 0.1)])
    assert read_side(run(tmp_path), "de_real") is None
    (tmp_path / "de_real.parquet").write_text("no")
    with pytest.raises(UserError, match=r"de_real.parquet cannot be read .*run evaluate again"):
        read_side(run(tmp_path), "de_real")


def test_only_what_both_sides_hold_is_compared(tmp_path):
    write(tmp_path / "de_real.parquet", [row("pooled", p, g, 0.1) for p in "xy" for g in "ab"])
    write(tmp_path / "de_pred.parquet", [row("pooled", p, g, ord(p)) for p in "yz" for g in "bac"])
    real, predicted = paired_sides(run(tmp_path))
    assert real.perturbations == predicted.perturbations == ("y",)
    assert real.genes == predicted.genes == ("a", "b")
    np.testing.assert_array_equal(predicted.q, [[ord("y")] * 2])


def test_numbers_and_sizes_per_perturbation():
    real = side([[0.01, 0.2, 0.04, 1], [1, 1, 1, np.nan]], change=[[3, 0, 4, 0], [0, 0, 0, 0]])
    predicted = side([[0.01, 0.01, 0.01, 0.01], [0.06, 0.04, 1, 1]], change=[[0, 1, 0, 0], [1, 1, 1, 1]])
    found = effects(real, predicted, 0.05)
    assert found.table.to_dict("list") == {
        "perturbation": ["p0", "p1"],
        "de_real": [2, 0],
        "de_predicted": [4, 1],
        "size_real": [5.0, 0.0],
        "size_predicted": [1.0, 2.0],
    }
    assert found.truth.true.sum() == 2
    assert found.truth.other.sum() == 5  # the gene that was not tested is in neither group


def test_separation_is_the_area_under_the_curve():
    rng = np.random.default_rng(0)
    q = 10.0 ** -rng.uniform(0, 6, (5, 400))
    true = rng.random((5, 400)) < 0.3
    q[true] **= 1.5
    real = side(np.where(true, 0.01, 0.5), genes=tuple(map(str, range(400))))
    found = effects(real, side(q, genes=real.genes), 0.05).predicted
    a, b = -np.log10(q[true]), -np.log10(q[~true])
    exact = (a[:, None] > b[None]).mean()
    assert found.separation == pytest.approx(exact, abs=2e-3)
    assert found.median(true=True) == pytest.approx(np.median(a), abs=0.02)
    assert found.median(true=False) == pytest.approx(np.median(b), abs=0.02)


def test_separation_of_ties_extremes_and_nothing():
    assert Split(np.array([4, 0]), np.array([3, 0])).separation == 0.5
    assert Split(np.array([0, 4]), np.array([3, 0])).separation == 1.0
    assert np.isnan(Split(np.array([0, 0]), np.array([3, 0])).separation)
    assert np.isnan(Split(np.array([0, 0]), np.array([3, 0])).median(true=True))
    found = effects(side([[0.0, 1e-300, 1, 1]]), side([[0.0, 0.5, 1, np.nan]]), 0.05)
    assert (found.truth.true.sum(), found.predicted.other.sum()) == (2, 1)
    assert found.truth.median(true=True) > 40
    assert found.collapse is None  # a single perturbation


def test_strongest_genes_in_order():
    real = side(
        [[0.01, 0.01, 0.9, 0.001], [0.01, 1, 1, 1], [1, 1, 1, 1]],
        fold=[[1, -3, 9, -1], [0.5, 0, 0, 0], [0, 0, 0, 0]],
    )
    ours = side([[0.2, 0.01, 1, 0.04]], fold=[[1, -2, 0, 5]], perturbations=("p0",))
    found = top_genes(real, [("ours", ours)], 0.05, perturbations=9, genes=2)
    assert [t["perturbation"].iloc[0] for t in found] == ["p0", "p1"]
    first = found[0]
    assert first["gene"].to_list() == ["b", "d"]  # |fold| 3, then of two of 1 the smaller q
    assert first["de_genes"].iloc[0] == 3
    assert first["ours"].to_list() == [-2.0, 5.0]
    np.testing.assert_allclose(first["ours q"], [0.01, 0.04], rtol=1e-6)
    assert found[1]["ours"].isna().all()  # not predicted


def test_alpha_and_findings_are_those_of_the_run(tmp_path):
    assert run(tmp_path).alpha == 0.05
    assert run(tmp_path, alpha=0.1).alpha == 0.1
    notes = [{"kind": "seen", "text": "x"}, {"kind": "empty"}, "y"]
    assert run(tmp_path, findings=notes).findings == notes[:1]
    assert run(tmp_path, **json.loads('{"findings": null}')).findings == []
