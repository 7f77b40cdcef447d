"""Labels and gene lists of released models."""

import json
import pickle

import numpy as np
import pytest

from perturbdiff.released.released_settings import (
    control_label,
    ordered,
    own_batches,
    read_genes,
    vocabulary_of,
)
from perturbdiff.runtime.errors import UserError

SETTINGS = {
    "pert_dict": {"IFNG": 1, "PBS": 2, "IL2": 0},
    "cell_type_dict": {"B": 0, "T": 1},
    "batch_dict": {"pbmc_Donor2": 1, "pbmc_Donor1": 0},
}


def vocabulary(settings=SETTINGS, **options):
    given = {"datasets": ("all",), "sources": ["pbmc"], "control": None, "told": True, "source": "file"}
    return vocabulary_of(settings, **{**given, **options})


def test_labels_follow_their_codes():
    words = vocabulary()
    assert words.perturbation == ("IL2", "IFNG", "PBS")
    assert words.encode("perturbation", ["IL2", "PBS"]).tolist() == [1, 3]
    assert (words.batch, words.control) == (("Donor1", "Donor2"), "PBS")


@pytest.mark.parametrize("codes", [{"a": 1, "b": 2}, {"a": 0, "b": 0}, ["a"]])
def test_codes_that_do_not_number_labels(codes):
    with pytest.raises(UserError, match="'pert_dict' does not number"):
        ordered({"pert_dict": codes}, "perturbation", "file")


def test_control():
    tahoe = ["[('DMSO_TF', 0.0, 'uM')]", "[('Alpha', 0.5, 'uM')]"]
    assert control_label(tahoe, None, "file") == tahoe[0]
    assert control_label(["a", "mock"], "mock", "file") == "mock"
    with pytest.raises(UserError, match=r"no known control among a, mock; .* --control"):
        control_label(["a", "mock"], None, "file")
    with pytest.raises(UserError, match=r"several controls \(PBS, non-targeting\)"):
        control_label(["PBS", "non-targeting"], None, "file")
    with pytest.raises(UserError, match="no perturbation 'moc', did you mean 'mock'"):
        control_label(["a", "mock"], "moc", "file")


def test_a_model_that_was_never_told_the_perturbation():
    assert vocabulary(told=False).perturbation == ("PBS",)
    assert vocabulary({**SETTINGS, "pert_dict": {"a": 0}}, told=False).perturbation == ("control",)


def test_batches_lose_the_name_of_their_data_set():
    assert own_batches(["tahoe_1_p1", "tahoe_1_p2"], ["tahoe", "tahoe_1"]) == ("p1", "p2")
    assert own_batches(["a_1", "b_1"], ["a", "b"]) == ("a_1", "b_1")  # would be one
    assert own_batches(["x_1"], ["a"]) == ("x_1",)


def test_gene_lists(tmp_path):
    genes = ["B", "A", "C"]
    (tmp_path / "list.pkl").write_bytes(pickle.dumps(genes))
    (tmp_path / "set.pkl").write_bytes(pickle.dumps(set(genes), protocol=2))
    (tmp_path / "strings.pkl").write_bytes(pickle.dumps([np.str_(gene) for gene in genes]))
    (tmp_path / "genes.txt").write_text("B\nA\n\nC\n")
    (tmp_path / "genes.json").write_text(json.dumps(genes))
    np.save(tmp_path / "genes.npy", np.array(genes))
    for name in ("list.pkl", "strings.pkl", "genes.txt", "genes.json", "genes.npy"):
        assert read_genes(tmp_path / name) == genes
    assert read_genes(tmp_path / "set.pkl") == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"a": 1}', "expected a list"),
        ("a.json", b"[1, 2]", "expected a list"),
        ("a.json", b"[", "not valid JSON"),
        ("a.npy", b"x", "cannot be read"),
        ("a.txt", b"A\nB\nA\n", "occur twice: A"),
        ("a.pkl", b"x", "damaged"),
    ],
)
def test_bad_gene_lists(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_genes(tmp_path / name)
