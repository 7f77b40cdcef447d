"""Gates that follow the data: what moves them, how far, and that an interruption changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_training import G, tiny_batch, tiny_module

from perturbdiff import recipes
from perturbdiff.bundle import Bundle
from perturbdiff.training.gates import Gates
from perturbdiff.training.run import train

LIMIT = 0.3


def trainer(passes=1):
    alone = SimpleNamespace(reduce=lambda tensor, reduce_op: tensor)
    return SimpleNamespace(
        accumulate_grad_batches=passes, global_step=4, global_rank=0, world_size=1, strategy=alone
    )


def gated(rate=0.1):
    module = tiny_module(gate_rate=rate)
    module.denoiser.gate_threshold.fill_(LIMIT)
    return module, Gates(module.denoiser, rate)


def test_a_gate_moves_by_rate_times_excess_and_never_below_the_detection_limit():
    module, gates = gated()
    module.excess = torch.tensor([0.5, -0.5, 0.0, 1.0, 0.1, -0.1])
    for _ in range(2):
        gates.on_train_batch_end(trainer(), module, None, None, 0)
    expected = [LIMIT + 0.1, LIMIT, LIMIT, LIMIT + 0.2, LIMIT + 0.02, LIMIT]
    assert module.denoiser.gate_threshold.tolist() == pytest.approx(expected)
    module.excess = -module.excess
    for _ in range(20):
        gates.on_train_batch_end(trainer(), module, None, None, 0)
    assert module.denoiser.gate_threshold.min() == LIMIT
    assert module.denoiser.gate_threshold[0] == LIMIT, "what rose comes back"


def test_the_passes_of_a_step_move_the_gates_once():
    module, gates = gated()
    for batch_idx, excess in enumerate([0.2, 0.6]):
        assert module.denoiser.gate_threshold.tolist() == pytest.approx([LIMIT] * G)
        module.excess = torch.full((G,), excess)
        gates.on_train_batch_end(trainer(passes=2), module, None, None, batch_idx)
    assert module.denoiser.gate_threshold.tolist() == pytest.approx([LIMIT + 0.1 * 0.4] * G)


def test_a_step_shows_the_shares_of_nonzeros(monkeypatch):
    module, batch = tiny_module(gate_rate=0.1), tiny_batch()
    module._trainer = trainer()  # pyright: ignore[reportAttributeAccessIssue]
    batch.target[:, :, 0] = 0
    batch.target[::2, :, 1] = 0
    prediction = torch.ones_like(batch.target)
    prediction[0, :, 2] = 0
    monkeypatch.setattr(module, "predict", lambda *_: prediction.requires_grad_())
    module.training_step(batch, 0)
    assert module.excess.tolist() == pytest.approx([1, 0.5, -1 / len(prediction), 0, 0, 0])
    assert not module.excess.requires_grad


def run(trained, out, *changes):
    recipe = recipes.load(
        "tiny",
        ["split.held_out=[d2]", "split.valid_fraction=0.4", "model.gate=true", "loss.mmd_statistic=cross",
         "loss.mse_weight=0", "train.ema_decay=0.5", "train.gate_rate=0.5", *changes],
    )  # fmt: skip
    return train(trained / "store", trained / "split.parquet", out, recipe, device="cpu")


def test_gates_are_averaged_kept_and_used(trained, tmp_path):
    fixed = Bundle.load(run(trained, tmp_path / "fixed", "train.gate_rate=0")).model
    moved = Bundle.load(run(trained, tmp_path / "moved")).model
    limit = float(fixed.gate_threshold[0])
    assert fixed.gate_threshold.eq(limit).all()
    assert moved.gate_threshold.min() >= limit
    higher = moved.gate_threshold > limit
    assert 0 < higher.sum() < len(higher), "genes differ"
    value = moved.encode(moved.gate_threshold + limit) * 0.5
    between = (value > moved.encode(moved.gate_threshold.new_tensor(limit))) & higher
    assert between.any()
    assert (moved.decode(value)[between] == 0).all()
    assert (moved._gate(value)[between] == 0).all()


def test_interrupted_training_ends_with_the_same_gates(trained, tmp_path, power_cut):
    with pytest.raises(RuntimeError, match="power cut"):
        run(trained, tmp_path / "b")
    out = run(trained, tmp_path / "b")
    assert power_cut == [5]
    whole = run(trained, tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
