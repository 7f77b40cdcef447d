"""`perturbdiff baseline script`: from a store to predictions through an adapter, as a user runs it."""

import dataclasses
import json
import logging
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from fake_adapters import COPY, READ, WRITE, adapter
from noisy_store import noisy_store
from refusals import refused
from small_store import small_store

from perturbdiff.baselines import predict
from perturbdiff.baselines.external.external_stage import predict_external
from perturbdiff.baselines.external.methods import script_method
from perturbdiff.config.settings import BaselineConfig
from perturbdiff.predictions import read_predictions

OVERRIDES = ["split.valid_fraction=0", "split.train_fraction=0.34"]
DRAW = (
    COPY + "values = np.abs(values + np.random.default_rng(task['seed']).normal(size=values.shape))" + WRITE
)
RIDGE = Path(__file__).parents[4] / "docs" / "examples" / "ridge_adapter.py"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("script"), OVERRIDES)


@pytest.fixture
def run(run_cli, small, tmp_path):
    """Run an adapter with this text, or the one at a path."""

    def go(body, *options, out="p.h5ad", store=None):
        path = body if isinstance(body, Path) else adapter(tmp_path / "scripts", body)
        return run_cli("baseline", "script", store or small.store, "--split", small.split, "--out", tmp_path / out,
                       "--script", path, "--device", "cpu", *options)  # fmt: skip

    return go


def test_a_copy_of_the_controls_is_the_baseline_control(run, small, tmp_path):
    """Same draw, same order, same layout as the built-in of that name."""
    done = run(COPY + WRITE)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == str(tmp_path / "p.h5ad")
    predict("control", small.store, small.split, tmp_path / "control.h5ad")
    ours, theirs = read_predictions(tmp_path / "p.h5ad"), read_predictions(tmp_path / "control.h5ad")
    np.testing.assert_array_equal(ours.X.toarray(), theirs.X.toarray())
    assert ours.obs.equals(theirs.obs)
    assert ours.var_names.tolist() == theirs.var_names.tolist()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("p.")) == [
        "p.h5ad", "p.h5ad.log", "p.h5ad.manifest.json", "p.h5ad.run.json",
    ]  # fmt: skip
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_who_made_it_is_written_into_the_file_and_beside_it(run, tmp_path):
    facts = "(folder / 'facts.json').write_text(json.dumps({'seconds': {'train': 1.5}, 'from_control_row': True}))\n"
    done = run(COPY + "values -= 0.01\n" + facts + WRITE, "--name", "mine", "--seed", "3",
               "--set", "baseline.options.penalty=0.5")  # fmt: skip
    assert done.code == 0, done.err
    adata = read_predictions(tmp_path / "p.h5ad")
    uns = adata.uns["perturbdiff"]
    assert {k: uns[k] for k in ("method", "baseline", "baseline_kind", "settings", "seed", "conditions_seen")} == {
        "method": "mine", "baseline": "script", "baseline_kind": "script", "settings": "penalty=0.5", "seed": 3,
        "conditions_seen": 0,
    }  # fmt: skip
    assert len(uns["script"]) == 12
    assert uns["controls"] == "balanced"
    cells = adata.obs.groupby("source", observed=True)["cell"].agg(set)
    assert cells["predicted"] <= cells["control"]
    manifest = json.loads((tmp_path / "p.h5ad.manifest.json").read_text())
    assert manifest["config"]["settings"] == {"penalty": 0.5}
    assert manifest["inputs"]["script"]["name"] == "adapter.py"
    assert manifest["results"]["negative_share"] > 0.1
    assert "of its values are negative" in done.err
    record = json.loads((tmp_path / "p.h5ad.run.json").read_text())["method_run"]
    assert record["seconds"] == {"train": 1.5}
    assert record["process_cpu_seconds"] > 0
    assert record["peak_memory_mib"] > 5


def test_held_out_expression_changes_nothing_and_the_seed_does(run, small, tmp_path):
    assert run(DRAW).code == 0
    assert run(DRAW, out="noise.h5ad", store=noisy_store(small, tmp_path / "noisy" / "store")).code == 0
    assert run(DRAW, out="again.h5ad").code == 0
    assert run(DRAW, "--seed", "1", out="other.h5ad").code == 0
    first = (tmp_path / "p.h5ad").read_bytes()
    assert (tmp_path / "again.h5ad").read_bytes() == first
    assert (tmp_path / "noise.h5ad").read_bytes() == first
    assert (tmp_path / "other.h5ad").read_bytes() != first


def test_a_finished_run_is_not_repeated_unless_something_changed(run, small, tmp_path):
    count = adapter(tmp_path, "").with_name("runs")
    body = COPY + WRITE + f"open({str(count)!r}, 'a').write('x')"
    for _ in range(2):
        assert run(body).code == 0
    assert count.read_text() == "x"
    assert run(body, "--set", "baseline.options.a=1").code == 0
    assert run(body + "\n", "--set", "baseline.options.a=1").code == 0
    assert run(body + "\n", "--set", "baseline.options.a=1", "--force").code == 0
    assert count.read_text() == "xxxx"


