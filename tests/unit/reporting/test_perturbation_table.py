"""The table of all conditions and what its cards show."""

import base64
import gzip
import json
import sys

import numpy as np
import pandas as pd
import pytest
from report_runs import make_run

from perturbdiff.reporting.figures.perturbation_table import MOST_ROWS, perturbations
from perturbdiff.reporting.loading.de_tables import paired_sides
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.page.page_data import page_data

METHODS = ("perturbdiff", "linear", "ceiling")
ENERGY = "energy_distance"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return read_runs([make_run(folder / m, m, cells=3) for m in METHODS])


def table_of(runs, **changes):
    focus, other, _ = runs
    sides = {r.method: pair for r in (focus, other) if (pair := paired_sides(r)) is not None}
    given = {"pictures": {}, "sides": sides, "other": other, "focus": focus} | changes
    return perturbations("d1", runs, **given)


def places(table):
    """Where each column stands among the fields of a row: by its head and what stands below it."""
    return {
        f"{h}, {b}" if b else h: i - 1
        for i, (h, b) in enumerate(zip(table.columns, table.below, strict=True))
    }


def test_a_row_for_each_condition_worst_first(runs):
    made = table_of(runs)
    at = places(made.table)
    assert made.table.columns[0] == "Perturbation"
    assert {"Energy distance ↓, perturbdiff", "Energy distance ↓, linear"} <= set(at)
    ours = [row.cells[at["Energy distance ↓, perturbdiff"]].value for row in made.table.rows]
    assert len(ours) == 10
    assert ours == sorted(ours, reverse=True)
    known = runs[0].values(ENERGY)
    for row in made.table.rows:
        cell_type = row.cells[at["cell type"]].text
        assert (
            row.cells[at["Energy distance ↓, perturbdiff"]].value == known[f"{cell_type}|donor 1", row.head]
        )


def test_results_are_wins_ties_and_losses(runs):
    made = table_of(runs)
    at = places(made.table)
    for row in made.table.rows:
        ours, theirs = (row.cells[at[f"Energy distance ↓, {m}"]].value for m in METHODS[:2])
        assert row.cells[at["result, in Energy distance"]].text == ("win" if ours < theirs else "loss")
    same = table_of(runs, other=runs[0])
    assert {row.cells[at["result, in Energy distance"]].text for row in same.table.rows} == {"tie"}
    alone = table_of(runs, other=None)
    assert "result" not in alone.table.columns


def test_a_metric_of_contexts_stands_in_the_rows_of_its_context(runs):
    made = table_of(runs)
    metric = next(i for i, (heading, _) in enumerate(made.cards["metrics"]) if heading.startswith("PDCorr"))
    scores = made.cards["scores"][metric][made.cards["methods"].index("perturbdiff")]
    values = runs[0].values("PDCorr")
    for (cell_type, _, name), score in zip(made.cards["labels"], scores, strict=True):
        assert score == values[cell_type, name]


def test_cards_hold_the_strongest_genes(runs):
    real = paired_sides(runs[0])[0]
    made = table_of(runs)
    names = made.cards["names"]
    assert names
    assert set(names) <= set(real.genes)
    for name, (count, genes, truth, ours, theirs) in made.cards["genes"].items():
        row = real.perturbations.index(name)
        assert count == (real.q[row] < runs[0].alpha).sum()
        assert len(genes) == min(count, 10) == len(ours) == len(theirs)
        first = real.genes.index(names[genes[0]])
        assert truth[0] == pytest.approx(float(real.fold[row, first]))
        assert np.abs(truth[0]) == pytest.approx(np.abs(real.fold[row][real.q[row] < runs[0].alpha]).max())


def test_pictures_belong_to_their_rows(runs):
    label = "B cell|donor 1|drug 2"
    made = table_of(runs, pictures={label: "fig-x"})
    ((row, anchor),) = made.cards["pictures"].items()
    assert "|".join(made.cards["labels"][row]) == label
    assert anchor == "fig-x"


def test_undefined_scores_are_said_and_stay_last(runs, tmp_path):
    path = make_run(tmp_path / "perturbdiff", "perturbdiff", cells=3)
    metrics = pd.read_parquet(path / "metrics.parquet")
    gone = (
        (metrics["metric"] == ENERGY)
        & (metrics["perturbation"] == "drug 0")
        & (metrics["scope"] == "B cell|donor 1")
    )
    table = metrics[metrics["metric"] == ENERGY].drop_duplicates(["scope", "perturbation"])
    keys = table["scope"].str.split("|", expand=True)
    labels = pd.DataFrame(
        {"cell_type": keys[0], "batch": keys[1], "perturbation": table["perturbation"], "n_cells": 7}
    )
    labels.to_csv(path / "conditions.csv", index=False)
    metrics.loc[gone, "value"] = np.nan
    metrics.to_parquet(path / "metrics.parquet")
    (focus,) = read_runs([path])
    made = perturbations("d1", [focus, *runs[1:]], focus, runs[1], {}, {})
    last = made.table.rows[-1]
    at = places(made.table)
    assert last.head == "drug 0"
    heads = ("cells", "Energy distance ↓, perturbdiff", "result, in Energy distance")
    assert [last.cells[at[head]].text for head in heads] == ["7", "n/a", "n/a"]
    assert made.cards["genes"] == {}
    record = json.loads(gzip.decompress(base64.b64decode(page_data([], {}, [made]))))["cards"][
        "d1-perturbations"
    ]
    assert record["scores"][0][0][-1] is None


def test_the_rows_on_the_page_are_bounded(runs, monkeypatch):
    assert MOST_ROWS >= 3000
    monkeypatch.setattr(sys.modules[perturbations.__module__], "MOST_ROWS", 4)
    made = table_of(runs)
    assert len(made.table.rows) == 4
    assert "4 worst of 10" in made.note
