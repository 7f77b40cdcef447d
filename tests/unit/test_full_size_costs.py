"""The GPU hours that sheets and page tell are those that the sheets' recipes need."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("full_size")


def test_work_follows_from_the_recipe(costs):
    rows = costs.read_sheet("guidance")
    plain, twice = (
        costs.sampling(row, rows) for row in rows if row["id"] in ("replogle-w-1.0", "replogle-w-0.0")
    )
    assert plain.flops == 2 * twice.flops, "guidance is a second pass"
    (fit,) = (costs.fitting(row, rows) for row in rows if row["id"] == "replogle-w-1.0")
    assert fit.loaded == 2 * 20_000 * 16 * 32
    assert not costs.fitting(rows[1], rows).flops, "what is only sampled is not trained"


def test_the_prior_is_wide_and_what_keeps_its_genes_too(costs):
    rows = {row["id"]: row for row in costs.read_sheet("main")}
    genes = {name: costs.genes_of(row, list(rows.values())) for name, row in rows.items()}
    assert genes["prior"] == genes["pbmc-finetuned"] == genes["replogle-finetuned"] == 12_626
    assert genes["tahoe100m-finetuned"] == genes["pbmc-scratch"] == 2000


def test_the_slower_of_computing_and_loading_counts(costs):
    loader = {2000: 10.0, 12_626: 1.0}
    assert costs.Work(flops=0.7 * 19.5e12, loaded=20).seconds("32-true", loader) == 2.0
    assert costs.Work(flops=0.7 * 19.5e12, loaded=5).seconds("32-true", loader) == pytest.approx(1.0)


def test_page_and_sheets_tell_what_is_computed(costs):
    text, totals = costs.page(costs.loader_speed(ROOT / "benchmarks" / "measured" / "loader.json"))
    found = costs.differences(text, totals, ROOT / "docs" / "reproduce.md")
    assert not found, "run python benchmarks/full_size.py --update docs/reproduce.md"
