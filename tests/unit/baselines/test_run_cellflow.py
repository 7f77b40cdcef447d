"""What of the CellFlow adapter works without CellFlow: components, populations, embeddings, groups, refusals."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.sparse as sp
from adapter_task import write_task_folder

from perturbdiff.baselines.external import known_tools

CONTROL = "non-targeting"
LINES = [
    (CONTROL, "T", "1"),
    (CONTROL, "T", "2"),
    (CONTROL, "B|1", "1"),
    ("IFN β/γ, {x}", "T", "1"),
    ("a'b\"c", "T", "3"),
    ("p000000", "B|1", "9"),
    ("control", "new", "2"),
    ("control", "new", "9"),
]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(known_tools.load("cellflow").adapter.parent))
    return import_module("run_cellflow")


@pytest.fixture
def cells(adapter: ModuleType) -> ModuleType:
    return import_module("cellflow_cells")


@pytest.fixture
def make_task(tmp_path: Path, adapter: ModuleType):
    def make(queries, lines=LINES, **options):
        values = np.random.default_rng(0).exponential(size=(len(lines), 5)).astype(np.float32)
        write_task_folder(tmp_path, "cellflow", lines, values, queries, options, n_counts=10, target_sum=10.0)
        return adapter.Task(tmp_path)

    return make


def test_components_are_those_of_the_centred_cells(cells) -> None:
    rng = np.random.default_rng(0)
    values = sp.csr_matrix(rng.poisson(0.7, (5000, 12)).astype(np.float32))  # more rows than a block
    found = cells.components(values, 4)
    centred = values.toarray().astype(np.float64) - values.toarray().mean(axis=0)
    _, singular, right = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(np.sum(found.loadings * right[:4].T, axis=0)), 1, atol=1e-5)
    assert found.share == pytest.approx(np.sum(singular[:4] ** 2) / np.sum(singular**2))
    np.testing.assert_allclose(found.project(values), centred @ found.loadings, atol=1e-4)


def test_all_components_give_the_cells_back(cells) -> None:
    values = sp.csr_matrix(np.random.default_rng(0).poisson(0.7, (40, 6)).astype(np.float32))
    found = cells.components(values, 100)
    assert found.loadings.shape == (6, 6)
    np.testing.assert_allclose(found.decode(found.project(values)), values.toarray(), atol=1e-5)
    assert found.decode(np.full((1, 6), -50, np.float32)).min() == 0


def test_few_or_equal_cells_have_components_too(cells) -> None:
    found = cells.components(sp.csr_matrix(np.ones((3, 6), np.float32)), 50)
    assert found.loadings.shape == (6, 2)
    assert np.isfinite(found.decode(found.project(sp.csr_matrix(np.ones((3, 6), np.float32))))).all()


def test_a_context_without_controls_borrows_those_of_its_cell_type_then_batch(cells) -> None:
    _, cell_type, batch = (np.array(column, dtype=object) for column in zip(*LINES, strict=True))
    controls = cells.Controls(cell_type, batch, np.arange(8) < 3)
    rng = np.random.default_rng(0)
    assert controls.rows(("T", "2"), rng).tolist() == [1]
    assert controls.rows(("T", "3"), rng).tolist() == [0, 1]
    assert controls.rows(("new", "1"), rng).tolist() == [0, 2]
    assert controls.rows(("new", "9"), rng).tolist() == [0, 1, 2]
    assert [controls.has(("T", "2")), controls.has(("T", "3"))] == [True, False]


def test_borrowed_controls_are_limited(cells) -> None:
    label = np.full(30_000, "x", dtype=object)
    controls = cells.Controls(label, label, np.ones(30_000, dtype=bool))
    assert len(controls.rows(("x", "y"), np.random.default_rng(0))) == 10_000
    assert len(controls.rows(("x", "x"), np.random.default_rng(0))) == 30_000


def test_every_population_of_the_training_has_controls_and_perturbed_cells(adapter, make_task) -> None:
    task = make_task([("control", "T", "2", 1), ("p000000", "B|1", "1", 2)])
    found, embeddings = adapter.training_data(task, np.arange(16, dtype=np.float32).reshape(8, 2))
    counts = found.obs.groupby("population", observed=True)["is_control"].agg(["sum", "size"])
    assert (counts["sum"] > 0).all()
    assert (counts["size"] > counts["sum"]).all()
    assert len(counts) == task.facts["contexts_trained"] == 5
    assert task.facts["contexts_not_trained"] == ["B|1 | 1", "T | 2"]
    assert task.facts["contexts_without_controls"] == ["B|1 | 9", "T | 3", "new | 2", "new | 9"]
    assert {name: len(vectors) for name, vectors in embeddings.items()} == {"context": 7}
    assert len(found.uns["context_embedding"]) == 7


def test_labels_become_codes(adapter, make_task) -> None:
    task = make_task([("control", "T", "2", 1)])
    found, _ = adapter.training_data(task, np.zeros((8, 2), np.float32))
    assert set(found.obs["perturbation"]) == {"control", "p000000", "p000001", "p000002", "p000003"}
    assert found.uns["names"][CONTROL] == "control"  # and a perturbation of that name is another
    assert found.uns["names"]["control"] != "control"
    vectors = np.stack(list(found.uns["perturbation_embedding"].values()))
    np.testing.assert_array_equal(vectors, np.eye(4, dtype=np.float32))


def test_one_context_says_nothing(adapter, make_task) -> None:
    lines = [(CONTROL, "T", "1"), (CONTROL, "T", "1"), ("a", "T", "1")]
    for kind in ("controls", "one-hot"):
        task = make_task([("a", "T", "1", 0)], lines, context=kind)
        _, embeddings = adapter.training_data(task, np.ones((3, 2), np.float32))
        assert embeddings == {}


def test_contexts_one_hot_and_by_their_controls(cells) -> None:
    contexts = [("A", "1"), ("B", "1"), ("C", "1")]
    means = np.array([[0.0, 9.0], [3.0, 9.0], [6.0, 9.0]], np.float32)
    one_hot = cells.context_embeddings("one-hot", contexts, means)
    assert list(one_hot) == ["cell_type"]
    np.testing.assert_array_equal(one_hot["cell_type"], np.eye(3, dtype=np.float32))
    by_controls = cells.context_embeddings("controls", contexts, means)["context"]
    np.testing.assert_allclose(by_controls, [[-np.sqrt(3), 0], [0, 0], [np.sqrt(3), 0]], atol=1e-6)
    same = cells.context_embeddings("controls", contexts, np.ones((3, 2), np.float32))["context"]
    assert np.isfinite(same).all()


def test_groups_of_all_sizes_share_one_shape(cells) -> None:
    assert cells.group_size([3]) == 32
    assert cells.group_size([1000] * 5) == 1024
    assert cells.group_size([60] * 20 + [120]) in (64, 128)
    for n in (1, 31, 32, 33, 100):
        rows = np.arange(n) + 7
        pieces = cells.filled_chunks(rows, 32)
        assert {len(piece) for piece in pieces} == {32}
        np.testing.assert_array_equal(np.concatenate(pieces)[:n], rows)
        assert set(np.concatenate(pieces)) == set(rows)


def test_decoding_is_by_blocks(adapter, cells) -> None:
    values = sp.csr_matrix(np.random.default_rng(0).poisson(0.7, (40, 6)).astype(np.float32))
    fitted = cells.components(values, 3)
    coordinates = np.random.default_rng(1).normal(size=(9000, 3)).astype(np.float32)
    np.testing.assert_array_equal(adapter.decode(fitted, coordinates), fitted.decode(coordinates))


def test_an_unknown_context_setting_is_refused(adapter, make_task, monkeypatch, capsys) -> None:
    task = make_task([("control", "T", "2", 1)], context="batches")
    monkeypatch.setattr(adapter, "open_task", lambda: task)
    with pytest.raises(SystemExit) as ended:
        adapter.main()
    assert ended.value.code == 3
    assert "refused: context='batches' is none of controls, one-hot" in capsys.readouterr().err
