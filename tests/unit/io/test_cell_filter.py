"""The expression that says which cells are kept: what it means, and that nothing else can be said in it."""

import numpy as np
import pytest

from perturbdiff.io.cell_filter import CellFilter, KeptCells, unknown_values
from perturbdiff.io.columns import codes_of
from perturbdiff.runtime.errors import UserError

OBS = {
    "pass_filter": np.array(["full", "minimal", "full", "full", None], object),
    "n_genes": np.array([100.0, 900.0, 300.0, 50.0, np.nan]),
    "plate": np.array([3.0, 3.0, 7.0, 12.0, 3.0]),
    "doublet": np.array([False, False, True, False, True]),
    "cell line": np.array(["a", "b", "a", "c", "b"], object),
}


def bound(text, obs=OBS):
    return KeptCells(
        CellFilter(text), "x.h5ad", list(obs), lambda name, a, b, texts: codes_of(obs[name][a:b], texts)
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("pass_filter == 'full'", [0, 2, 3]),
        ("pass_filter != 'full'", [1, 4]),
        ("n_genes > 99.5", [0, 1, 2]),
        ("n_genes >= 100 and not doublet == True", [0, 1]),
        ("plate == 3 or plate in (12, 13.0)", [0, 1, 3, 4]),
        ("plate not in [3]", [2, 3]),
        ("plate > -1 and (pass_filter == 'full' or n_genes < 1)", [0, 2, 3]),
        ("`cell line` in ['a', 'c'] and pass_filter == \"full\"", [0, 2, 3]),
        ("`cell line` == '`'", []),
    ],
)
def test_what_is_kept(text, kept):
    cells = bound(text)
    whole = cells.read(0, 5)
    assert np.flatnonzero(whole).tolist() == kept
    assert [bool(cells.read(k, k + 1)[0]) for k in range(5)] == whole.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') == 0",
        "pass_filter.__class__ == 'full'",
        "@x == 1",
        "pass_filter",
        "plate + 1 == 4",
        "plate == n_genes",
        "1 < plate < 3",
        "plate < 'a'",
        "plate in 'abc'",
        "plate in []",
        "plate is 3",
        "[p for p in plate] == 3",
        "(lambda: 1) == 1",
        "plate == 1j",
        "plate == b'x'",
        "plate := 3",
        "f'{plate}' == '3'",
        "",
        "plate == 3; plate == 4",
        "(" * 5000 + "plate == 3" + ")" * 5000,
        "not " * 480 + "plate == 3 or" + " not" * 20,
    ],
)
def test_nothing_but_comparisons_of_columns_is_understood(text):
    with pytest.raises(UserError, match="data.keep: .* cannot be read"):
        CellFilter(text)


def test_columns_and_values_that_are_not_there_are_named():
    with pytest.raises(UserError, match="no obs column 'pas_filter', did you mean 'pass_filter'"):
        bound("pas_filter == 'full' and plate == 3")
    with pytest.raises(UserError, match="'pass_filter' holds 'full', which is no number"):
        bound("pass_filter > 3").read(0, 5)
    one, other = (
        bound("plate in [3, 8] and pass_filter == 'ful'"),
        bound("plate in [3, 8] and pass_filter == 'ful'"),
    )
    one.read(0, 5)
    other.read(0, 5)
    first, second = unknown_values([one, other])
    assert "no cell has '8' in obs column 'plate'" in first
    assert "'ful' in obs column 'pass_filter' (data.keep), did you mean 'full'?" in second
