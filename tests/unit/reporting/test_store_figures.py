"""Figures of a store's statistics, from tables laid out as `stats` writes them, in a folder and in the report."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perturbdiff.reporting.figures.store_figures import pictures, write_figures
from perturbdiff.runtime.errors import UserError

TYPES = ["B", "CD4 <naive>", "NA", "Plasmablast"]
ALL = {
    "sparsity",
    "sparsity-list",
    "sparsity-by-cell-type",
    "cells-per-perturbation",
    "cells-per-condition",
    "composition",
    "distances-perturbation",
    "distances-condition",
    "distances-by-cell-type",
}


def make_statistics(folder: Path, cell_types=TYPES, pairs: int = 40) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    edges = np.arange(10, 210, 4)
    for name, high in (("genes_per_cell", 900), ("genes_per_cell_list", 90)):
        counts = rng.integers(0, high, len(edges) - 1)
        pd.DataFrame({"lower": edges[:-1], "upper": edges[1:], "n_cells": counts}).to_csv(
            folder / f"{name}.csv", index=False
        )
    sizes = (2.0 ** np.arange(len(cell_types)) * 100).astype(int)
    rows = []
    for gene_set, genes in (("store", 2000), ("list", 300)):
        for scope, name, cells in (
            ("all cells", "all", sizes.sum()),
            *(("cell type", t, n) for t, n in zip(cell_types, sizes, strict=True)),
        ):
            rows.append((gene_set, scope, name, genes, cells, 10, 60, 80, 120, 200, 90.0, 90 / genes))
    names = ["gene_set", "scope", "cell_type", "n_genes", "n_cells", "minimum", "quartile_1", "median"]
    names += ["quartile_3", "maximum", "mean", "share_nonzero"]
    pd.DataFrame(rows, columns=names).to_csv(folder / "nonzero_by_cell_type.csv", index=False)
    for name, key in (
        ("cells_per_perturbation", "n_perturbations"),
        ("cells_per_condition", "n_conditions"),
    ):
        steps = 2 ** np.arange(4, 12)
        pd.DataFrame({"lower": steps[:-1], "upper": steps[1:], key: np.arange(1, 8)}).to_csv(
            folder / f"{name}.csv", index=False
        )
    share = sizes / sizes.sum()
    pd.DataFrame({"cell_type": cell_types, "n_cells": sizes, "share": share}).to_csv(
        folder / "cell_types.csv", index=False
    )
    write_distances(folder, cell_types, pairs, rng)
    size = {"median": 300.0, "quartile_1": 100.0, "quartile_3": 500.0, "mean": 321.5}
    summary = {
        "n_cells": int(sizes.sum()),
        "cells_per_perturbation": size,
        "cells_per_perturbed_condition": size,
        "distances": {"settings": {"cells_per_group": 256}, "cells_and_distance": {"spearman": -0.5}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "manifest.json").write_text(json.dumps({"stage": "stats", "seed": 0}))
    return folder


def write_distances(folder: Path, cell_types, pairs: int, rng: np.random.Generator) -> None:
    rows, means = [], []
    scopes = [("perturbation", ""), ("condition", ""), *(("cell type", t) for t in cell_types)]
    for level, cell_type in scopes:
        for kind, size in (("within", 0.0), ("between", 0.5), ("control", 0.2)):
            ed = rng.normal(0, 0.02, pairs) + size * rng.lognormal(0, 1, pairs)
            rows += [(level, kind, cell_type, "", f"p{i}", "q", 100, 100, e) for i, e in enumerate(ed)]
            label = cell_type or "all"
            mean = ed.mean()
            ends = (mean - 0.1, mean + 0.1)
            above = np.nan if kind == "within" else 0.9
            means.append((level, kind, label, pairs, 9, mean, *ends, ed.std(), np.median(ed), above))
    columns = ["level", "kind", "cell_type", "batch", "group_a", "group_b", "n_a", "n_b", "ed"]
    table = pd.DataFrame(rows, columns=columns)
    table.assign(root=np.sqrt(table["ed"].clip(lower=0))).to_csv(folder / "distances.csv", index=False)
    names = [
        "level",
        "kind",
        "cell_type",
        "n_pairs",
        "n_perturbations",
        "mean",
        "low",
        "high",
        "sd",
        "median",
    ]
    summary = pd.DataFrame(means, columns=[*names, "above_within"])
    summary.to_csv(folder / "distance_summary.csv", index=False)


def texts(svg: str) -> str:
    return " ".join(t.text or "" for t in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))


def test_files_beside_the_tables(tmp_path):
    folder = make_statistics(tmp_path / "stats")
    write_figures(folder)
    found = {path.stem: path.read_text() for path in (folder / "plots").iterdir()}
    assert set(found) == ALL
    assert all("script" not in svg for svg in found.values())
    assert "28 perturbations" in texts(found["cells-per-perturbation"])
    assert "mean 321.5 cells" in texts(found["cells-per-perturbation"])
    assert "28 combinations" in texts(found["cells-per-condition"])
    assert "4.5 % non-zero" in texts(found["sparsity"])
    assert "30.0 % non-zero" in texts(found["sparsity-list"])
    for name in ("composition", "distances-by-cell-type", "sparsity-by-cell-type"):
        words = texts(found[name])
        assert all(t in words for t in TYPES), name
    assert "53.3 %" in texts(found["composition"])
    assert "40 pairs" in texts(found["distances-condition"])


def test_same_tables_give_the_same_bytes(tmp_path):
    folder = make_statistics(tmp_path / "stats")
    assert [p.svg for p in pictures([folder])[0].plots] == [p.svg for p in pictures([folder])[0].plots]


def test_equal_tables_are_drawn_once(tmp_path):
    folders = [make_statistics(tmp_path / name) for name in ("random", "by-donor")]
    other = make_statistics(tmp_path / "other", TYPES[:3], pairs=5)
    (folders[1] / "split.csv").write_text("split,n_cells\ntrain,5\n")
    found = pictures([folders[0], other, folders[1]])
    assert [p.name for p in found] == ["Data sets side by side", "random, by-donor", "other"]
    assert found[2].plots[0].name.startswith("data-2-")
    both = found[0].plots[0]
    assert "random, by-donor" in texts(both.file)
    area = (both.data["density"] * (both.data["upper"] - both.data["lower"])).groupby(both.data["data"]).sum()
    np.testing.assert_allclose(area, 1.0)


def test_the_largest_of_many_cell_types(tmp_path):
    folder = make_statistics(tmp_path / "stats", [f"type {i}" for i in range(40)], pairs=3)
    shown = {plot.name: (plot, caption) for plot, caption in pictures([folder])[0].figures}
    plot, caption = shown["data-1-composition"]
    assert "The 30 largest of 40" in caption
    assert list(plot.data["cell_type"][:2]) == ["type 39", "type 38"]


def test_tables_of_an_older_version_are_enough(tmp_path):
    folder = make_statistics(tmp_path / "stats")
    for name in ("distances", "distance_summary", "nonzero_by_cell_type", "cells_per_condition"):
        (folder / f"{name}.csv").unlink()
    found = pictures([folder])[0]
    assert {p.name for p in found.plots} == {"data-1-cells-per-perturbation", "data-1-composition"}
    assert found.distances is None


def test_few_groups_and_no_distances(tmp_path):
    folder = make_statistics(tmp_path / "stats", ["all"], pairs=1)
    table = pd.read_csv(folder / "cells_per_perturbation.csv")
    table.head(1).to_csv(folder / "cells_per_perturbation.csv", index=False)
    names = {p.name for p in pictures([folder])[0].plots}
    assert names == {"data-1-sparsity", "data-1-sparsity-list", "data-1-cells-per-condition"}


def test_a_broken_table_is_named(tmp_path):
    folder = make_statistics(tmp_path / "stats")
    (folder / "distances.csv").write_text('a,b\n1,"2,3\n')
    with pytest.raises(UserError, match=r"distances\.csv"):
        pictures([folder])


def test_report_shows_figures_of_each_store(counts_file, tmp_path):
    from perturbdiff.baselines.baseline_stage import predict
    from perturbdiff.config import recipes
    from perturbdiff.config.settings import EvaluateConfig
    from perturbdiff.evaluation.evaluation_stage import evaluate
    from perturbdiff.preprocessing.preprocessing_stage import preprocess
    from perturbdiff.reporting.page.page import write_report
    from perturbdiff.splits.splits import make_split

    recipe = recipes.load("tiny", ["split.held_out=[d2]"])
    store = preprocess([counts_file], tmp_path / "store", recipe.data)
    split = make_split(store, tmp_path / "split.parquet", recipe)
    predicted = predict("control", store, split, tmp_path / "predictions.h5ad")
    run = evaluate(predicted, store, tmp_path / "metrics", EvaluateConfig())
    folders = [make_statistics(tmp_path / "one"), make_statistics(tmp_path / "two", TYPES[:2])]
    out = write_report([run], tmp_path / "report.html", statistics=folders)
    page = out.read_text()
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    for number in (1, 2):
        for name in ALL:
            assert (tmp_path / "report_figures" / f"data-{number}-{name}.svg").is_file(), name
            assert (tmp_path / "report_figures" / f"data-{number}-{name}.csv").is_file()
    assert page.count("Perturbations within a cell type and batch") > 4
    assert "Their rank correlation is −0.50." in page
    assert page.count("<script") == 2  # the page's own, and its data
    assert len(page) < 10_000_000
