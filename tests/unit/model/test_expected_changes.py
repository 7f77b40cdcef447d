"""Control cells that are moved by the change that is expected of their perturbation."""

import math

import pytest
import torch

from perturbdiff.config.settings import ModelConfig
from perturbdiff.model import Covariates, Denoiser, Estimates
from perturbdiff.model.cell_sizes import Pool
from perturbdiff.model.expected_changes import TransferredChanges

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


def transferred():
    """Changes of one perturbation in two cell types (ids 1, 2) of three."""
    made = TransferredChanges(ids=3, cell_types=4, batches=2, genes=3)
    made.changes = torch.tensor([[0.0] * 3, [1.0, -1, 0], [3.0, -1, 0]])
    made.rows[1, 1:3] = torch.tensor([1.0, 2])
    made.levels[1:] = torch.tensor([[2.0, 2, 0], [2.0, 4, 0], [2.0, 9, 0]])
    made.nearness[3, 1] = math.log(3)
    return made


def moved(expected, ids, contexts, shares=None):
    """Return the first cell of each set, moved: all control values are 2."""
    covariates = Covariates(
        torch.tensor(ids), torch.tensor(contexts), torch.ones(len(ids), dtype=torch.int64)
    )
    return UNIT * expected(torch.ones(len(ids), 2, 3), covariates, torch.tensor(UNIT), shares)[:, 0]


def test_near_contexts_tell_more_and_falling_genes_keep_a_share():
    expected = transferred()
    # rises are added; a fall by 1 of a level of 3/4 · 2 + 1/4 · 4 keeps three fifths
    near = torch.tensor([2 + 1.5, 2 * 0.6, 2])
    alike = torch.tensor([2 + 2.0, 2 * 2 / 3, 2])  # by 1 of 3
    found = moved(expected, [1, 1, 1, 1], [3, 1, 0, 8])  # the last two were not in training
    torch.testing.assert_close(found, torch.stack([near, alike, alike, alike]))
    torch.testing.assert_close(moved(expected, [0, 2, 7], [3, 3, 3]), torch.full((3, 3), UNIT))


def test_training_may_weigh_contexts_otherwise():
    shares = torch.tensor([[9.0, 1, 3, 9], [9.0, 0, 0, 9]])
    found = moved(transferred(), [1, 1], [3, 3], shares)
    torch.testing.assert_close(found[0], torch.tensor([2 + 2.5, 2 * 2.5 / 3.5, 2]))
    torch.testing.assert_close(found[1], torch.full((3,), UNIT))  # no context tells


def test_what_is_transferred_is_saved_whatever_its_size():
    old, new = transferred(), TransferredChanges(ids=3, cell_types=4, batches=2, genes=3)
    new.load_state_dict(old.state_dict())
    torch.testing.assert_close(moved(new, [1], [3]), moved(old, [1], [3]))


def test_cells_of_a_set_may_differ_in_what_is_transferred():
    expected, ids = transferred(), torch.tensor([[1, 1, 2]])
    control = torch.rand(1, 3, 3)
    mixed = Covariates(ids, torch.tensor([[3, 1, 3]]), torch.ones_like(ids))
    found = expected(control, mixed, torch.tensor(UNIT), None)
    for cell in range(3):
        alone = Covariates(*(each[:, cell] for each in mixed))
        torch.testing.assert_close(
            found[:, [cell]], expected(control[:, [cell]], alone, torch.tensor(UNIT), None)
        )


def test_what_others_tell_is_not_saved(model):
    assert sorted(name for name in model.state_dict() if "expected" in name) == [
        "expected.changes", "expected.explained", "expected.measured",
    ]  # fmt: skip


def told_of(ids, contexts=(1, 1, 1)):
    """Return covariates of one batch."""
    return Covariates(torch.tensor(ids), torch.tensor(contexts), torch.ones(len(ids), dtype=torch.int64))


def test_means_of_unseen_perturbations_are_settled(model):
    expected, asked = model.expected, told_of([1, 2, 3])
    expected.measured[1], expected.changes[1] = 1.0, 5.0
    expected.changes[3, 0], expected.explained[...] = -9.0, 0.25
    control = torch.rand(3, 20, G, generator=torch.Generator().manual_seed(0))
    cells = control + torch.tensor([0.2, 0.4, 0, 0, 0, 0])
    cells[:, 0], cells[:, :, 5] = 0.0, 0.0
    told = torch.tensor([2.0, -1.0, 0, 0, 0, 0])
    wanted = (0.6 + 0.75 * told + 0.25 * (cells[1] - control[1]).mean(0)).clamp_min(0)
    for kept, counted in ((20, 20), (17, 17), (3, 20)):  # three cells are too few to bear a mean
        pool = Pool(torch.full((3, G), 0.6), torch.tensor([20, kept, 20]))
        settled = model.settle_means(cells, control, pool, asked)
        most = 3 * cells[1, :counted].mean(0)  # no value is raised more than three times
        torch.testing.assert_close(settled[1, :counted].mean(0), torch.minimum(wanted, most))
        torch.testing.assert_close(settled[0], cells[0])  # was seen
        assert not settled[1, 0].any()  # zeros stay
        assert not settled[2, :, 0].any()  # a mean below 0 is 0
    torch.testing.assert_close(model.settle_means(cells, control, pool, told_of([0, 0, 0])), cells)


def test_means_of_perturbations_in_unseen_contexts_are_settled(model):
    model.expected, model.num_genes = transferred(), 3
    model.maximum = torch.full((3,), torch.inf)
    cells = 1 + torch.rand(3, 20, 3, generator=torch.Generator().manual_seed(0))
    control, pool = torch.ones_like(cells), Pool(torch.full((3, 3), 2.0), torch.full((3,), 20))
    asked = told_of([1, 1, 2], contexts=(3, 1, 3))  # only the first was seen elsewhere and not here
    settled = model.settle_means(cells, control, pool, asked)
    others_tell = torch.tensor([1.5, 2 * 0.6 - 2, 0])
    wanted = 2 + others_tell / 3 + 2 / 3 * (cells[0].mean(0) - 1)
    torch.testing.assert_close(settled[0].mean(0), wanted)
    torch.testing.assert_close(settled[1:], cells[1:])
