"""`assets/splits`: the published lists of held-out perturbations, read as `split --toml` reads them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perturbdiff.config import recipes
from perturbdiff.splits.split_rules import by_toml, read_toml

SPLITS = Path(__file__).parents[3] / "assets" / "splits"
CONTEXTS = {
    "pbmc": ("Donor1", "Donor4", "Donor9", "Donor12"),
    "tahoe100m": ("CVCL_1097", "CVCL_1285", "CVCL_1098", "CVCL_0334", "CVCL_0480"),
    "replogle": ("hepg2",),
}
# perturbations of a held-out context: all, training, validation, test (App. Data Splits; the figure of scatters)
COUNTS = {"pbmc": (90, 24, 4, 62), "tahoe100m": (1137, 348, 54, 735), "replogle": (1040, 312, 104, 624)}


@pytest.mark.parametrize("name", COUNTS)
def test_each_list_holds_out_as_many_as_published(name):
    spec = read_toml(SPLITS / f"{name}.toml", [name])
    preset = recipes.load(f"paper-{name}").split
    assert spec.others_train
    assert spec.context_column == preset.context_column
    assert tuple(spec.fewshot) == CONTEXTS[name] == preset.held_out
    assert not spec.zeroshot
    total, train, valid, test = COUNTS[name]
    first = spec.fewshot[CONTEXTS[name][0]]
    for lists in spec.fewshot.values():
        assert lists == first
        for labels in lists.values():
            assert len(set(labels)) == len(labels)
        assert (len(lists["valid"]), len(lists["test"])) == (valid, test)
    assert train + valid + test == total


@pytest.mark.parametrize("name", COUNTS)
def test_a_table_with_these_labels_is_split_so(name):
    spec = read_toml(SPLITS / f"{name}.toml", [name])
    lists = spec.fewshot[CONTEXTS[name][0]]
    control = recipes.load(f"paper-{name}").data.control
    perturbations = [*lists["valid"], *lists["test"], "trained", control]
    contexts = [*CONTEXTS[name], "elsewhere"]
    table = pd.MultiIndex.from_product([contexts, perturbations]).to_frame(index=False)
    table.columns = pd.Index(["context", "perturbation"])
    table["is_control"] = table["perturbation"] == control
    part = by_toml(table, spec)
    _, _, valid, test = COUNTS[name]
    assert np.count_nonzero(part == "valid") == valid * len(CONTEXTS[name])
    assert np.count_nonzero(part == "test") == test * len(CONTEXTS[name])
    assert set(part[table["context"] == "elsewhere"]) == {"train"}


def test_labels_are_written_as_the_data_write_them():
    tahoe = read_toml(SPLITS / "tahoe100m.toml", ["tahoe100m"]).fewshot["CVCL_0480"]
    assert {"[('Bestatin (hydrochloride)', 0.5, 'uM')]", "[('γ-Oryzanol', 0.05, 'uM')]"} <= set(tahoe["test"])
    assert "[('Erdafitinib ', 5.0, 'uM')]" in tahoe["valid"]
    pbmc = read_toml(SPLITS / "pbmc.toml", ["pbmc"]).fewshot["Donor12"]
    assert set(pbmc["valid"]) == {"G-CSF", "IFN-beta", "M-CSF", "IGF-1"}
