"""The target genes of perturbations: from a table, else from names."""

import pytest

from perturbdiff.conditions.targets import Targets
from perturbdiff.runtime.errors import UserError

GENES = ["STAT1", "TP53", "MYC", "KLF1", "HLA-A"]


def test_names_of_genes_are_targets():
    found = Targets.read(None, ["MYC", "imatinib", "KLF1+TP53", "STAT1@2", "KLF1+ctrl"], GENES)
    assert found.genes == {
        "MYC": ("MYC",),
        "imatinib": (),
        "KLF1+TP53": ("TP53", "KLF1"),
        "STAT1@2": ("STAT1",),
        "KLF1+ctrl": ("KLF1",),
    }
    assert found.without == ("imatinib",)
    assert found.panel == ("STAT1", "TP53", "MYC", "KLF1")
    assert found.panel_columns().tolist() == [True, True, True, True, False]
    assert [text for text, _, warn in found.remarks() if warn] == []


@pytest.mark.parametrize(("suffix", "tab"), [("csv", ","), ("tsv", "\t")])
def test_a_table_of_targets(tmp_path, suffix, tab):
    path = tmp_path / f"map.{suffix}"
    rows = [
        "perturbation,gene",
        "guide_1,MYC",
        "guide_1,TP53",
        "drug,",
        "guide_2,GONE",
        "other,KLF1",
        "guide_1,MYC",
    ]
    path.write_text("\n".join(rows).replace(",", tab) + "\n")
    found = Targets.read(path, ["guide_1", "drug", "guide_2", "STAT1"], GENES)
    assert found.genes == {"guide_1": ("TP53", "MYC"), "drug": (), "guide_2": (), "STAT1": ("STAT1",)}
    assert (found.without, found.unmeasured, found.unknown) == (("drug", "guide_2"), ("GONE",), ("other",))
    assert found.panel == ("STAT1", "TP53", "MYC")  # KLF1 is a target of a perturbation that is not scored
    texts = [text for text, _, _ in found.remarks()]
    assert all(text.startswith(f"map.{suffix}: ") for text in texts)
    assert "GONE" in texts[0]
    assert "drug, guide_2" in texts[1]
    assert "other" in texts[2]


def test_a_table_overrules_the_name(tmp_path):
    path = tmp_path / "map.csv"
    path.write_text("Perturbation,Gene\nMYC,TP53\n")
    assert Targets.read(path, ["MYC"], GENES).genes == {"MYC": ("TP53",)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("perturbation,target\nMYC,MYC\n", "no column gene"),
        ("perturbation,gene\n", "has no rows"),
        ("perturbation,gene\nmyc,MYC\n", "none of the 1 scored perturbations.*did you mean 'MYC'"),
        ("perturbation,gene\nMYC,ENSG00000136997\n", "gene ids.*gene names"),
        ("", "is not a table"),
    ],
)
def test_a_useless_table_is_named(tmp_path, text, words):
    path = tmp_path / "map.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as error:
        Targets.read(path, ["MYC"], GENES)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_table(tmp_path):
    with pytest.raises(UserError, match="gone.csv"):
        Targets.read(tmp_path / "gone.csv", ["MYC"], GENES)
