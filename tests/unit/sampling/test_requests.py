"""Tables of conditions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pandas as pd
import pytest

from perturbdiff.runtime.errors import UserError
from perturbdiff.sampling import read_requests

STORE = SimpleNamespace(
    conditions=pd.DataFrame(
        {"cell_type": "all", "batch": ["x", "y"], "perturbation": ["p", "p"], "n_cells": [30, 40]}
    )
)


def read(tmp_path, text):
    path = tmp_path / "wanted.csv"
    path.write_text(text)
    return read_requests(path, STORE)


def test_numbers_come_from_the_table_or_the_store(tmp_path):
    table = read(tmp_path, "batch,perturbation,n_cells,guidance,note\nx,p,7,1.5,a\ny,p,,,b\nz,p,,0,c\n")
    assert list(table) == ["batch", "perturbation", "n_cells", "guidance", "cell_type"]
    assert table["cell_type"].unique() == ["all"]
    assert table["n_cells"].iloc[:2].tolist() == [7, 40]
    assert math.isnan(table["n_cells"].iloc[2])
    assert table["guidance"].fillna(-1).tolist() == [1.5, -1, 0]


@pytest.mark.parametrize("wrong", ["-1", "much", "nan", "inf"])
def test_guidance_is_a_number_not_below_zero(tmp_path, wrong):
    with pytest.raises(UserError, match=f"guidance must be numbers not below 0, found '{wrong}'"):
        read(tmp_path, f"batch,perturbation,guidance\nx,p,{wrong}\n")


def test_columns_may_have_names_of_their_own(tmp_path):
    path = tmp_path / "wanted.csv"
    path.write_text("donor,gene,batch\nx,p,other\n")
    table = read_requests(path, STORE, {"batch": "donor", "perturbation": "gene", "cell_type": None})
    assert table[["batch", "perturbation"]].to_numpy().tolist() == [["x", "p"]]
    with pytest.raises(UserError, match="wanted.csv: no column 'doner', did you mean 'donor'"):
        read_requests(path, STORE, {"batch": "doner"})
