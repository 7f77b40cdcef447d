"""Semantic tables: files, matching of names, agents and doses."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from perturbdiff.conditions.condition import agents, dose_values, dose_weights
from perturbdiff.config.settings import ModelConfig
from perturbdiff.embeddings.embedding_tables import EmbeddingTable, semantic_rows
from perturbdiff.runtime.errors import UserError

VECTORS = np.array([[1, 0, 3], [0, 2, 1], [5, 4, 2]], np.float32)
TABLE = EmbeddingTable(("A", "B", " C "), VECTORS)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_what_is_written_is_read_and_equal_tables_have_equal_bytes(tmp_path, suffix):
    for name in ("a", "b"):
        TABLE.write(tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    again = EmbeddingTable.read(tmp_path / f"a{suffix}")
    assert again.names == TABLE.names
    assert again.vectors.dtype == np.float32
    np.testing.assert_array_equal(again.vectors, VECTORS)


def test_a_column_of_lists_and_a_named_index_are_tables_too(tmp_path):
    pd.DataFrame({"name": ["A", "B"], "vector": [[1.0, 2.0], [3.0, 4.0]]}).to_parquet(tmp_path / "l.parquet")
    np.testing.assert_array_equal(EmbeddingTable.read(tmp_path / "l.parquet").vectors, [[1, 2], [3, 4]])
    index = pd.Index(["A", "B"], name="name")
    pd.DataFrame({"x": [1, 2], "y": [3, 4]}, index=index).to_parquet(tmp_path / "i.parquet")
    assert EmbeddingTable.read(tmp_path / "i.parquet").names == ("A", "B")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"name": ["A", "A"], "x": [1.0, 2.0]}, "names occur twice: A"),
        ({"name": ["A", "B"], "x": [1.0, np.inf]}, "infinite numbers: B"),
        ({"name": ["A", "B"], "x": [1.0, None]}, "missing or infinite numbers: B"),
        ({"name": ["A", "B"], "vector": [[1.0], [1.0, 2.0]]}, "different lengths, 1, 2"),
        ({"name": ["A"], "vector": [["x"]]}, "does not hold lists of numbers"),
        ({"name": ["A"], "x": ["one"]}, "column 'x' is not a number"),
        ({"name": ["A", None], "x": [1.0, 2.0]}, "'name' has 1 missing"),
        ({"gene": ["A"], "x": [1.0]}, "lacks the column 'name'; it has gene, x"),
        ({"name": ["A"]}, "empty"),
        ({"name": [], "x": []}, "empty"),
    ],
)
def test_refuses_what_is_no_table(tmp_path, frame, message):
    pd.DataFrame(frame).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match=message) as error:
        EmbeddingTable.read(tmp_path / "t.parquet")
    assert str(error.value).startswith(str(tmp_path / "t.parquet"))


def test_refuses_pickles_and_other_files(tmp_path):
    np.savez(tmp_path / "p.npz", names=np.array(["A", None], object), vectors=VECTORS[:2])
    with pytest.raises(UserError, match="pickled objects"):
        EmbeddingTable.read(tmp_path / "p.npz")
    np.savez(tmp_path / "o.npz", labels=np.array(["A"]))
    with pytest.raises(UserError, match="'names' and 'vectors'"):
        EmbeddingTable.read(tmp_path / "o.npz")
    np.savez(tmp_path / "n.npz", names=np.arange(2), vectors=VECTORS[:2])
    with pytest.raises(UserError, match="must be a list of texts"):
        EmbeddingTable.read(tmp_path / "n.npz")
    np.savez(tmp_path / "f.npz", names=np.array(["A", "B"]), vectors=VECTORS)
    with pytest.raises(UserError, match="2 names for 3 vectors"):
        EmbeddingTable.read(tmp_path / "f.npz")
    for name in ("t.csv", "t.npz", "t.parquet"):
        (tmp_path / name).write_text("name,x\nA,1\n")
    for name, message in (("t.csv", "not '.csv'"), ("t.npz", "not an npz"), ("t.parquet", "is not a table")):
        with pytest.raises(UserError, match=message):
            EmbeddingTable.read(tmp_path / name)
    with pytest.raises(UserError, match="not found"):
        EmbeddingTable.read(tmp_path / "none.npz")
    with pytest.raises(UserError, match="parquet or .npz"):
        TABLE.write(tmp_path / "t.csv")


def test_labels_are_matched_exactly_then_stripped_then_by_their_agents():
    rows = semantic_rows(["A", " B", "C", "A@0.5", "A+B", "B + C@2"], TABLE, ModelConfig())
    expected = [VECTORS[0], VECTORS[1], VECTORS[2], VECTORS[0], VECTORS[:2].mean(0), VECTORS[1:].mean(0)]
    np.testing.assert_allclose(rows.vectors, expected)
    assert rows.vectors.dtype == np.float32
    assert (rows.agent, rows.combined, rows.missing) == (("A@0.5",), ("A+B", "B + C@2"), ())
    added = semantic_rows(["A+B"], TABLE, ModelConfig(combination="sum"))
    np.testing.assert_allclose(added.vectors[0], VECTORS[:2].sum(0))


def test_a_label_of_its_own_comes_before_its_agents():
    table = EmbeddingTable(("A", "B", "A+B", "A@5"), np.eye(4, dtype=np.float32))
    rows = semantic_rows(["A+B", "A@5", "A@1", "A@5+B@1"], table, ModelConfig())
    np.testing.assert_allclose(rows.vectors, [np.eye(4)[2], np.eye(4)[3], np.eye(4)[0], [0, 0.5, 0, 0.5]])


def test_cell_types_and_genes_are_not_taken_apart():
    with pytest.raises(UserError, match=r"lacks cell_type A\+B"):
        semantic_rows(["A+B"], TABLE, ModelConfig(), kind="cell_type")


def test_the_control_is_the_mean_of_the_table():
    paper = semantic_rows(["ctrl", "A"], TABLE, ModelConfig(), control="ctrl")
    np.testing.assert_allclose(paper.vectors, [VECTORS.mean(0), VECTORS[0]], rtol=1e-6)
    released = semantic_rows(["ctrl"], TABLE, ModelConfig(control_embedding="scalar"), control="ctrl")
    alone = semantic_rows(["A+ctrl", "ctrl+B"], TABLE, ModelConfig(), control="ctrl")
    np.testing.assert_array_equal(alone.vectors, VECTORS[:2])
    np.testing.assert_array_equal(dose_weights(["A@2+ctrl"], [2.0], control="ctrl"), [[1]])
    np.testing.assert_allclose(released.vectors, np.full((1, 3), VECTORS.mean()), rtol=1e-6)


def test_missing_labels_are_refused_or_take_the_mean():
    with pytest.raises(
        UserError, match=r"lacks perturbation a, Z, did you mean 'A'\?.*missing_embedding=mean"
    ):
        semantic_rows(["a", "B", "Z"], TABLE, ModelConfig())
    rows = semantic_rows(["Z", "A+Z"], TABLE, ModelConfig(missing_embedding="mean"))
    assert rows.missing == ("Z", "A+Z")
    np.testing.assert_allclose(rows.vectors, [VECTORS.mean(0)] * 2, rtol=1e-6)
    assert "its mean instead: Z, A+Z" in rows.report("perturbation")


def test_tables_are_joined_only_if_equally_wide():
    more = TABLE.joined(EmbeddingTable(("A", "D"), np.full((2, 3), 9, np.float32)))
    assert more.names == ("A", "B", " C ", "D")
    np.testing.assert_array_equal(more.vectors[[0, 3]], [VECTORS[0], [9, 9, 9]])
    with pytest.raises(UserError, match="2 numbers, the model's 3"):
        TABLE.joined(EmbeddingTable(("D",), np.ones((1, 2), np.float32)))


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("imatinib@0.5", [("imatinib", 0.5)]),
        ("IFNG", [("IFNG", None)]),
        ("IFNG+TNF", [("IFNG", None), ("TNF", None)]),
        ("IFNG@1+TNF@1e+06", [("IFNG", 1), ("TNF", 1e6)]),
        ("IFNG@1e+06+TNF@2", [("IFNG", 1e6), ("TNF", 2)]),
        ("IFNG+TNF@10", [("IFNG", 10), ("TNF", 10)]),
        ("[('Drug A ', 0.05, 'uM')]", [("Drug A", 0.05)]),
        ("[('A', 1.0, 'uM'), ('B', 5, 'uM')]", [("A", 1), ("B", 5)]),
        ("[__import__('os').getcwd()]", [("[__import__('os').getcwd()]", None)]),
        ("Na+", [("Na+", None)]),
        ("me@home", [("me@home", None)]),
        ("x@nan", [("x@nan", None)]),
    ],
)
def test_agents_and_doses_of_a_label(label, expected):
    assert agents(label) == tuple(expected)


def test_a_known_name_with_the_separator_is_one_agent():
    assert agents("(+)-JQ1@0.5", names={"(+)-JQ1"}) == (("(+)-JQ1", 0.5),)
    assert agents("A+ctrl", control="ctrl") == (("A", None),)
    assert agents("ctrl", control="ctrl") == (("ctrl", None),)
    assert agents("A+B", "") == (("A+B", None),)
    assert agents("A & B", "&") == (("A", None), ("B", None))


def test_dose_weights():
    labels = ["control", "A@1", "A@0.1", "A@1+B@10", "A+B@10", "[('A', 0.1, 'uM')]"]
    doses = dose_values(labels)
    assert doses == (0.1, 1.0, 10.0)
    expected = [[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0.5, 0.5], [0, 0, 1], [1, 0, 0]]
    found = dose_weights(labels, doses)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    added = dose_weights(["A@1+B@10", "A+B@10"], doses, combination="sum")
    np.testing.assert_array_equal(added, [[0, 1, 1], [0, 0, 2]])
    with pytest.raises(UserError, match="A@3: the model knows no dose 3 of A; .*: 0.1, 1, 10"):
        dose_weights(["A@3"], doses)


def test_tables_beside_each_other_say_what_each_lacks():
    one = EmbeddingTable(("a", "b"), np.array([[1.0], [3.0]]))
    other = EmbeddingTable(("b", "c"), np.array([[0.0, 10.0], [20.0, 10.0]]))
    both = one.beside(other)
    assert both.names == ("a", "b", "c")
    s = np.sqrt(2)
    np.testing.assert_allclose(both.vectors, [[-1, 0, 0, 1, 0], [1, -s, 0, 1, 1], [0, s, 0, 0, 1]], atol=1e-6)
