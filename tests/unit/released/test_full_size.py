"""The released networks at their real sizes: number of values, and the whole layout imported."""

import math

import pytest
import torch
from released_layout import BY_NAME, ReleasedLayout

from perturbdiff.released import load_released

LABELS = (91, 18, 12)
SCRATCH = {"genes": 2000}
PRETRAINED = {"genes": 12626, "datasets": BY_NAME}
REPLACED = {"genes": 2000, "inner": 12626, "datasets": BY_NAME}


def values(layout, part=""):
    return sum(math.prod(shape) for name, shape in layout.shapes().items() if part in name)


@pytest.mark.parametrize(
    ("width", "depth", "genes", "millions"),
    [
        (512, 8, SCRATCH, 104.43), (512, 8, PRETRAINED, 224.20), (768, 8, SCRATCH, 226.44),
        (256, 8, SCRATCH, 29.21), (1024, 8, SCRATCH, 395.24), (512, 12, SCRATCH, 150.63),
        (512, 16, SCRATCH, 196.83), (512, 24, SCRATCH, 289.23), (768, 12, SCRATCH, 330.34),
    ],
)  # fmt: skip
def test_numbers_of_values(width, depth, genes, millions):
    """What the released code has, by the closed form of a block and by its printed totals."""
    layout = ReleasedLayout(width=width, depth=depth, heads=8, labels=LABELS, **genes)
    assert round(values(layout) / 1e6, 2) == millions
    assert values(layout, ".block.") == depth * (44 * width**2 + 30 * width + 4 * width // 8)


@pytest.mark.parametrize(
    ("width", "name"),
    [
        (48, "scratch"),
        (48, "pretrained"),
        (48, "replaced"),
        pytest.param(512, "pretrained", marks=pytest.mark.slow),
    ],
)
def test_the_whole_layout(tmp_path, width, name):
    """A file with all genes, blocks, labels and input layers, narrower or (slow) as it is."""
    genes = {"scratch": SCRATCH, "pretrained": PRETRAINED, "replaced": REPLACED}[name]
    layout = ReleasedLayout(width=width, depth=8, heads=8, labels=LABELS, **genes)
    path = layout.write(tmp_path / "model.ckpt", raw=True)
    model = load_released(path)
    size = sum(parameter.numel() for parameter in model.parameters())
    held, layers, g, h = values(layout), max(1, len(layout.datasets)), layout.genes, width
    unused = 5121 * h + 2 * h + (g * (h + 1) + 2 * h * (h + 1)) + (8 * h * h + 5 * h)
    halves = layers * h * g + (2 * h * h + h) + 4 * h * (h + 1)
    assert size == held - unused - halves + 2 * 128  # and a row for "unknown" in two tables
    assert model.datasets == (tuple(layout.datasets) or ("all",))
    assert model.num_genes == g
    assert model.covariate_projection.in_features == (layout.inner or g)
    with torch.no_grad():
        assert model.conditioning(torch.tensor([3]), None).shape == (1, 1, h)
