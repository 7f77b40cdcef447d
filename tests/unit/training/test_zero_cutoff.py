"""Levels below which small values become zeros: how they are measured, where they are kept and used."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from perturbdiff import sampling
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.splits.splits import read_split
from perturbdiff.training.fit import _levels
from perturbdiff.training.training_stages import train

SET = 16
MATCHED = (
    "split.held_out=[d2]", "split.valid_fraction=0.4", "model.gate=true", "model.anchor=control", "model.unit=rms",
    "loss.mmd_statistic=cross", "loss.mse_weight=0", "sample.num_steps=1", "sample.zeros=matched",
)  # fmt: skip


def run(trained, out, *changes):
    recipe = recipes.load("tiny", [*MATCHED, *changes])
    return train(trained / "store", trained / "split.parquet", out, recipe, device="cpu")


@pytest.fixture(scope="module")
def matched(trained, tmp_path_factory):
    return run(trained, tmp_path_factory.mktemp("matched") / "bundle", "train.keep_every=10")


def test_a_level_leaves_as_many_values_as_the_data_have_above_zero():
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(50, 1030, generator=generator)  # more genes than are sorted at once
    positive = torch.randint(1, 51, (1030,), generator=generator)
    levels = _levels(predicted, positive)
    assert torch.equal((predicted >= levels).sum(0), positive)
    predicted[:45] = 0
    assert (_levels(predicted, positive)[positive > 5] == 0).all(), "zeros enough: nothing to do"
    assert torch.equal(_levels(predicted, torch.zeros(1030, dtype=torch.int64)), predicted.max(0).values)


def test_levels_belong_to_the_model_whatever_the_recipe_samples(matched, trained, tmp_path):
    plain = run(trained, tmp_path / "plain", "sample.zeros=predicted")
    own, other = load_file(matched / "model.safetensors"), load_file(plain / "model.safetensors")
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert 0 < (own["zero_level"] > 0).sum() < len(own["zero_level"])
    assert not load_file(trained / "bundle" / "model.safetensors")["zero_level"].any(), (
        "trained without a gate"
    )


def test_every_kept_step_has_its_own(matched):
    first, last = (load_file(matched / "steps" / f"{n:07d}" / "model.safetensors") for n in (10, 20))
    assert first["zero_level"].any()
    assert not torch.equal(first["zero_level"], last["zero_level"])
    assert torch.equal(last["zero_level"], load_file(matched / "model.safetensors")["zero_level"])


def test_interrupted_training_measures_the_same(matched, trained, tmp_path, power_cut):
    changes = ("train.keep_every=10",)
    with pytest.raises(RuntimeError, match="power cut"):
        run(trained, tmp_path / "b", *changes)
    out = run(trained, tmp_path / "b", *changes)
    assert power_cut == [5]
    for name in ("model.safetensors", "steps/0000010/model.safetensors"):
        assert (out / name).read_bytes() == (matched / name).read_bytes()


def cells(bundle, trained, out, zeros):
    """Two whole sets of each test condition."""
    split = read_split(trained / "split.parquet")
    wanted = split[split["part"] == "test"][["cell_type", "batch", "perturbation"]].assign(n_cells=2 * SET)
    wanted[wanted["perturbation"] != "control"].to_csv(out.with_suffix(".csv"), index=False)
    settings = Bundle.load(bundle).config.sample.model_copy(update={"zeros": zeros})
    sampling.sample(
        bundle, trained / "store", out, conditions=out.with_suffix(".csv"), config=settings, device="cpu"
    )
    found = ad.read_h5ad(out)
    return found[(found.obs["perturbation"] != "control").to_numpy()].to_df().to_numpy()


def test_sampled_cells_have_more_zeros_and_the_same_means(matched, trained, tmp_path):
    few = cells(matched, trained, tmp_path / "p.h5ad", "predicted")
    more = cells(matched, trained, tmp_path / "m.h5ad", "detected")
    assert len(few) == len(more) >= 2 * SET
    assert ((more > 0) <= (few > 0)).all(), "no value where there was none"
    own = Bundle.load(matched).model
    changed = 0
    for start in range(0, len(few) - len(few) % SET, SET):
        one, two = few[start : start + SET], more[start : start + SET]
        free = two.max(0) < own.maximum.numpy() * 0.999  # nothing was cut off at the largest known value
        np.testing.assert_allclose(two.mean(0)[free], one.mean(0)[free], rtol=1e-4, atol=1e-6)
        changed += int(((two > 0).sum(0) < (one > 0).sum(0))[free].sum())
    assert changed > SET


def test_a_model_without_levels_says_so(trained, tmp_path, caplog):
    with caplog.at_level("WARNING", logger="perturbdiff"):
        cells(trained / "bundle", trained, tmp_path / "p.h5ad", "matched")
    assert "zeros stay as predicted" in caplog.text
