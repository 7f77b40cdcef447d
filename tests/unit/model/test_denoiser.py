"""The denoiser: symmetries, initial state, gradients, switches, units."""

from __future__ import annotations

import pytest
import torch

from perturbdiff.config.settings import ModelConfig
from perturbdiff.model import Covariates, Denoiser
from perturbdiff.model.layers import sinusoid

B, S, G = 3, 6, 10
SMALL = {"width": 16, "depth": 2, "heads": 4, "covariate_width": 8}


def build(seed=0, datasets=("all",), *, random_gates=True, **changes):
    torch.manual_seed(seed)
    model = Denoiser(
        ModelConfig(**{**SMALL, **changes}),
        num_genes=G, num_perturbations=5, num_cell_types=4, num_batches=3, datasets=datasets,
    )  # fmt: skip
    if random_gates:  # AdaLN-Zero hides everything behind zeros at the start
        for name, parameter in model.named_parameters():
            if "modulation" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def inputs(seed=1, *, per_cell=False):
    generator = torch.Generator().manual_seed(seed)
    x, control, previous = torch.rand(3, B, S, G, generator=generator)
    shape = (B, S) if per_cell else (B,)
    ids = Covariates(*(torch.randint(1, n, shape, generator=generator) for n in (5, 4, 3)))
    return x, torch.tensor([3, 500, 999]), control, ids, previous


@pytest.mark.parametrize("fusion", ["concat", "sum"])
@pytest.mark.parametrize("mlp_branch", ["sequential", "parallel"])
def test_moves_with_a_permutation_of_paired_cells(fusion, mlp_branch):
    model = build(fusion=fusion, mlp_branch=mlp_branch)
    x, t, control, ids, previous = inputs()
    order = torch.randperm(S)
    y = model(x, t, control, ids, self_condition=previous)
    moved = model(x[:, order], t, control[:, order], ids, self_condition=previous[:, order])
    torch.testing.assert_close(moved, y[:, order])
    torch.testing.assert_close(model(x, t, control[:, order], ids).shape, y.shape)
    assert not torch.allclose(model(x, t, control[:, order], ids), model(x, t, control, ids))


def test_blocks_are_identities_at_the_start():
    model = build(random_gates=False)
    x, control, s = torch.randn(3, B, S, 16)
    for block in model.blocks:
        out, out_control = block(x, control, s)
        assert torch.equal(out, x)
        assert torch.equal(out_control, control)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "fusion": "sum",
            "mlp_branch": "parallel",
            "gene_embedding": "shared",
            "covariate_projection": "genes",
        },
        {"head": "softplus", "covariates": ("perturbation",)},
        {"anchor": "control", "gene_noise": True},
    ],
)
def test_every_parameter_gets_a_gradient(changes):
    model = build(datasets=("a", "b"), **changes)
    x, t, control, ids, previous = inputs()
    drop, dataset = torch.tensor([True, False, False]), torch.tensor([0, 1, 0])
    y = model(x, t, control, ids, self_condition=previous, drop=drop, dataset=dataset)
    (y * torch.randn_like(y)).sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # the key bias shifts all logits of a query alike; with q/k norms it is not exactly so, hence no exception
    assert silent == []


def test_a_missing_data_set_has_a_zero_gradient_not_none():
    model = build(datasets=("a", "b"))
    x, t, control, ids, _ = inputs()
    model(x, t, control, ids, dataset=torch.zeros(B, dtype=torch.int64)).sum().backward()
    gradient = model.input_layers.layers[1].weight.grad
    assert gradient is not None
    assert not gradient.any()
    with pytest.raises(ValueError, match="2 input layers"):
        model(x, t, control, ids)


def test_data_sets_use_their_own_layers():
    model = build(datasets=("a", "b"))
    x, t, control, ids, _ = inputs()
    mixed = model(x, t, control, ids, dataset=torch.tensor([0, 1, 0]))
    first = model(x, t, control, ids, dataset=torch.tensor([0, 0, 0]))
    torch.testing.assert_close(mixed[[0, 2]], first[[0, 2]])
    assert not torch.allclose(mixed[1], first[1])


