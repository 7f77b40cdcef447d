"""The exponential moving average of a real training equals the recursion written out."""

from __future__ import annotations

import pytest
import torch

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.training_stages import train


def clone(module):
    return {name: value.detach().clone() for name, value in module.denoiser.state_dict().items()}


def watched(trained, out, monkeypatch, *changes):
    """Train; return the weights and the averages after each optimiser step, by step, and the bundle."""
    seen, advance = {}, TrainingLoop.advance

    def watch(self, *sets):
        advance(self, *sets)
        seen[self.step] = clone(self.module), clone(self.averaged)

    monkeypatch.setattr(TrainingLoop, "advance", watch)
    recipe = recipes.load("tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4", *changes])
    train(trained / "store", trained / "split.parquet", out, recipe, device="cpu")
    return seen, Bundle.load(out)


@pytest.mark.parametrize(
    ("decay", "every", "steps", "passes"), [(0.8, 3, 12, 1), (0.99, 10, 22, 1), (0.5, 2, 7, 2)]
)
def test_averages_are_the_hand_recursion(trained, tmp_path, monkeypatch, decay, every, steps, passes):
    """After steps 1, 1 + n, 1 + 2n, …: the first copies, then a ← d a + (1 - d) w; nothing in between."""
    seen, bundle = watched(
        trained, tmp_path / "bundle", monkeypatch,
        f"train.ema_decay={decay}", f"train.ema_every={every}", f"train.max_steps={steps}",
        f"train.accumulate={passes}",
    )  # fmt: skip
    assert sorted(seen) == list(range(1, steps + 1))
    by_hand = {name: value.double() for name, value in seen[1][0].items()}
    for step in range(1, steps + 1):
        weights, averages = seen[step]
        if step > 1 and (step - 1) % every == 0:
            by_hand = {name: decay * by_hand[name] + (1 - decay) * weights[name].double() for name in by_hand}
        for name, value in by_hand.items():
            torch.testing.assert_close(averages[name].double(), value, rtol=1e-5, atol=1e-7, msg=name)
    name = "output_layer.weight"
    assert (seen[steps][0][name] - by_hand[name]).abs().max() > 1e-3  # else averaging would not show
    chosen = seen[bundle.training["chosen_step"]][1]
    for name, value in bundle.model.state_dict().items():
        assert torch.equal(value, chosen[name]), name


def test_no_average(trained, tmp_path, monkeypatch):
    """Without averaging the bundle has the weights themselves."""
    watched(trained, tmp_path / "first", monkeypatch, "train.ema_decay=0.0", "train.max_steps=3")
    seen, bundle = watched(
        trained, tmp_path / "second", monkeypatch,
        "train.ema_decay=1e-9", "train.ema_every=1", "train.max_steps=3",
    )  # fmt: skip
    plain = Bundle.load(tmp_path / "first").model.state_dict()
    for name, value in bundle.model.state_dict().items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-6)
    assert sorted(seen) == [1, 2, 3]


def test_the_papers_average():
    """App. Training: decay .99, every 10 steps."""
    train_settings = recipes.load("paper").train
    assert (train_settings.ema_decay, train_settings.ema_every) == (0.99, 10)
