"""What of the CPA adapter works without CPA: labels, split, schedule, the scale of predictions, refusals."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from adapter_task import LABELS, write_task_folder

from perturbdiff.baselines.external import known_tools

CONTROL = "no treatment"
TARGET_SUM = 50.0


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(known_tools.load("cpa").adapter.parent))
    return import_module("run_cpa")


@pytest.fixture
def counts() -> np.ndarray:
    """Counts of 10 cells and 6 genes, with depth in genes that are not measured as well."""
    return np.random.default_rng(0).poisson(3.0, (10, 6)).astype(np.float32)


@pytest.fixture
def make_task(tmp_path: Path, adapter: ModuleType, counts: np.ndarray):
    def make(queries, *, has_counts: bool = True, **options):
        labels = [(CONTROL, "T", "1")] * 4 + [("A+B", "T", "1")] * 3 + [("<PAD>", "T_1", "1")] * 3
        depth = counts.sum(axis=1) + 7
        values = np.log1p(counts / depth[:, None] * TARGET_SUM).astype(np.float32)
        facts = {"n_counts": depth, "target_sum": TARGET_SUM, "has_counts": has_counts}
        write_task_folder(tmp_path, "cpa", labels, values, queries, options, **facts)
        return adapter.Task(tmp_path)

    return make


def test_labels_become_codes_without_meaning_to_cpa(adapter, make_task):
    task = make_task([("A+B", "T", "1", 0)])
    coded = adapter.coded_labels(task, task.train.obs)
    for column in LABELS:
        pairs = set(zip(task.labels(column), coded[column], strict=True))
        assert len(pairs) == len({label for label, _ in pairs}) == len({code for _, code in pairs})
    joined = coded[LABELS].agg("".join, axis=1)
    assert not joined.str.contains("[+_<>]").any()


def test_a_batch_without_training_cells_is_that_of_the_control(adapter, make_task):
    task = make_task([("A+B", "T", "new", 1), ("A+B", "T_1", "1", 8), ("A+B", "new", "1", 7)])
    found = adapter.known_queries(task)
    assert found["batch"].tolist() == ["1", "1", "1"]
    assert found["cell_type"].tolist() == ["T", "T_1", "T_1"]
    assert task.facts["queries_with_batch_of_their_control"] == 1
    assert task.facts["queries_with_cell_type_of_their_control"] == 1


@pytest.mark.parametrize("batch_size", [3, 4, 16, 512])
def test_no_batch_has_one_cell(adapter, batch_size):
    for n_cells in range(8, 700):
        valid = int((adapter.split_labels(n_cells, 0.1, batch_size, 0) == "valid").sum())
        assert valid >= 2
        assert valid <= round(0.1 * n_cells) + 4
        assert valid % batch_size != 1
        assert (n_cells - valid) % batch_size != 1


def test_the_split_depends_on_the_seed_alone(adapter):
    first, again, other = (adapter.split_labels(100, 0.2, 16, seed) for seed in (1, 1, 2))
    assert (first == "valid").sum() == 20
    assert (first == again).all()
    assert not (first == other).all()


@pytest.mark.parametrize(
    ("n_train", "changed", "expected"),
    [
        (1000, {}, (400, 5, 30, 50)),
        (1000, {"max_steps": 349}, (40, 5, 10, 10)),
        (10**9, {"max_steps": 1}, (2, 2, 0, 0)),
        (1000, {"check_val_every_n_epoch": 0}, (400, 400, 30, 50)),
        (1000, {"epochs": 1}, (2, 2, 0, 0)),
    ],
)
def test_a_training_ends_with_a_validation(adapter, n_train, changed, expected):
    settings = {"epochs": 400, "max_steps": 0, "batch_size": 128, "check_val_every_n_epoch": 5}
    settings |= {"n_epochs_pretrain_ae": 30, "n_epochs_adv_warmup": 50}
    found = adapter.schedule(settings | changed, n_train)
    assert tuple(found[name] for name in ("epochs", "check_every", "pretrain", "warmup")) == expected


def test_counts_come_back_to_the_scale_of_the_data(adapter, make_task, counts):
    task = make_task([("A+B", "T", "1", 0)])
    expression = adapter._expression(task, np.arange(10)).toarray()
    np.testing.assert_array_equal(expression, counts)
    depth = task.train.obs["n_counts"].to_numpy(np.float64)
    np.testing.assert_allclose(adapter.log1p_at_depth(counts, depth, TARGET_SUM), task.dense(), rtol=1e-6)
    assert adapter.log1p_at_depth(counts, np.zeros(10), TARGET_SUM).dtype == np.float32


def test_cells_without_counts_are_left_out(adapter, make_task, counts):
    counts[2] = 0
    task = make_task([("A+B", "T_1", "1", 0), ("A+B", "T_1", "1", 1), ("<PAD>", "T", "1", 2)])
    cells = adapter._cells(task, task.queries)
    assert task.facts["cells_without_counts"] == 1
    assert cells.obs["split"].value_counts()["ood"] == 2
    assert cells.n_obs == 9 + 2
    np.testing.assert_array_equal(cells.X[9].toarray()[0], counts[0])


@pytest.mark.parametrize(
    ("options", "has_counts", "reason"),
    [
        ({"recon_loss": "nb"}, False, "set baseline.options.recon_loss=gauss"),
        ({"recon_loss": "poisson"}, True, "must be one of nb, zinb, gauss"),
        ({"batch_size": 2}, True, "batch_size is 2; it must be at least 3"),
        ({"valid_fraction": 1.0}, True, "must lie between 0 and 1"),
    ],
)
def test_refusals_say_what_to_do(adapter, make_task, capsys, options, has_counts, reason):
    task = make_task([("A+B", "T", "1", 0)], has_counts=has_counts, **options)
    with pytest.raises(SystemExit) as stop:
        adapter._require_settings(task)
    assert stop.value.code == 3
    assert reason in capsys.readouterr().err


def test_log1p_values_go_to_the_gaussian_loss(adapter, make_task):
    task = make_task([("A+B", "T", "1", 0)], has_counts=False, recon_loss="gauss")
    adapter._require_settings(task)
    np.testing.assert_array_equal(adapter._expression(task, np.arange(10)).toarray(), task.dense())


def test_a_python_without_tkinter_gets_a_stand_in(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "tkinter", None)  # an import of it fails
    adapter.load_without_tkinter()
    assert sys.modules["tkinter"].N == "n"


@pytest.mark.parametrize(
    ("found", "capability", "reason"),
    [
        (False, (0, 0), "torch 2.0.0 finds no GPU"),
        (True, (8, 0), ""),
        (True, (8, 9), ""),
        (True, (9, 0), "torch 2.0.0 is built for GPUs up to sm_86, this one is sm_90"),
    ],
)
def test_gpus_that_torch_cannot_use_are_told(adapter, found, capability, reason):
    cuda = SimpleNamespace(
        is_available=lambda: found,
        get_device_capability=lambda: capability,
        get_arch_list=lambda: ["sm_37", "sm_80", "sm_86"],
    )
    assert adapter.why_no_gpu(SimpleNamespace(__version__="2.0.0", cuda=cuda)) == reason
