"""What of the STATE adapter works without STATE: labels, sets, refusals, the files it writes for the tool."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from adapter_task import LABELS, write_task_folder

from perturbdiff.baselines.external import known_tools
from perturbdiff.baselines.external.task_folder import ADAPTERS

CONTROL, ODD = "no treatment", 'drug "A", 1.0µM/${x} [b]'


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ADAPTERS))
    return import_module("run_state")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task: cell type 'T.1' with controls and a perturbation with an odd name, 'B' with controls alone."""
    labels = [(CONTROL, "T.1", "1")] * 6 + [(ODD, "T.1", "1")] * 5 + [(CONTROL, "B", "1")] * 4
    values = np.random.default_rng(0).poisson(1.0, (len(labels), 4)).astype(np.float32)
    queries = [(ODD, "B", "1", row) for row in (11, 12, 13, 14, 11)]
    return write_task_folder(tmp_path, "state", labels, values, queries, seed=3)


def task(folder: Path, **settings: Any) -> Any:
    found = import_module("perturbdiff_adapter").Task(folder)
    found.settings.update(settings)
    return found


def test_settings_fit_together(adapter: ModuleType, folder: Path) -> None:
    for kind in ("recommended", "quick"):
        adapter.check(task(folder, **known_tools.load("state").resolve(kind, {})))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_attention_heads": 3}, "hidden_dim 128 cannot be divided among num_attention_heads 3"),
        ({"num_attention_heads": 0}, "cannot be divided among num_attention_heads 0"),
        ({"max_steps": 0}, "max_steps is 0; it must be at least 1"),
        ({"cell_set_len": 1}, "a set needs at least 2 cells"),
        ({"basal_mapping_strategy": "nearest"}, "it must be 'random' or 'batch'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    adapter: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str], settings: dict, reason: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        adapter.check(task(folder, **settings))
    assert ended.value.code == 3
    assert reason in capsys.readouterr().err


def test_unseen_perturbations_are_refused(
    adapter: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queries = pd.read_csv(folder / "queries.csv")
    queries.assign(perturbation="new").to_csv(folder / "queries.csv", index=False)
    with pytest.raises(SystemExit) as ended:
        adapter.check(task(folder))
    assert ended.value.code == 3
    assert "do not occur in training: 1 (new)" in capsys.readouterr().err


def test_the_tool_sees_codes_in_the_order_of_the_labels(adapter: ModuleType, folder: Path) -> None:
    found = task(folder)
    code = adapter.codes(found)
    assert code["perturbation"] == {ODD: "perturbation000000", CONTROL: "perturbation000001"}
    adapter.write_cells(found, code)
    cells = anndata.read_h5ad(folder / adapter.CELLS / "cells.h5ad")
    for column in LABELS:
        back = {value: label for label, value in code[column].items()}
        assert [back[value] for value in cells.obs[column]] == found.labels(column).tolist()
    np.testing.assert_array_equal(cells.obsm[adapter.EMBEDDING], found.dense())


def test_all_given_cells_are_for_training(adapter: ModuleType, folder: Path) -> None:
    found = task(folder)
    adapter.write_cells(found, adapter.codes(found))
    split = tomllib.loads((folder / adapter.SPLIT).read_text())
    assert split == {"datasets": {"cells": adapter.CELLS}, "training": {"cells": "train"}}
    assert found.facts["training_cells"] == len(found.train)


def test_cells_without_any_control_of_their_type_are_left_out(adapter: ModuleType, folder: Path) -> None:
    found = task(folder)
    types = found.train.obs["cell_type"].astype(str)
    types[(found.train.obs["perturbation"] == ODD).to_numpy()] = "NK"
    found.train.obs["cell_type"] = types.astype("category")
    rows = adapter.usable(found)
    assert rows.tolist() == [*range(6), *range(11, 15)]
    assert found.facts["training_cells_without_control"] == 5


def test_configuration_names_the_settings_as_the_tool_does(adapter: ModuleType, folder: Path) -> None:
    found = adapter.changes(task(folder, hidden_dim=96, num_attention_heads=6), "perturbation000001")
    assert found["model.kwargs.hidden_dim"] == 96
    backbone = "model.kwargs.transformer_backbone_kwargs."
    assert found[backbone + "head_dim"] == 16
    assert found[backbone + "num_attention_heads"] == found[backbone + "num_key_value_heads"] == 6
    assert found["training.train_seed"] == found["data.kwargs.random_seed"] == 3
    assert found["data.kwargs.control_pert"] == "perturbation000001"
    assert found["data.kwargs.num_workers"] == 0


def many(*sizes: int) -> pd.DataFrame:
    """Return queries of one perturbation and cell type, in a batch for each size."""
    batch = np.repeat([str(i) for i in range(len(sizes))], sizes)
    return pd.DataFrame({"perturbation": "p", "cell_type": "T", "batch": batch})


@pytest.mark.parametrize("n", [1, 31, 32, 33, 65, 96])
def test_sets_are_no_larger_than_in_training_and_nearly_equal(adapter: ModuleType, n: int) -> None:
    found = adapter.sets(many(n), 32, ["perturbation", "cell_type"], seed=0)
    assert sorted(np.concatenate(found)) == list(range(n))
    sizes = [len(one) for one in found]
    assert max(sizes) <= 32
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // 32)


def test_sets_mix_batches_only_where_training_does(adapter: ModuleType) -> None:
    queries = many(40, 40)
    mixed = adapter.sets(queries, 32, ["perturbation", "cell_type"], seed=0)
    apart = adapter.sets(queries, 32, ["perturbation", "cell_type", "batch"], seed=0)
    assert all(queries["batch"].iloc[rows].nunique() == 2 for rows in mixed)
    assert all(queries["batch"].iloc[rows].nunique() == 1 for rows in apart)


def test_sets_follow_the_seed(adapter: ModuleType) -> None:
    def made(seed: int) -> list[list[int]]:
        return [rows.tolist() for rows in adapter.sets(many(70), 32, ["perturbation", "cell_type"], seed)]

    assert made(1) == made(1)
    assert made(1) != made(2)
