"""An optimiser step in several forward passes is the same step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_training import B, G, S, tiny_batch, tiny_module

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.training_stages import train


@pytest.mark.parametrize("statistic", ["V", "cross"])
@pytest.mark.parametrize("world", [1, 2])
def test_parts_share_out_the_draws_of_one_pass(statistic, world):
    own = tiny_module(statistic)
    for rank in range(world):
        place = {"rank": rank, "world": world}
        whole = own.draws(torch.Size((B, S, G)), 5, **place)
        parts = [own.draws(torch.Size((B // 4, S, G)), 5, **place, part=p, parts=4) for p in range(4)]
        for values, expected in zip(zip(*parts, strict=True), whole, strict=True):
            if expected is None or isinstance(expected, bool):
                assert set(values) == {expected}
            else:
                assert torch.equal(torch.cat(values), expected)


@pytest.mark.parametrize("statistic", ["V", "cross"])
@pytest.mark.parametrize("parts", [2, 4])
def test_gradients_of_parts_are_the_gradient(statistic, parts):
    """As of ranks, whose gradients are averaged just so."""
    own, sets = tiny_module(statistic), tiny_batch()
    whole = own.objective(sets, own.draws(sets.target.shape, 5))
    whole["total"].backward()
    expected = {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}
    own.zero_grad()
    totals = []
    for part, some in enumerate(sets.split(parts)):
        draws = own.draws(some.target.shape, 5, part=part, parts=parts)
        loss = own.objective(some, draws)["total"]
        (loss / parts).backward()
        totals.append(loss.item())
    assert np.mean(totals) == pytest.approx(whole["total"].item(), rel=1e-6)
    for name, parameter in own.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def run(trained, out, *changes):
    recipe = recipes.load(
        "tiny",
        ["split.held_out=[d2]", "split.valid_fraction=0.4", "loss.mmd_statistic=cross",
         "train.sets_per_step=8", "train.max_steps=6", "train.log_every=1", "train.valid_every=3",
         "train.checkpoint_every=2", *changes],
    )  # fmt: skip
    return train(trained / "store", trained / "split.parquet", out, recipe, device="cpu")


@pytest.fixture(scope="module")
def in_two_passes(trained, tmp_path_factory):
    return run(trained, tmp_path_factory.mktemp("two") / "bundle", "train.accumulate=2")


def test_the_loss_curve_is_that_of_one_pass(trained, in_two_passes, tmp_path):
    one, two = Bundle.load(run(trained, tmp_path / "one")), Bundle.load(in_two_passes)
    assert two.curve["step"].tolist() == one.curve["step"].tolist() == [1, 2, 3, 3, 4, 5, 6, 6]
    for term in ("total", "mmd", "mse", "energy", "learning_rate"):
        np.testing.assert_allclose(two.curve[term], one.curve[term], rtol=5e-6, atol=1e-6)
    for name, tensor in two.model.state_dict().items():
        torch.testing.assert_close(tensor, one.model.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_interrupted_it_ends_with_the_same_bytes(trained, in_two_passes, tmp_path, power_cut):
    with pytest.raises(RuntimeError, match="power cut"):
        run(trained, tmp_path / "b", "train.accumulate=2")
    out = run(trained, tmp_path / "b", "train.accumulate=2")
    assert power_cut == [2]
    for name in ("model.safetensors", "training.csv"):
        assert (out / name).read_bytes() == (in_two_passes / name).read_bytes(), name
    assert load_file(out / "model.safetensors")


def test_sets_that_make_no_equal_passes_are_refused(trained, tmp_path):
    with pytest.raises(UserError, match="sets_per_step=8 does not make 3 equal passes .* pairs of twin sets"):
        run(trained, tmp_path / "b", "train.accumulate=3")
