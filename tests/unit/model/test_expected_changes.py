"""Control cells that are moved by the change that is expected of their perturbation."""

import pytest
import torch

from perturbdiff.config.settings import ModelConfig
from perturbdiff.model import Covariates, Denoiser, Estimates
from perturbdiff.model.cell_sizes import Pool

G, UNIT = 6, 2.0
IDS = torch.tensor([1, 2])


@pytest.fixture
def model():
    """An untrained network, whose estimate is nearly the cell that it starts from."""
    torch.manual_seed(0)
    config = ModelConfig(width=16, depth=1, heads=4, covariate_width=8, anchor="predicted")
    made = Denoiser(config, num_genes=G, num_perturbations=4, num_cell_types=2, num_batches=2).eval()
    made.unit.fill_(UNIT)
    assert made.expected is not None
    made.expected.changes[2] = torch.tensor([2.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    made.expected.left_out[2] = torch.tensor([0.0, 0.0, 4.0, 0.0, 0.0, -9.0])
    return made


def test_sampling_uses_what_is_known_and_training_what_the_others_tell(model):
    control, noise = torch.full((2, 3, G), 1.0), torch.randn(2, 3, G)
    covariates = Covariates(IDS, torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    sampled = Estimates(model, control, covariates)(noise, 5, None, True)
    torch.testing.assert_close(sampled[0], control[0], atol=0.02, rtol=0)
    torch.testing.assert_close(sampled[1, 0], torch.tensor([2.0, 0.5, 1, 1, 1, 1]), atol=0.03, rtol=0)
    trained = model(noise, torch.tensor([5, 5]), control, covariates)
    torch.testing.assert_close(trained[1, 0], torch.tensor([1.0, 1, 3, 1, 1, 0]), atol=0.05, rtol=0)


def test_cells_of_a_set_may_differ_and_nothing_moves_without_covariates(model):
    control = torch.ones(1, 2, G)
    ids = IDS[None]
    moved = model.start(control, Covariates(ids, torch.ones_like(ids), torch.ones_like(ids)))
    torch.testing.assert_close(moved[0, 0], control[0, 0])
    torch.testing.assert_close(moved[0, 1], torch.tensor([2.0, 0.5, 1, 1, 1, 1]))
    assert model.start(control, None) is control


def test_training_takes_the_row_of_a_perturbation_in_its_context(model):
    expected = model.expected
    expected.left_out = torch.tensor([[0.0] * G, [5.0, 0, 0, 0, 0, 0]])
    expected.rows = torch.zeros(4, 3, dtype=torch.int64)
    expected.rows[2, 1] = 1
    control = torch.ones(2, 3, G)
    ids = Covariates(torch.tensor([2, 2]), torch.tensor([1, 2]), torch.ones(2, dtype=torch.int64))
    moved = model.start(control, ids, in_training=True)
    torch.testing.assert_close(moved[0, 0], torch.tensor([3.5, 1, 1, 1, 1, 1]))
    torch.testing.assert_close(moved[1], control[1])


def test_what_others_tell_is_not_saved(model):
    assert sorted(name for name in model.state_dict() if "expected" in name) == [
        "expected.changes", "expected.explained", "expected.measured",
    ]  # fmt: skip


def test_means_of_unseen_perturbations_are_settled(model):
    expected, ids = model.expected, torch.tensor([1, 2, 3])
    expected.measured[1], expected.changes[1] = 1.0, 5.0
    expected.changes[3, 0], expected.explained[...] = -9.0, 0.25
    control = torch.rand(3, 20, G, generator=torch.Generator().manual_seed(0))
    cells = control + torch.tensor([0.2, 0.4, 0, 0, 0, 0])
    cells[:, 0], cells[:, :, 5] = 0.0, 0.0
    told = torch.tensor([2.0, -1.0, 0, 0, 0, 0])
    wanted = (0.6 + 0.75 * told + 0.25 * (cells[1] - control[1]).mean(0)).clamp_min(0)
    for kept, counted in ((20, 20), (17, 17), (3, 20)):  # three cells are too few to bear a mean
        pool = Pool(torch.full((3, G), 0.6), torch.tensor([20, kept, 20]))
        settled = model.settle_means(cells, control, pool, ids)
        most = 3 * cells[1, :counted].mean(0)  # no value is raised more than three times
        torch.testing.assert_close(settled[1, :counted].mean(0), torch.minimum(wanted, most))
        torch.testing.assert_close(settled[0], cells[0])  # was seen
        assert not settled[1, 0].any()  # zeros stay
        assert not settled[2, :, 0].any()  # a mean below 0 is 0
    torch.testing.assert_close(model.settle_means(cells, control, pool, torch.zeros_like(ids)), cells)
