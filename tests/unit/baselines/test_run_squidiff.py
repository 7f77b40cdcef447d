"""What of the Squidiff adapter works without Squidiff: batches, directions in the latent space, latents of queries."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from perturbdiff.baselines.external.task_folder import ADAPTERS

torch = pytest.importorskip("torch")

PERTURBATION = np.array(["ctl", "ctl", "ctl", "a", "a", "a", "b"], dtype=object)
GROUP = np.array(["T", "T", "B", "T", "T", "B", "N"], dtype=object)
LATENTS = np.array([[0, 0], [2, 0], [10, 10], [4, 1], [6, 1], [10, 12], [5, 5]], dtype=np.float32)
IS_CONTROL = PERTURBATION == "ctl"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ADAPTERS))
    return import_module("run_squidiff")


def a_task(**settings: object) -> SimpleNamespace:
    """Return what the adapter reads of a task: three cells of a to predict, in T and in B."""
    obs = pd.DataFrame({"is_control": IS_CONTROL})
    return SimpleNamespace(
        seed=3,
        settings=SimpleNamespace(**{"latent_from": "cell", "latent_noise": 0.0} | settings),
        queries=pd.DataFrame({"perturbation": ["a", "a", "a"], "control_row": [0, 1, 2]}),
        train=SimpleNamespace(obs=obs),
        labels=lambda column: PERTURBATION,
    )


def test_batches_are_full_and_hold_every_cell_once_a_pass(adapter: ModuleType) -> None:
    values = torch.arange(7.0)[:, None]
    batches = adapter.Batches(values, 3, seed=0)
    drawn = [next(batches)["feature"] for _ in range(7)]  # 21 cells: three passes
    assert {len(one) for one in drawn} == {3}
    for one_pass in torch.cat(drawn).flatten().reshape(3, 7):
        assert sorted(one_pass.tolist()) == list(range(7))


def test_batches_depend_on_the_seed_alone(adapter: ModuleType) -> None:
    values = torch.arange(50.0)[:, None]
    first, again, other = (next(adapter.Batches(values, 20, seed))["feature"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_direction_is_the_mean_shift_from_the_groups_own_controls(adapter: ModuleType) -> None:
    found = adapter.directions(LATENTS, PERTURBATION, GROUP, IS_CONTROL)
    assert set(found) == {"a", "b"}
    # a: (4, 1) - (1, 0), (6, 1) - (1, 0), (10, 12) - (10, 10), each cell with the same weight
    np.testing.assert_allclose(found["a"], [8 / 3, 4 / 3])


def test_a_group_without_controls_is_compared_with_all_controls(adapter: ModuleType) -> None:
    found = adapter.directions(LATENTS, PERTURBATION, GROUP, IS_CONTROL)
    np.testing.assert_allclose(found["b"], [5 - 4, 5 - 10 / 3], rtol=1e-6)


def test_a_query_starts_from_its_own_control(adapter: ModuleType) -> None:
    found = adapter.query_latents(a_task(), LATENTS, GROUP)
    np.testing.assert_allclose(found, LATENTS[:3] + np.float32([8 / 3, 4 / 3]), rtol=1e-6)
    assert found.dtype == np.float32


def test_a_query_starts_from_the_mean_of_its_controls_where_asked(adapter: ModuleType) -> None:
    found = adapter.query_latents(a_task(latent_from="mean"), LATENTS, GROUP)
    np.testing.assert_allclose(found - np.float32([8 / 3, 4 / 3]), [[1, 0], [1, 0], [10, 10]], rtol=1e-6)


def test_noise_in_the_latent_space_depends_on_the_seed(adapter: ModuleType) -> None:
    found = [adapter.query_latents(a_task(latent_noise=0.5), LATENTS, GROUP) for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - adapter.query_latents(a_task(), LATENTS, GROUP)).max() > 0.01


def test_a_network_that_predicts_noise_is_taken_as_it_is(adapter: ModuleType) -> None:
    model = object()
    assert adapter.noise_model(model, SimpleNamespace(predict_xstart=False)) is model


def test_a_predicted_cell_is_written_as_the_noise_that_leads_to_it(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha_bar = np.array([0.9, 0.5, 0.1])
    monkeypatch.setattr(adapter, "make_diffusion", lambda settings: SimpleNamespace(alphas_cumprod=alpha_bar))
    rng = np.random.default_rng(0)
    cell, noise = (torch.from_numpy(rng.standard_normal((3, 4)).astype(np.float32)) for _ in range(2))
    timesteps = torch.tensor([0, 1, 2])
    a = torch.from_numpy(alpha_bar).float()[:, None]
    found = adapter.noise_model(lambda x, t, **given: cell, SimpleNamespace(predict_xstart=True))
    torch.testing.assert_close(
        found(a.sqrt() * cell + (1 - a).sqrt() * noise, timesteps, z_mod=None), noise, rtol=1e-5, atol=1e-5
    )