def test_covariates_per_cell_agree_with_covariates_per_set():
    model = build()
    x, t, control, ids, _ = inputs()
    per_cell = Covariates(*(i[:, None].expand(B, S) for i in ids))
    torch.testing.assert_close(model(x, t, control, per_cell), model(x, t, control, ids))
    assert model.conditioning(t, ids).shape == (B, 1, 16)
    assert model.conditioning(t, per_cell).shape == (B, S, 16)


def test_dropping_hides_the_covariates_and_keeps_the_control():
    model = build()
    x, t, control, ids, _ = inputs()
    other = Covariates(*((i + 1) % 3 for i in ids))
    everyone = torch.ones(B, dtype=torch.bool)
    dropped = model(x, t, control, ids, drop=everyone)
    torch.testing.assert_close(dropped, model(x, t, control, other, drop=everyone))
    torch.testing.assert_close(dropped, model(x, t, control, None))
    assert not torch.allclose(dropped, model(x, t, control, ids))
    assert not torch.allclose(dropped, model(x, t, control + 1, None))


def test_zeros_as_self_conditioning_equal_none():
    model = build()
    x, t, control, ids, _ = inputs()
    zeros = torch.zeros_like(x)
    torch.testing.assert_close(model(x, t, control, ids, self_condition=zeros), model(x, t, control, ids))


def test_sequential_and_parallel_mlp_differ():
    x, t, control, ids, _ = inputs()
    a, b = build(mlp_branch="sequential"), build(mlp_branch="parallel")
    assert not torch.allclose(a(x, t, control, ids), b(x, t, control, ids))


def test_the_gate_gives_exact_zeros_and_passes_the_gradient():
    model = build(gate=True)
    model.unit.fill_(2.0)
    model.gate_threshold.fill_(0.5)  # log1p; 0.25 in model units
    x, t, control, ids, _ = inputs()
    y = model(x, t, control, ids)
    assert ((y == 0) | (y >= 0.25)).all()
    value = torch.tensor([0.1, 0.3], requires_grad=True)
    gated = model._gate(value)
    gated.sum().backward()
    assert gated.tolist() == pytest.approx([0.0, 0.3])
    assert value.grad.tolist() == [1.0, 1.0]


def test_matched_cells_stay_within_the_known_range():
    model = build(clip=True)
    model.maximum.fill_(3.0)
    cells, control = 2.9 * torch.rand(2, B, S, G)
    assert torch.equal(model.match_zeros(cells, control), cells), "no levels, no change"
    model.zero_level.fill_(2.0)
    same = torch.full_like(control, 2.5)
    assert (model.match_zeros(cells, control).max(), model.match_totals(cells, same).max()) == (3, 3)


def test_units_clip_and_gate_of_the_decoder():
    model = build(gate=True, clip=True)
    model.unit.fill_(2.0)
    model.gate_threshold.fill_(0.5)
    model.maximum.fill_(3.0)
    assert model.decode(torch.tensor([[-1.0] * G, [0.2] * G, [1.0] * G, [9.0] * G]))[:, 0].tolist() == [
        0,
        0,
        2,
        3,
    ]
    cells = torch.rand(4, G) * 2 + 0.6
    torch.testing.assert_close(model.clean(model.encode(cells)), model.encode(cells))


@pytest.mark.parametrize("head", ["relu", "softplus"])
def test_output_is_never_negative(head):
    x, t, control, ids, _ = inputs()
    assert (build(head=head)(x, t, control, ids) >= 0).all()


def test_time_features_are_cosines_then_sines():
    features = sinusoid(torch.tensor([0, 7]), 8)
    assert features[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert features[1, 0] == pytest.approx(torch.tensor(7.0).cos().item())
    assert features[1, 4] == pytest.approx(torch.tensor(7.0).sin().item(), rel=1e-5)


def test_runs_in_bfloat16_autocast():
    model = build(gate=True)
    x, t, control, ids, previous = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x, t, control, ids, self_condition=previous)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, model(x, t, control, ids, self_condition=previous), atol=0.1, rtol=0.1)


def test_heads_must_divide_the_joint_width():
    with pytest.raises(ValueError, match="not a multiple of 5 heads"):
        build(heads=5)


def test_anchored_network_begins_as_the_control_cells():
    model = build(anchor="control", random_gates=False)
    x, t, control, ids, _ = inputs()
    control = control.abs()
    torch.testing.assert_close(model(x, t, control, ids), control, atol=0.1, rtol=0)
