"""What each switch of sampling does to a bundle's predictions."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from perturbdiff import sampling
from perturbdiff.baselines.baseline_task import Task
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import SampleConfig
from perturbdiff.predictions import read_predictions
from perturbdiff.runtime.errors import UserError
from perturbdiff.sampling import ConditionSampler, condition_sampler
from perturbdiff.sampling import starting_controls as controls
from perturbdiff.sampling.sampling_stage import Job, reinitialise
from perturbdiff.sampling.starting_controls import ControlSets
from perturbdiff.store.store import Store


def wanted(tmp_path, guidance=None):
    table = pd.DataFrame(
        {"cell_type": ["B", "T"], "batch": ["d1", "d2"], "perturbation": ["p1", "p2"], "n_cells": 20}
    )
    path = tmp_path / f"wanted{guidance}.csv"
    (table if guidance is None else table.assign(guidance=guidance)).to_csv(path, index=False)
    return path


def cells(trained, tmp_path, config=None, guidance=None, bundle=None, **options):
    """Predicted cells of both conditions, and the file."""
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5ad"
    settings = SampleConfig(**{"num_steps": 3, **(config or {})})
    sampling.sample(
        bundle or trained / "bundle", trained / "store", out, conditions=wanted(tmp_path, guidance),
        config=settings, device="cpu", **options,
    )  # fmt: skip
    adata = read_predictions(out)
    x = adata[adata.obs["source"] == "predicted"].X.toarray()
    return x[:20], x[20:], adata


def test_guidance_per_condition(trained, tmp_path):
    weak = cells(trained, tmp_path, {"guidance": 0.0})
    strong = cells(trained, tmp_path, {"guidance": 3.0})
    each = cells(trained, tmp_path, {"guidance": 3.0}, guidance=[0.0, None])
    assert not np.allclose(weak[1], strong[1], atol=1e-3)
    np.testing.assert_array_equal(each[0], weak[0])
    np.testing.assert_allclose(each[1], strong[1], atol=1e-5)
    assert each[2].uns["perturbdiff"]["guidance"] == "per condition"
    assert strong[2].uns["perturbdiff"]["guidance"] == 3.0


@pytest.mark.parametrize(
    "config",
    [
        {"start_level": 3},
        {"num_steps": 5, "start_level": 500},
        {"eta": 1.0},
        {"sampler": "ddpm"},
        {"sampler": "ddpm", "ddpm_variance": "beta"},
        {"self_condition": False},
        {"num_steps": 1},
        {"controls": "balanced"},
    ],
)
def test_each_switch_makes_a_difference(trained, tmp_path, config):
    plain, other = cells(trained, tmp_path)[0], cells(trained, tmp_path, config)[0]
    assert np.isfinite(other).all()
    assert not np.allclose(plain, other, atol=1e-4)


def test_balanced_controls_are_those_the_baselines_start_from(trained):
    store = Store(trained / "store")
    table = store.conditions
    perturbed = np.flatnonzero(~table["is_control"].to_numpy(bool))[:3]
    asked = table.loc[perturbed, ["cell_type", "batch", "perturbation"]].assign(n_cells=20)
    sets = ControlSets(
        store, asked.reset_index(drop=True), GeneMap(store.genes, store.genes, name="it"),
        size=8, seed=3, choice="balanced",
    )  # fmt: skip
    task = Task(store, np.ones(len(table), bool), perturbed, 3)
    for request, condition in enumerate(perturbed):
        rows = task.matched(int(condition), 20)
        found = sets([(request, k) for k in range(3)]).flatten(0, 1)
        assert len(found) == 24
        np.testing.assert_array_equal(found[:20], store.expression(rows).toarray())
    for mean, condition in zip(sets.pool_means([0, 1, 2]), perturbed, strict=True):
        pool = table.loc[task.controls.pool(int(condition))]
        every = np.concatenate([np.arange(a, b) for a, b in zip(pool["start"], pool["stop"], strict=True)])
        np.testing.assert_allclose(mean, store.expression(every).toarray().mean(axis=0), atol=1e-6)


def test_a_pool_above_the_cache_is_read_again(trained, monkeypatch):
    """Memory does not grow with the pools of controls, and nothing is held for long."""
    asked = pd.read_csv(io.StringIO("cell_type,batch,perturbation,n_cells\nB,d1,p1,20\n"))
    found = []
    for least, most in ((controls._LEAST_CACHE, controls.stored_rows.CACHE_BYTES), (0, 100)):
        monkeypatch.setattr(controls, "_LEAST_CACHE", least)
        monkeypatch.setattr(controls.stored_rows, "CACHE_BYTES", most)
        sampler = Job(trained / "bundle", trained / "store", asked, None, 0, {}, random_init=False).open(
            "cpu"
        )
        assert sampler.store.cache_bytes == max(least, 100)
        found.append(sampler.draw(sampler.batches(sampler.shard(0, 1))[0])[0])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("value", [15.0, float("nan")])
def test_what_evaluate_would_refuse_is_refused_at_once(trained, tmp_path, monkeypatch, value):
    drawn = []

    def diverged(_model, _schedule, _settings, control, *_, **__):
        drawn.append(control)
        cells = torch.full_like(control, 14.9)
        cells[1, 2, 3] = value
        return cells

    monkeypatch.setattr(condition_sampler, "generate", diverged)
    with pytest.raises(
        UserError, match=r"diverged.*condition .*gene 'g\d+'.*below 15; train it longer"
    ) as raised:
        cells(trained, tmp_path, {"sets_per_batch": 2})
    assert "\n" not in str(raised.value)
    assert len(drawn) == 1
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".csv"]


def test_rounding_and_size_of_batches_make_hardly_any(trained, tmp_path):
    plain = cells(trained, tmp_path)[0]
    for config in ({"arithmetic": "single"}, {"sets_per_batch": 1}):
        np.testing.assert_allclose(cells(trained, tmp_path, config)[0], plain, atol=2e-3)


def test_mixed_precision_makes_little(trained, tmp_path):
    plain = cells(trained, tmp_path, {"guidance": 1.0})[0]
    mixed = cells(trained, tmp_path, {"guidance": 1.0, "precision": "bf16-mixed"})[0]
    assert mixed.dtype == np.float32
    assert 0 < np.abs(mixed - plain).mean() < 0.05


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_steps": 1001}, "num_steps=1001 is more than the model's 1000 levels"),
        ({"num_steps": 9, "start_level": 8}, "start_level=8 must lie between sample.num_steps=9 and"),
        ({"start_level": 2000}, "start_level=2000 must lie between"),
    ],
)
def test_refuses_levels_that_there_are_not(trained, tmp_path, config, message):
    with pytest.raises(UserError, match=message):
        cells(trained, tmp_path, config)


def test_random_initialisation(trained, tmp_path):
    model = Bundle.load(trained / "bundle")
    fresh = Bundle.load(trained / "bundle")
    state = torch.get_rng_state()
    reinitialise(fresh, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    for name, buffer in model.model.named_buffers():
        assert torch.equal(buffer, dict(fresh.model.named_buffers())[name])
    linear = "blocks.0.attention.qkv.weight"
    assert not torch.equal(model.model.state_dict()[linear], fresh.model.state_dict()[linear])
    one, _, adata = cells(trained, tmp_path, random_init=True)
    again = cells(trained, tmp_path, random_init=True)[0]
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, cells(trained, tmp_path, random_init=True, seed=1)[0])
    assert not np.allclose(one, cells(trained, tmp_path)[0])
    facts = adata.uns["perturbdiff"]
    assert facts["method"].endswith("-random-init")
    assert facts["random_init"]


def test_a_pretrained_bundle_sees_no_controls_and_no_perturbation(trained, tmp_path, monkeypatch, caplog):
    bundle = tmp_path / "pretrained"
    shutil.copytree(trained / "bundle", bundle)
    record = json.loads((bundle / "config.json").read_text())
    record["config"]["train"]["zero_control"] = True
    (bundle / "config.json").write_text(json.dumps(record))
    (bundle / "manifest.json").unlink()  # it would tell that the file was changed
    controls, ids = [], []
    draw = ConditionSampler.draw

    def watched(self, sets):
        model = self.bundle.model

        def embed_control(control, dataset):
            controls.append(control.abs().max().item())
            return embed(control, dataset)

        def conditioning(t, covariates):
            ids.append(covariates and covariates.perturbation.tolist())
            return condition(t, covariates)

        embed, model.embed_control = model.embed_control, embed_control
        condition, model.conditioning = model.conditioning, conditioning
        return draw(self, sets)

    monkeypatch.setattr(ConditionSampler, "draw", watched)
    adata = cells(trained, tmp_path, bundle=bundle)[2]
    assert set(controls) == {0.0}
    assert ids
    assert all(set(told) == {0} for told in ids if told is not None)
    assert "perturbations make no difference" in caplog.text
    assert adata.uns["perturbdiff"]["zero_control"]
