"""`assets/paper_results.csv` is the paper's Tab. numerical_details: its shape, and numbers typed again."""

from pathlib import Path

import pandas as pd
import pytest

from perturbdiff.evaluation.metrics.catalogue import PAPER

TABLE = Path(__file__).parents[2] / "assets" / "paper_results.csv"
KEYS = ["dataset", "method", "metric"]
OURS = ("PerturbDiff (Scratch)", "PerturbDiff (Finetuned)")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return pd.read_csv(TABLE)


def test_three_data_sets_eleven_methods_and_fourteen_metrics(table):
    assert list(table.columns) == [*KEYS, "value"]
    assert not table.duplicated(KEYS).any()
    assert list(table["dataset"].unique()) == ["pbmc", "tahoe100m", "replogle"]
    assert (table.groupby("dataset")["method"].nunique() == 11).all()
    assert (table.groupby(["dataset", "method"])["metric"].nunique() == 14).all()
    assert set(table["metric"]) == set(PAPER), "names are those of our tables"


def test_effect_size_is_undefined_where_the_paper_says_nan(table):
    missing = table[table["value"].isna()]
    assert set(missing["metric"]) == {"ES"}
    assert set(zip(missing["dataset"], missing["method"], strict=True)) == {
        ("pbmc", "Squidiff"),
        ("pbmc", "Mean Variant (Overall)"),
        ("tahoe100m", "Squidiff"),
    }


@pytest.mark.parametrize(
    ("dataset", "method", "metric", "value"),
    [
        ("pbmc", OURS[0], "R2", 0.997),
        ("pbmc", OURS[0], "MSE", 1.91e-4),
        ("pbmc", OURS[1], "AUPRC", 0.669),
        ("pbmc", "STATE", "ES", -0.363),
        ("pbmc", "CPA", "MSE", 1.10e-2),
        ("pbmc", "Squidiff", "R2", -218.0),
        ("pbmc", "Mean Variant (per Batch)", "R2", 0.999),
        ("tahoe100m", OURS[0], "PDS_L2", 0.978),
        ("tahoe100m", OURS[1], "LFCSpear", 0.691),
        ("tahoe100m", "CPA", "MSE", 8.89e-4),
        ("tahoe100m", "Linear", "PDCorr", 0.723),
        ("replogle", OURS[0], "DEOver", 0.190),
        ("replogle", OURS[1], "PDS_cos", 0.639),
        ("replogle", "STATE", "PDS_L1", 0.788),
        ("replogle", "CellFlow", "DirAgr", 0.472),
        ("replogle", "Mean Variant (Overall)", "MAE", 0.175),
    ],
)
def test_numbers_typed_again(table, dataset, method, metric, value):
    found = table.set_index(KEYS)["value"]
    assert found[dataset, method, metric] == value
