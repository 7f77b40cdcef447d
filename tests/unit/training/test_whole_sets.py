"""Training on whole sets: two generated sets for each true one, by (seed, step, set) only; then sampling of sets."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from small_store import small_store
from tiny_data import tiny_counts
from tiny_training import B, G, S, tiny_batch, tiny_module

from perturbdiff import sampling
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.diffusion.losses import hybrid_loss
from perturbdiff.predictions import read_predictions
from perturbdiff.runtime.errors import StoppedEarly, UserError
from perturbdiff.sampling.starting_controls import ControlSets
from perturbdiff.training.training_stages import train

SHAPE = torch.Size((B, S, G))
LEARN = ("loss.mmd_statistic=set", "loss.mse_weight=0", "train.set_noise=0.1", "train.set_size=8")


def test_two_sets_share_all_but_their_noise():
    draws = tiny_module("set", set_noise=0.2).draws(SHAPE, 4)
    assert draws.noise.shape == (2 * B, S, G)
    assert torch.equal(draws.t[::2], draws.t[1::2])
    assert torch.equal(draws.drop[::2], draws.drop[1::2])
    assert not torch.isclose(draws.noise[::2], draws.noise[1::2]).any()
    plain = tiny_module("V").draws(SHAPE, 4)
    assert torch.equal(plain.t, draws.t[::2]), "levels are those of the other statistics"


def test_chance_does_not_depend_on_ranks_or_passes():
    module = tiny_module("set", set_noise=0.2)
    whole, half = module.draws(SHAPE, 5), torch.Size((B // 2, S, G))
    for name in ("noise", "t", "drop"):
        pairs = getattr(whole, name).unflatten(0, (B, 2))
        for k in range(2):
            rank = getattr(module.draws(half, 5, rank=k, world=2), name)
            assert torch.equal(rank, pairs[k::2].flatten(0, 1))
            part = getattr(module.draws(half, 5, part=k, parts=2), name)
            assert torch.equal(part, pairs[k * B // 2 : (k + 1) * B // 2].flatten(0, 1))


@pytest.mark.parametrize("self_condition", [0.0, 1.0])
def test_the_objective_is_the_score_of_the_two_estimates(self_condition):
    module, batch = tiny_module("set", self_condition=self_condition, drop_covariates=0.5), tiny_batch()
    draws = module.draws(SHAPE, 2)
    terms = module.objective(batch, draws, paired=False)
    terms["total"].backward()
    assert all(p.grad is not None for p in module.denoiser.parameters() if p.requires_grad)
    with torch.no_grad():
        estimates = []
        for k in range(2):
            one = draws._replace(t=draws.t[k::2], noise=draws.noise[k::2], drop=draws.drop[k::2])
            noised = module.schedule.add_noise(module.denoiser.encode(batch.target), one.t, one.noise)
            first = module.estimate(noised, one.t, batch, drop=one.drop) if self_condition else None
            estimates.append(module.estimate(noised, one.t, batch, self_condition=first, drop=one.drop))
        both = torch.stack(estimates, 1).flatten(0, 1)
        expected = hybrid_loss(both, module.denoiser.encode(batch.target), module.config.loss)
    torch.testing.assert_close(terms["total"], expected["total"])


@pytest.fixture(scope="module")
def wells(tmp_path_factory):
    adata = tiny_counts()
    adata.obs["well"] = [f"w{k}" for k in np.random.default_rng(3).integers(2, size=adata.n_obs)]
    return small_store(tmp_path_factory.mktemp("wells"), ["data.set_key=well", *LEARN], adata)


@pytest.fixture(scope="module")
def bundle(wells, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "bundle"
    return train(wells.store, wells.split, out, wells.recipe, device="cpu")


def test_an_interrupted_training_ends_with_the_same_bytes(wells, bundle, tmp_path, monkeypatch):
    out = tmp_path / "bundle"
    monkeypatch.setenv("PD_END_TIME", str(time.time() + 60))
    with pytest.raises(StoppedEarly):
        train(wells.store, wells.split, out, wells.recipe, device="cpu")
    monkeypatch.delenv("PD_END_TIME")
    train(wells.store, wells.split, out, wells.recipe, device="cpu")
    for name in ("model.safetensors", "training.csv", "manifest.json"):
        assert (out / name).read_bytes() == (bundle / name).read_bytes(), name


def test_a_sampled_set_starts_from_the_controls_of_one_set(wells, bundle, tmp_path):
    out = sampling.sample(bundle, wells.store, tmp_path / "p.h5ad", split=wells.split, device="cpu")
    adata = read_predictions(out)
    made = adata.obs[adata.obs["source"] == "predicted"]
    labels = made.groupby("set")[["cell_type", "batch", "perturbation"]].nunique()
    assert (labels == 1).all(axis=None)
    assert made["set"].value_counts().max() == 8
    store = wells.opened
    wanted = made[["cell_type", "batch", "perturbation"]].astype(str).drop_duplicates().assign(n_cells=64)
    genes = GeneMap(store.genes, store.genes)
    starts = ControlSets(store, wanted, genes, size=8, seed=0, by_set=True)
    rows = [starts.rows([(0, k)]) for k in range(8)]
    units = [np.unique(store.set_of(one)) for one in rows]
    assert all(len(one) == 1 for one in units)
    assert len({int(one[0]) for one in units}) == 2, "both wells are drawn"
    assert all(len(set(one)) == 8 for one in rows)
    again = ControlSets(store, wanted.iloc[:1], genes, size=8, seed=0, by_set=True)
    assert (again.rows([(0, 5)]) == rows[5]).all(), "whatever else is asked for"


def test_a_store_whose_sets_are_told_is_refused(tmp_path):
    small = small_store(tmp_path, ["data.set_key=batch", *LEARN])
    with pytest.raises(UserError, match=r"'batch' \(data.set_key\) names one set for each"):
        train(small.store, small.split, tmp_path / "bundle", small.recipe, device="cpu")
