"""STATE, trained for a few steps by `perturbdiff baseline state`: what comes out, the same again, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
from small_store import SmallStore, small_store

from perturbdiff.baselines.external import known_tools, tool_environments

pytestmark = pytest.mark.tools

FEW = {"max_steps": 40, "cell_set_len": 8, "hidden_dim": 32, "num_hidden_layers": 1, "intermediate_size": 64}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    if tool_environments.installed(known_tools.load("state")) is None:
        pytest.skip(f"not installed in {tool_environments.root()}: perturbdiff baseline install state")
    return small_store(tmp_path_factory.mktemp("small"))


def values_of(path: Path) -> np.ndarray:
    """Return all values, float32 [n, G]."""
    return anndata.read_h5ad(path).to_df().to_numpy()


def arguments(made: SmallStore, out: Path, seed: int = 0, **options: Any) -> list[Any]:
    """Return the words of the command."""
    sets = {"baseline.settings": "quick"}
    sets |= {f"baseline.options.{name}": value for name, value in {**FEW, **options}.items()}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    given = ["baseline", "state", made.store, "--split", made.split, "--out", out]
    return [*given, "--config", "tiny", *words, "--threads", 1, "--device", "cpu", "--seed", seed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture
def predicted(run_cli, made: SmallStore, folder: Path) -> Path:
    out = folder / "state.h5ad"
    if not out.exists():
        ended = run_cli(*arguments(made, out))
        assert ended.code == 0, ended.err
    return out


def test_cells_are_predicted_for_the_test_part(predicted: Path, made: SmallStore) -> None:
    values = values_of(predicted)
    assert list(anndata.read_h5ad(predicted).var_names) == list(made.opened.genes)
    assert np.isfinite(values).all()
    assert values.min() >= 0
    assert values.max() <= 14


def test_the_loss_falls_and_is_recorded(predicted: Path) -> None:
    run = json.loads(predicted.with_name("state.h5ad.run.json").read_text())["method_run"]
    assert run["steps"] == FEW["max_steps"]
    assert run["cells_seen"] == FEW["max_steps"] * 8 * FEW["cell_set_len"]
    assert run["loss_last"] < run["loss_first"]
    assert {"import", "train", "predict"} <= set(run["seconds"])


def test_the_same_seed_gives_the_same_bits(predicted: Path, run_cli, made: SmallStore, folder: Path) -> None:
    again, other = folder / "again.h5ad", folder / "other.h5ad"
    assert run_cli(*arguments(made, again)).code == 0
    assert run_cli(*arguments(made, other, seed=1)).code == 0
    first, second, third = map(values_of, (predicted, again, other))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, third)


def test_nothing_is_left_beside_the_output(predicted: Path) -> None:
    known = ("state.h5ad", "again.h5ad", "other.h5ad")
    assert all(path.name.startswith(known) for path in predicted.parent.iterdir())


def test_a_set_of_controls_of_the_same_batch(run_cli, made: SmallStore, folder: Path) -> None:
    out = folder / "state.h5ad.batch.h5ad"
    assert run_cli(*arguments(made, out, max_steps=3, basal_mapping_strategy="batch")).code == 0


def test_settings_that_do_not_fit_are_refused(run_cli, made: SmallStore, folder: Path) -> None:
    out = folder / "refused.h5ad"
    ended = run_cli(*arguments(made, out, num_attention_heads=5))
    assert ended.code == 2
    assert "hidden_dim 32 cannot be divided among num_attention_heads 5" in ended.err
    assert not out.exists()
