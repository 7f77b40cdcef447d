"""`Scores`: a DataFrame of methods and metrics, with its details and a figure."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest

from perturbdiff import Scores, UserError
from perturbdiff.runtime import tabular


def test_rows_are_methods_and_columns_metrics(scores):
    assert isinstance(scores, pd.DataFrame)
    assert list(scores.index) == ["perturbdiff", "control", "linear", "ceiling"]
    assert {"energy_distance", "PDCorr", "DEOver"} <= set(scores.columns)
    assert type(scores["PDCorr"]) is pd.Series
    assert type(scores[["PDCorr", "MSE"]]) is pd.DataFrame
    assert type(scores.loc["linear"]) is pd.Series
    plain = pickle.loads(pickle.dumps(scores))
    pd.testing.assert_frame_equal(plain, pd.DataFrame(scores))


def test_the_numbers_are_those_of_the_folders(scores):
    for method, folder in zip(scores.index, scores.folders, strict=True):
        table = tabular.read_csv(folder / "aggregate.csv", "")
        pooled = table[table["scope_kind"] == "pooled"].set_index("metric")["nanmean"]
        np.testing.assert_allclose(scores.loc[method, pooled.index], pooled)
        np.testing.assert_allclose(
            scores.details.loc[method]["mean"], pooled[scores.details.loc[method].index]
        )


def test_single_perturbations_average_to_the_table(scores):
    table = scores.per_perturbation
    assert table.index.names == ["method", "perturbation"]
    assert table.loc["linear"].index.is_unique
    np.testing.assert_allclose(table.loc["linear"]["PDCorr"].mean(), scores.loc["linear", "PDCorr"])
    energy = table.loc["control"]["energy_distance"]
    assert energy.notna().all()


def test_the_figure_has_a_panel_per_metric(scores):
    figure = scores.plot(["energy_distance", "PDCorr"])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == 2
    assert [label.get_text() for label in shown[0].get_yticklabels()] == ["perturbdiff", "control", "linear"]
    drawn = [float(line.get_xdata()[0]) for line in shown[0].lines if len(line.get_xdata()) == 1]
    assert drawn == pytest.approx(list(scores["energy_distance"].drop("ceiling")))
    assert scores.plot().axes
    with pytest.raises(UserError, match="did you mean 'PDCorr'"):
        scores.plot(["PDCor"])


def test_folders_of_the_commands_can_be_read(scores, tmp_path):
    again = Scores.read(list(scores.folders))
    pd.testing.assert_frame_equal(pd.DataFrame(again), pd.DataFrame(scores))
    with pytest.raises(UserError, match="folder of scores not found"):
        Scores.read([tmp_path / "nothing"])
