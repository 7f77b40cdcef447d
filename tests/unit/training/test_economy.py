"""What saves memory or time does not change what is learned."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from tiny_training import tiny_batch, tiny_module

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.module import check_compiler
from perturbdiff.training.training_stages import train


def gradients(**settings):
    own, sets = tiny_module(depth=3, **settings), tiny_batch()
    draws = own.draws(sets.target.shape, 5)._replace(self_condition=True)
    loss = own.objective(sets, draws)["total"]
    loss.backward()
    return loss.item(), {name: p.grad for name, p in own.denoiser.named_parameters() if p.grad is not None}


def test_recomputed_activations_give_the_same_gradients(monkeypatch):
    from perturbdiff.model import denoiser

    calls = []
    checkpoint = denoiser.checkpoint
    monkeypatch.setattr(denoiser, "checkpoint", lambda *a, **k: calls.append(a) or checkpoint(*a, **k))
    loss, plain = gradients()
    assert not calls
    again, recomputed = gradients(checkpoint_activations=True)
    assert len(calls) == 3  # each block once; the pass without gradient is not recomputed
    assert again == loss
    assert recomputed.keys() == plain.keys()
    assert all(torch.equal(recomputed[name], plain[name]) for name in plain)


def run(trained, out, *changes):
    recipe = recipes.load(
        "tiny",
        ["split.held_out=[d2]", "split.valid_fraction=0.4", "train.max_steps=4", "train.log_every=1",
         "train.valid_every=4", "train.ema_every=1", "model.width=16", *changes],
    )  # fmt: skip
    return Bundle.load(train(trained / "store", trained / "split.parquet", out, recipe, device="cpu"))


@pytest.fixture(scope="module")
def plain(trained, tmp_path_factory):
    return run(trained, tmp_path_factory.mktemp("plain") / "bundle")


def test_bfloat16_learns_about_the_same(trained, plain, tmp_path):
    half = run(trained, tmp_path / "b", "train.precision=bf16-mixed")
    assert all(tensor.dtype == torch.float32 for tensor in half.model.state_dict().values())
    for term in ("total", "energy"):
        values, expected = half.curve[term].dropna(), plain.curve[term].dropna()
        assert np.isfinite(values).all()
        np.testing.assert_allclose(values, expected, rtol=0.03)
        assert not np.array_equal(values, expected)


def assert_the_same(compiled, plain):
    one, other = plain.model.state_dict(), compiled.model.state_dict()
    assert list(one) == list(other)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(compiled.curve["total"], plain.curve["total"], rtol=1e-4)


def test_a_captured_network_learns_the_same_under_the_same_names(trained, plain, tmp_path, monkeypatch):
    compiler, captured = torch.compile, []

    def capture(function):  # all of torch.compile but the machine code, which takes minutes
        captured.append(function)
        return compiler(function, backend="eager")

    monkeypatch.setattr(torch, "compile", capture)
    assert_the_same(run(trained, tmp_path / "b", "train.compile=true"), plain)
    assert len(captured) == 1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs a C++ compiler")
def test_a_compiled_network_learns_the_same(trained, tmp_path, monkeypatch):
    """Machine code for one way through the network; the test above takes all ways."""
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # processes would load torch anew
    few = ("model.depth=1", "train.self_condition=0", "train.choose=last")
    plain = run(trained, tmp_path / "a", *few)
    assert_the_same(run(trained, tmp_path / "b", "train.compile=true", *few), plain)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for device in ("cpu", "cuda"):
        with pytest.raises(UserError, match="train.compile: .* needs a compiler"):
            check_compiler(device)


def test_a_term_without_weight_is_left_out(trained, tmp_path):
    bundle = run(trained, tmp_path / "b", "loss.mse_weight=0")
    assert bundle.curve["mse"].isna().all()
    training = bundle.curve[bundle.curve["split"] == "train"]
    np.testing.assert_array_equal(training["total"], training["mmd"])
