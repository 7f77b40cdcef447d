"""Symmetries of the network and its state at the start, for each reading of the method.

Numbers of the network are small; what a variant switches is the preset's. AdaLN-Zero hides everything behind zeros
at the start, so its projections are random wherever that is not the question.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from perturbdiff.config import recipes
from perturbdiff.model import Covariates, Denoiser, Estimates
from perturbdiff.model.layers import MMDiTBlock

VARIANTS = ("paper", "released", "recommended")
SETS, CELLS, GENES, WIDTH = 4, 7, 11, 16
SMALL = (f"model.width={WIDTH}", "model.depth=3", "model.heads=4", "model.covariate_width=8")


@cache
def settings(variant):
    return recipes.load(variant, SMALL).model


def build(variant, *, at_start=False, datasets=("a", "b")):
    torch.manual_seed(0)
    network = Denoiser(
        settings(variant), num_genes=GENES, num_perturbations=6, num_cell_types=5, num_batches=4,
        datasets=datasets,
    )  # fmt: skip
    if not at_start:
        open_gates(network)
    return network


def open_gates(module):
    for name, parameter in module.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(parameter, std=0.2)


def inputs():
    """Arguments of the network by name: the cells, then what belongs to whole sets."""
    generator = torch.Generator().manual_seed(1)
    x, control, previous = torch.rand(3, SETS, CELLS, GENES, generator=generator)
    cells = {"x_t": x, "control": control, "self_condition": previous}
    ids = Covariates(*(torch.randint(1, n, (SETS,), generator=generator) for n in (6, 5, 4)))
    whole = {
        "t": torch.tensor([0, 40, 500, 999]),
        "covariates": ids,
        "drop": torch.tensor([False, True, False, False]),
        "dataset": torch.tensor([0, 1, 1, 0]),
    }
    return cells, whole


def per_cell(ids):
    return Covariates(*(i[:, None].expand(SETS, CELLS) for i in ids))


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def assert_differ(found, expected):
    assert (found - expected).abs().max() > 1e-3


# permutations


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_moves_with_the_cells(variant):
    """Equivariant to one permutation of perturbed cells, control cells and earlier estimate together."""
    network, (cells, whole) = build(variant), inputs()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    out = network(**cells, **whole)
    assert_equal(network(**{name: x[:, order] for name, x in cells.items()}, **whole), out[:, order])
    for name in ("control", "x_t"):  # cell j of the one stream is paired with cell j of the other
        moved = network(**{**cells, name: cells[name][:, order]}, **whole)
        assert_differ(moved, out)
        assert_differ(moved, out[:, order])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_moves_with_covariates_of_single_cells(variant):
    network, (cells, whole) = build(variant), inputs()
    generator = torch.Generator().manual_seed(2)
    ids = Covariates(*(torch.randint(1, n, (SETS, CELLS), generator=generator) for n in (6, 5, 4)))
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    moved = {name: x[:, order] for name, x in cells.items()}
    out = network(**cells, **{**whole, "covariates": ids})
    again = network(**moved, **{**whole, "covariates": Covariates(*(i[:, order] for i in ids))})
    assert_equal(again, out[:, order])
    assert_differ(network(**moved, **{**whole, "covariates": ids}), out[:, order])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_moves_with_the_sets_and_a_set_does_not_see_another(variant):
    network, (cells, whole) = build(variant), inputs()
    order = torch.tensor([2, 0, 3, 1])
    moved = {
        name: Covariates(*(i[order] for i in x)) if isinstance(x, tuple) else x[order]
        for name, x in {**cells, **whole}.items()
    }
    out = network(**cells, **whole)
    assert_equal(network(**moved), out[order])
    other = {name: x.clone() for name, x in cells.items()}
    for x in other.values():
        x[1:] += 1
    changed = network(**other, **whole)
    assert_equal(changed[0], out[0])
    assert_differ(changed[1], out[1])


# the state at the start


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mlp_branch", ["sequential", "parallel"])
def test_a_block_is_the_identity_at_the_start(mlp_branch, last):
    """AdaLN-Zero: both streams pass unchanged, whatever the conditioning; with open gates both change."""
    torch.manual_seed(0)
    block = MMDiTBlock(WIDTH, 4, 4, mlp_branch, last=last)
    x, control = torch.randn(2, SETS, CELLS, WIDTH)
    for shape in ((SETS, 1, WIDTH), (SETS, CELLS, WIDTH)):
        s = 10 * torch.randn(shape)
        out, out_control = block(x, control, s)
        assert torch.equal(out, x)
        assert torch.equal(out_control, control)
    open_gates(block)
    out, out_control = block(x, control, s)
    assert_differ(out, x)
    assert torch.equal(out_control, control) == last  # the last block has no use for its control stream


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_blocks_of_a_network_are_identities_at_the_start(variant):
    network, (cells, whole) = build(variant, at_start=True), inputs()
    streams = []
    for block in network.blocks:
        block.register_forward_hook(lambda module, given, out: streams.append((given[:2], out[:2])))
    out = network(**cells, **whole)
    assert len(streams) == 3
    for given, left in streams:
        assert torch.equal(given[0], left[0])
        assert torch.equal(given[1], left[1])
    later = {**whole, "t": whole["t"].flip(0), "covariates": None}
    assert torch.equal(network(**cells, **later), out)  # nor do time and covariates reach the output
    assert_differ(build(variant)(**cells, **later), build(variant)(**cells, **whole))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_gradient_opens_the_gates(variant):
    """Zero is no stationary point: the projections that make the gates learn from the first step."""
    network, (cells, whole) = build(variant, at_start=True), inputs()
    weights = torch.rand(SETS, CELLS, GENES, generator=torch.Generator().manual_seed(3))
    (network(**cells, **whole) * weights).sum().backward()
    for block in network.blocks:
        gates = block.modulation.project.weight.grad.chunk(6)
        assert gates[2].abs().max() > 0
        assert gates[5].abs().max() > 0


# conditioning of sets and of cells


@pytest.mark.parametrize("mlp_branch", ["sequential", "parallel"])
def test_a_block_treats_conditioning_per_set_as_its_copies_per_cell(mlp_branch):
    torch.manual_seed(0)
    block = MMDiTBlock(WIDTH, 4, 4, mlp_branch)
    open_gates(block)
    x, control = torch.randn(2, SETS, CELLS, WIDTH)
    s = torch.randn(SETS, 1, WIDTH, requires_grad=True)
    weights = torch.randn(2, SETS, CELLS, WIDTH)
    found = []
    for conditioning in (s, s.expand(SETS, CELLS, WIDTH)):
        out = torch.stack(block(x, control, conditioning))
        parameters = [s, *block.parameters()]
        found.append((out, *torch.autograd.grad((out * weights).sum(), parameters)))
    for per_set, copies in zip(*found, strict=True):
        torch.testing.assert_close(copies, per_set, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_covariates_per_set_and_per_cell_agree_with_their_gradients(variant):
    network, (cells, whole) = build(variant), inputs()
    weights = torch.rand(SETS, CELLS, GENES, generator=torch.Generator().manual_seed(3)) - 0.5
    found = []
    for ids, shape in ((whole["covariates"], (SETS, 1)), (per_cell(whole["covariates"]), (SETS, CELLS))):
        assert network.conditioning(whole["t"], ids, whole["drop"]).shape == (*shape, WIDTH)
        given = {name: x.clone().requires_grad_() for name, x in cells.items()}
        network.zero_grad()
        out = network(**given, **{**whole, "covariates": ids})
        (out * weights).sum().backward()
        gradients = {name: x.grad for name, x in (*given.items(), *network.named_parameters())}
        found.append({"": out.detach(), **gradients})
    per_set, copies = found
    for name, value in per_set.items():
        scale = value.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(copies[name], value, rtol=1e-3, atol=1e-5 * max(scale, 1), msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dropped_set_is_a_set_without_covariates(variant):
    network, (cells, whole) = build(variant), inputs()
    out = network(**cells, **whole)
    none = network(**cells, **{**whole, "covariates": None, "drop": None})
    everyone = network(**cells, **{**whole, "drop": torch.ones(SETS, dtype=torch.bool)})
    assert_equal(everyone, none)
    assert_equal(out[1], none[1])
    assert_differ(out[0], none[0])
    assert_equal(network(**cells, **{**whole, "covariates": per_cell(whole["covariates"])}), out)


# estimates of one batch on the way from noise to cells


@pytest.mark.parametrize("semantic", [{}, {"gene": 5, "perturbation": 3}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_estimates_that_share_work_are_those_of_the_network(variant, semantic):
    """Whatever the order of the passes; gene vectors enter the streams whether there is an earlier estimate or not."""
    torch.manual_seed(0)
    own = settings(variant).model_copy(update={"gene_embedding": "table"}) if semantic else settings(variant)
    network = Denoiser(
        own, num_genes=GENES, num_perturbations=6, num_cell_types=5, num_batches=4,
        datasets=("a", "b"), semantic=semantic,
    )  # fmt: skip
    open_gates(network)
    for name, buffer in network.named_buffers():
        if name.endswith("vectors"):
            torch.nn.init.normal_(buffer)
    cells, whole = inputs()
    estimates = Estimates(network, cells["control"], whole["covariates"], whole["dataset"])
    x, previous = cells["x_t"], cells["self_condition"]
    for at, level, before, told in (
        (x, 999, None, True), (x, 999, None, False), (x + 1, 500, previous, False), (x + 1, 500, previous, True),
        (x + 1, 0, previous, True), (x, 0, previous + 1, False), (x, 0, None, True),
    ):  # fmt: skip
        expected = network(
            at, torch.full((SETS,), level), cells["control"], whole["covariates"] if told else None,
            self_condition=before, dataset=whole["dataset"],
        )  # fmt: skip
        assert_equal(estimates(at, level, before, told), expected.detach())
