"""Spellings of gene names, and the sentence on two lists without a common gene."""

import pytest

from perturbdiff.conditions.gene_names import synonyms, unshared

IDS = [f"ENSG{i:011d}" for i in range(4)]


def test_synonyms():
    missing = ["TP53", "ENSG00000000003", "HLA-A", "HLA-DRB1", "gone"]
    extra = ["Tp53", "ENSG00000000003.14", "HLA.A", "hla.drb1.2", "other"]
    assert synonyms(missing, extra) == {
        "TP53": "Tp53 (case)",
        "ENSG00000000003": "ENSG00000000003.14 (version)",
        "HLA-A": "HLA.A (punctuation)",
        "HLA-DRB1": "hla.drb1.2 (spelling)",
    }
    assert synonyms(["G1"], ["g1", "G1.2"]) == {"G1": "g1 (case)"}


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (IDS, ["TP53", "MYC"], ["A: gene ids", "B: gene names", "data.gene_key"]),
        (IDS, [f"{name}.3" for name in IDS], ["gene ids with a version", "data.gene_key"]),
        (IDS, [f"ENSMUSG{i:011d}" for i in range(4)], ["human", "mouse", "orthologues"]),
        (["TP53", "MYC"], ["Trp53", "Myc"], ["1 differ in spelling only ('Myc' is MYC (case))", "mouse"]),
        (["0", "1", "2"], ["TP53"], ["A: these are numbers", "var_names"]),
        (["HLA.A"], ["HLA-A"], ["(punctuation)", "rename"]),
        (["a", "b"], ["c"], ["same kind of gene names"]),
    ],
)
def test_why_two_lists_share_no_gene(here, there, words):
    sentence = unshared(here, there, "A", "B")
    assert "\n" not in sentence
    for word in [*words, "no gene in common", *here[:3], *there[:3]]:
        assert word in sentence
