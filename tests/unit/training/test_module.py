"""The optimiser step: chance as a function of the step, the objective, rates, groups, units."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import Config, LossConfig, ModelConfig, TrainConfig
from perturbdiff.diffusion.losses import hybrid_loss
from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.resources import resolve_device
from perturbdiff.training.distributed.processes import Processes
from perturbdiff.training.module import TrainingModule
from perturbdiff.training.optimizer import parameter_groups, rate_factor
from perturbdiff.training.training_cells import measure

B, S, G = 4, 5, 6
SMALL = ModelConfig(width=16, depth=1, heads=4, covariate_width=8)


def module(*, anchor="none", statistic="V", semantic=None, **train):
    torch.manual_seed(0)
    small = SMALL.model_copy(update={"anchor": anchor})
    denoiser = Denoiser(
        small, num_genes=G, num_perturbations=4, num_cell_types=3, num_batches=3, semantic=semantic
    )
    for name, parameter in denoiser.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    loss = LossConfig(mmd_statistic=statistic)
    return TrainingModule(denoiser, Config(model=small, loss=loss, train=TrainConfig(**train), seed=3))


def batch():
    generator = torch.Generator().manual_seed(0)
    target, control = torch.rand(2, B, S, G, generator=generator)
    ids = torch.tensor([1, 2, 3, 1])
    return CellSetBatch(
        target, control, ids, ids % 2 + 1, ids % 2 + 1, torch.zeros(B, dtype=torch.int64), ids
    )


def test_chance_is_a_function_of_seed_and_step():
    shape = torch.Size((B, S, G))
    first, again, next_step = module().draws(shape, 7), module().draws(shape, 7), module().draws(shape, 8)
    torch.rand(100)  # the global generator has no say
    assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))
    assert not torch.equal(first.noise, next_step.noise)
    assert not torch.equal(first.t, next_step.t)


def test_ranks_share_out_the_draws_of_one_process():
    whole = module().draws(torch.Size((B, S, G)), 5)
    for rank in range(2):
        part = module().draws(torch.Size((B // 2, S, G)), 5, rank=rank, world=2)
        assert torch.equal(part.noise, whole.noise[rank::2])
        assert torch.equal(part.t, whole.t[rank::2])
        assert torch.equal(part.drop, whole.drop[rank::2])
        assert part.self_condition == whole.self_condition


def test_contexts_count_at_random_in_what_is_expected():
    m = module(anchor="transferred", statistic="cross")
    drawn = torch.stack([m.draws(torch.Size((B, 2, 2)), k).shares for k in range(200)])
    assert torch.equal(drawn[:, 0], drawn[:, 1])  # twins share them
    assert not torch.equal(drawn[:, 0], drawn[:, 2])
    part = m.draws(torch.Size((B // 2, 2, 2)), 5, rank=1, world=2).shares
    assert torch.equal(part, drawn[5, 2:])
    assert drawn.min().item() > 0
    assert drawn.mean().item() == pytest.approx(1, abs=0.1)
    assert module().draws(torch.Size((B, 2, 2)), 0).shares is None


def test_where_perturbations_have_vectors_some_sets_are_told_nothing():
    """An unseen perturbation starts from control cells as they are."""
    m = module(anchor="transferred", semantic={"perturbation": 3})
    drawn = torch.stack([m.draws(torch.Size((B, 2, 2)), k).shares for k in range(200)])
    assert (drawn == 0).all(-1).float().mean().item() == pytest.approx(0.2, abs=0.05)


def test_the_objective_starts_from_cells_that_were_moved():
    m, b = module(anchor="transferred"), batch()
    draws = m.draws(b.target.shape, 0)
    m.denoiser.expected.changes = torch.tensor([[0.0] * G, [3.0] * G])
    m.denoiser.expected.rows[1, 1:] = 1.0
    with torch.no_grad():
        m.denoiser.output_layer.weight.normal_()
        m.denoiser.gain_layer.bias.fill_(0.5)
    moved = m.objective(b, draws)["total"]
    untold = m.objective(b, draws._replace(shares=torch.zeros_like(draws.shares)))["total"]
    assert moved != untold


def test_coins_have_their_probabilities():
    per_set = [module(drop_covariates=0.3).draws(torch.Size((B, 2, 2)), k) for k in range(400)]
    drops = torch.stack([d.drop for d in per_set]).float()
    assert drops.mean().item() == pytest.approx(0.3, abs=0.05)
    assert (drops.std(1) > 0).float().mean() > 0  # sets of one step differ
    assert np.mean([d.self_condition for d in per_set]) == pytest.approx(0.5, abs=0.08)
    per_step = [
        module(drop_per="step", drop_covariates=0.5).draws(torch.Size((B, 2, 2)), k) for k in range(40)
    ]
    drops = torch.stack([d.drop for d in per_step]).float()
    assert (drops.std(1) == 0).all()
    assert 0 < drops.mean() < 1
    levels = torch.cat([d.t for d in per_set])
    assert levels.min() < 20
    assert levels.max() > 980


def test_the_objective_is_what_it_says():
    m, b = module(), batch()
    m.denoiser.unit.fill_(2.0)
    draws = m.draws(b.target.shape, 0)._replace(self_condition=True)
    target = b.target / 2
    x = m.schedule.add_noise(target, draws.t, draws.noise)
    estimate = m.estimate(x, draws.t, b, drop=draws.drop).detach()
    prediction = m.estimate(x, draws.t, b, self_condition=estimate, drop=draws.drop)
    expected = hybrid_loss(prediction, target, m.config.loss)
    assert m.objective(b, draws)["total"].item() == pytest.approx(expected["total"].item())
    without = m.objective(b, draws._replace(self_condition=False))
    assert without["total"].item() != pytest.approx(expected["total"].item(), rel=1e-6)


def test_pretraining_sees_neither_control_nor_perturbation():
    m, b = module(zero_control=True), batch()
    draws = m.draws(b.target.shape, 0)
    other = CellSetBatch(
        b.target, b.control + 1, (b.perturbation + 1) % 4, b.cell_type, b.batch, b.dataset, b.condition
    )
    assert m.objective(b, draws)["total"] == m.objective(other, draws)["total"]
    assert m.objective(b, draws)["total"] != module().objective(other, draws)["total"]


def test_learning_rate():
    settings = TrainConfig(max_steps=100, warmup_steps=10, plateau_fraction=0.2, final_rate=0.1)
    factors = [rate_factor(step, settings) for step in range(101)]
    assert factors[0] == 0
    assert factors[5] == 0.5
    assert factors[10:30] == [1.0] * 20
    assert factors[65] == pytest.approx(0.5)
    assert factors[100] == 0.1
    assert all(a >= b for a, b in itertools.pairwise(factors[30:]))
    assert rate_factor(0, TrainConfig(warmup_steps=0)) == 1.0


def test_biases_do_not_decay():
    m = module()
    decay, rest = parameter_groups(m.denoiser, 0.01)
    names = {id(p): n for n, p in m.denoiser.named_parameters()}
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.01, 0.0)
    assert all(names[id(p)].endswith("bias") for p in rest["params"])
    assert not any(names[id(p)].endswith("bias") for p in decay["params"])
    assert len(decay["params"]) + len(rest["params"]) == len(names)


def fake_store(values, scale=10.0):
    one = pd.DataFrame({"start": [0]})
    return SimpleNamespace(
        expression=lambda rows: sp.csr_matrix(values[rows]), scale=scale, path="s", conditions=one
    )


def test_units_come_from_the_given_rows_only():
    rng = np.random.default_rng(0)
    values = (rng.random((3000, 4)) * (rng.random((3000, 4)) < 0.5) + 0.0).astype(np.float32)
    values[values > 0] += 0.5
    values[2000:] *= 100  # held out
    names = ["a", "b", "c", "d"]
    rows = np.arange(2000)
    maps = [GeneMap(names, names)]
    units = measure([fake_store(values)], maps, [rows], unit="rms", limit=10**6, seed=0)
    seen = values[:2000]
    assert units.unit == pytest.approx(np.sqrt((seen**2).mean()), rel=1e-5)
    np.testing.assert_allclose(units.maximum, seen.max(0))
    assert units.gate_threshold == pytest.approx(0.75 * np.quantile(seen[seen > 0], 0.01), rel=1e-4)
    assert units.cells == 2000
    assert measure([fake_store(values)], maps, [rows], unit="scale", limit=10**6, seed=0).unit == 10.0
    some = measure([fake_store(values)], maps, [rows], unit="rms", limit=512, seed=0)
    assert some.cells == 512
    assert some.unit == pytest.approx(units.unit, rel=0.1)
    with pytest.raises(UserError, match="different scales"):
        measure(
            [fake_store(values), fake_store(values, 1.0)], maps * 2, [rows] * 2, unit="scale", limit=9, seed=0
        )
    with pytest.raises(UserError, match="no value above zero"):
        measure([fake_store(values * 0)], maps, [rows], unit="rms", limit=9, seed=0)


def test_processes_of_the_launchers():
    assert Processes.from_environment({}) == Processes()
    assert Processes.from_environment({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Processes()  # no srun
    srun = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3"}
    assert Processes.from_environment(srun) == Processes(3, 4, 2, "srun")
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert Processes.from_environment(torchrun) == Processes(1, 2, 2, "torchrun")
    assert Processes.from_environment({**torchrun, "WORLD_SIZE": "1"}) == Processes()


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(UserError, match="no GPU"):
        resolve_device("cuda")
