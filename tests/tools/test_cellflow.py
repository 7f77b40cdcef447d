"""CellFlow, trained for a few steps by `perturbdiff baseline cellflow`: what comes out, the same again, odd data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
from small_store import SmallStore, small_store
from tiny_data import tiny_counts

from perturbdiff.baselines.external import known_tools, tool_environments

pytestmark = pytest.mark.tools

FEW: dict[str, Any] = {
    "iterations": 60,
    "batch_size": 16,
    "pcs": 8,
    "layers": 1,
    "time_freqs": 8,
    "tolerance": 0.01,
}
FEW |= dict.fromkeys(("hidden_width", "time_width", "decoder_width", "condition_width", "context_width"), 16)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if tool_environments.installed(known_tools.load("cellflow")) is None:
        pytest.skip(f"not installed in {tool_environments.root()}: perturbdiff baseline install cellflow")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    return small_store(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


def arguments(made: SmallStore, out: Path, seed: int = 0, threads: int = 1, **options: Any) -> list[Any]:
    """Return the words of the command."""
    sets = {"baseline.settings": "quick"}
    sets |= {f"baseline.options.{name}": value for name, value in {**FEW, **options}.items()}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    given = ["baseline", "cellflow", made.store, "--split", made.split, "--out", out]
    return [*given, "--config", "tiny", *words, "--threads", threads, "--device", "cpu", "--seed", seed]


def values_of(path: Path) -> np.ndarray:
    """Return all values, float32 [n, G]."""
    return anndata.read_h5ad(path).to_df().to_numpy()


@pytest.fixture
def predicted(run_cli, made: SmallStore, folder: Path) -> Path:
    out = folder / "cellflow.h5ad"
    if not out.exists():
        ended = run_cli(*arguments(made, out))
        assert ended.code == 0, ended.err
    return out


def test_cells_are_predicted_for_the_test_part(predicted: Path, made: SmallStore) -> None:
    found = anndata.read_h5ad(predicted)
    values = values_of(predicted)
    assert list(found.var_names) == list(made.opened.genes)
    assert np.isfinite(values).all()
    assert values.min() >= 0
    cells = found.obs[found.obs["source"] == "predicted"]
    assert len(cells)
    assert (cells["cell"].astype(str) != "").all()  # each is made from one control cell


def test_what_was_done_is_recorded(predicted: Path) -> None:
    run = json.loads(predicted.with_name(f"{predicted.name}.run.json").read_text())["method_run"]
    assert run["steps"] == FEW["iterations"]
    assert run["cells_seen"] == FEW["iterations"] * FEW["batch_size"]
    assert np.isfinite([run["loss_first"], run["loss_last"]]).all()
    assert {"train", "predict"} <= set(run["seconds"])


def test_the_same_seed_gives_the_same_bits(predicted: Path, run_cli, made: SmallStore, folder: Path) -> None:
    again, other = folder / "again.h5ad", folder / "other.h5ad"
    assert run_cli(*arguments(made, again)).code == 0
    assert run_cli(*arguments(made, other, seed=1)).code == 0
    first, second, third = map(values_of, (predicted, again, other))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, third)


def test_nothing_is_left_beside_the_output(predicted: Path) -> None:
    known = ("cellflow.h5ad", "again.h5ad", "other.h5ad")
    assert all(path.name.startswith(known) for path in predicted.parent.iterdir())


def test_one_context_and_odd_labels(run_cli, tmp_path: Path) -> None:
    counts = tiny_counts()
    named = counts.obs["perturbation"].astype(str)
    counts.obs["perturbation"] = named.where(named == "control", "β/γ|'\" {" + named + "},+")
    counts.obs["cell_type"] = "T cell, CD4+"
    made = small_store(tmp_path / "data", adata=counts)
    out = tmp_path / "odd.h5ad"
    ended = run_cli(*arguments(made, out, context="one-hot"))
    assert ended.code == 0, ended.err
    assert np.isfinite(values_of(out)).all()
