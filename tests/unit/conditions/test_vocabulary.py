import json

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from perturbdiff.conditions.condition import condition_table
from perturbdiff.conditions.vocabulary import GeneMap, Vocabulary
from perturbdiff.runtime.errors import UserError


def conditions(control="control", cell_type="T"):
    frame = pd.DataFrame(
        {"cell_type": cell_type, "batch": ["b2", "b1", "b1"], "perturbation": [control, control, "IL6"]}
    )
    return condition_table(frame, control)


def test_ids_start_at_one_and_zero_is_unknown():
    words = Vocabulary.from_conditions([conditions()], control="control")
    assert words.perturbation == ("IL6", "control")
    assert words.encode("batch", ["b1", "b2", "nope"]).tolist() == [1, 2, 0]
    assert words.size("batch") == 3
    assert words.encode("batch", ["b1"]).dtype == np.int64


def test_stores_share_one_control_id():
    tables = [conditions("PBS"), conditions("DMSO", "B")]
    words = Vocabulary.from_conditions(tables, control="control", datasets=("a", "b"))
    assert set(words.perturbation) == {"IL6", "control"}
    for table in tables:
        ids = words.encode_conditions(table)["perturbation"]
        assert (ids == np.where(table["is_control"], *words.encode("perturbation", ["control", "IL6"]))).all()


def test_strict_encoding_names_the_nearest_label():
    words = Vocabulary.from_conditions([conditions()], control="control")
    with pytest.raises(UserError, match=r"IL-6.*did you mean 'IL6'"):
        words.encode("perturbation", ["IL-6"], strict=True)


def test_round_trip_and_damage(tmp_path):
    words = Vocabulary.from_conditions([conditions()], control="control", datasets=("δ", "b"))
    words.to_json(tmp_path / "v.json")
    assert Vocabulary.from_json(tmp_path / "v.json") == words
    record = json.loads((tmp_path / "v.json").read_text())
    (tmp_path / "v.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(UserError, match="newer"):
        Vocabulary.from_json(tmp_path / "v.json")
    (tmp_path / "v.json").write_text("{}")
    with pytest.raises(UserError, match="not a vocabulary"):
        Vocabulary.from_json(tmp_path / "v.json")


def test_extending_keeps_old_ids_and_one_control():
    old = Vocabulary(("a", "control"), ("T",), ("1",))
    grown = old.extended(Vocabulary(("PBS", "b"), ("T", "B"), ("2",), ("new",), control="PBS"))
    assert grown.perturbation == ("a", "control", "b")
    assert grown.cell_type == ("T", "B")
    assert grown.control == "control"


def test_label_twice_is_refused():
    with pytest.raises(UserError, match="'a' occurs twice"):
        Vocabulary(("a", "a", "control"), ("T",), ("1",))


def test_genes_are_placed_by_name():
    matrix = sparse.random(7, 4, 0.6, "csr", dtype=np.float32, random_state=0)
    genes = GeneMap(["a", "b", "c", "d"], ["d", "x", "b", "a"])
    assert genes.missing == ["x"]
    assert genes.extra == ["c"]
    expected = matrix.toarray()[:, [3, 0, 1, 0]]
    expected[:, 1] = 0
    placed = genes.apply(matrix)
    assert placed.has_sorted_indices
    np.testing.assert_array_equal(placed.toarray(), expected)
    np.testing.assert_array_equal(genes.dense(matrix), expected)
    out = np.full((9, 4), np.nan, np.float32)
    genes.dense(matrix, out, np.array([8, 0, 1, 2, 3, 4, 5]))
    np.testing.assert_array_equal(out[[8, 0, 1, 2, 3, 4, 5]], expected)
    assert np.isnan(out[[6, 7]]).all()
    assert "3 of the model's 4" in genes.report()
    assert "x" in genes.report()


def test_same_list_is_left_alone():
    matrix = sparse.csr_matrix(np.eye(3, dtype=np.float32))
    assert GeneMap(list("abc"), list("abc")).apply(matrix) is matrix


def test_no_common_gene_and_duplicates_are_refused():
    with pytest.raises(UserError, match="no gene in common"):
        GeneMap(["ENSG1"], ["IL6"])
    with pytest.raises(UserError, match="occur twice: a"):
        GeneMap(["a", "a"], ["a"])