def test_zarr_and_blocks(run, tmp_path, monkeypatch):
    assert run(COPY + WRITE).code == 0
    monkeypatch.setattr("perturbdiff.baselines.external.adapter_output._ROWS_PER_BLOCK", 7)
    assert run(COPY + WRITE, out="p.zarr").code == 0
    one, other = (read_predictions(tmp_path / name) for name in ("p.h5ad", "p.zarr"))
    np.testing.assert_array_equal(one.X.toarray(), other.X.toarray())


def test_what_it_was_given_can_be_kept(run, tmp_path):
    assert run(COPY + WRITE, "--keep", tmp_path / "kept", "--threads", "2").code == 0
    assert {p.name for p in (tmp_path / "kept").iterdir()} >= {
        "train.h5ad",
        "queries.csv",
        "task.json",
        "predictions.h5ad",
    }
    assert json.loads((tmp_path / "kept" / "task.json").read_text())["threads"] == 2
    refused(run(COPY + WRITE, "--keep", tmp_path / "kept", "--force"), "--keep", "is there already")


def test_any_program_will_do(run, small, tmp_path):
    assert run(COPY + WRITE, "--keep", tmp_path / "kept").code == 0
    script = adapter(tmp_path, f'#!/bin/sh\ncp {tmp_path}/kept/predictions.h5ad "$1"\n', "adapter.sh")
    refused(run(script, out="sh.h5ad"), "neither Python (.py) nor executable", "chmod +x")
    assert run(script, "--python", "sh", out="sh.h5ad").code == 0
    script.chmod(0o755)
    assert run(script, out="run.h5ad").code == 0
    assert (tmp_path / "sh.h5ad").read_bytes() != b""
    with h5py.File(tmp_path / "sh.h5ad") as a, h5py.File(tmp_path / "p.h5ad") as b:
        np.testing.assert_array_equal(a["X/data"][:], b["X/data"][:])


def test_options_that_do_not_belong_are_refused(run_cli, run, small, tmp_path):
    base = (small.store, "--split", small.split, "--out", tmp_path / "p.h5ad")
    refused(run_cli("baseline", "script", *base), "--script FILE")
    refused(run_cli("baseline", "linear", *base, "--script", "x.py"), "linear", "has no --script")
    refused(
        run_cli("baseline", "linear", *base, "--set", "baseline.options.a=1"), "has no --set baseline.options"
    )
    refused(run_cli("baseline", "cpa", *base, "--script", "x.py"), "cpa", "has no --script")
    refused(run_cli("baseline", "linaer", *base), "no baseline 'linaer', did you mean 'linear'?", "script")
    refused(run_cli("baseline", "instal", "cpa"), "did you mean 'install'?")
    refused(run(Path("no.py")), "script not found: no.py")
    refused(run(READ, "--python", "no-such-program"), "--python no-such-program")


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("cpa", ("--set", "baseline.options.epoch=3"), "did you mean 'epochs'?"),
        ("squidiff", (), "has no Squidiff"),
    ],
)
def test_tools_refuse_unknown_options_and_a_python_without_them(run_cli, small, tmp_path, name, option, said):
    base = (small.store, "--split", small.split, "--out", tmp_path / "p.h5ad")
    refused(run_cli("baseline", name, *base, "--python", sys.executable, *option), said)


def test_the_example_of_the_documentation(run, small, tmp_path):
    """Ridge regression: with a small penalty it finds the change of a perturbation seen in another batch."""
    done = run(RIDGE, "--name", "ridge", "--set", "baseline.options.penalty=0.1")
    assert done.code == 0, done.err
    predict("control", small.store, small.split, tmp_path / "control.h5ad")
    made, control = read_predictions(tmp_path / "p.h5ad"), read_predictions(tmp_path / "control.h5ad")
    truth = small.opened.conditions
    for label in ("p1", "p2", "p3"):
        rows = ((made.obs["perturbation"] == label) & (made.obs["source"] == "predicted")).to_numpy()
        if not rows.any():
            continue
        change = made.X[rows].toarray().mean(axis=0) - control.X[rows].toarray().mean(axis=0)
        kinds = set(made.obs["cell_type"][rows])
        real = []
        for i in np.flatnonzero((truth["perturbation"] == label) & truth["cell_type"].isin(kinds)):
            values = small.opened.expression(slice(truth["start"][i], truth["stop"][i])).toarray()
            c = truth["control"][i]
            own = small.opened.expression(slice(truth["start"][c], truth["stop"][c])).toarray()
            real.append(values.mean(axis=0) - own.mean(axis=0))
        assert np.corrcoef(change, np.mean(real, axis=0))[0, 1] > 0.5


@pytest.mark.parametrize(("kind", "warned"), [("recommended", True), ("quick", False)])
def test_recommended_settings_on_a_cpu_are_warned_of(small, tmp_path, caplog, monkeypatch, kind, warned):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)
    method = script_method(adapter(tmp_path, COPY + WRITE), BaselineConfig())
    method = dataclasses.replace(method, made_by=dataclasses.replace(method.made_by, settings=kind))
    with caplog.at_level(logging.WARNING):
        predict_external(method, small.store, small.split, tmp_path / "out.h5ad", device="cpu")
    assert ("for a GPU" in caplog.text) == warned
