"""A training module of few numbers and a batch for it."""

import torch

from perturbdiff.config.settings import Config, LossConfig, ModelConfig, TrainConfig
from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.model import Denoiser
from perturbdiff.training.module import TrainingModule

B, S, G = 8, 5, 6


def tiny_module(statistic: str = "V", depth: int = 1, **train) -> TrainingModule:
    """A module whose modulations are not zero, so that every weight has a gradient."""
    torch.manual_seed(0)
    small = ModelConfig(width=16, depth=depth, heads=4, covariate_width=8)
    denoiser = Denoiser(small, num_genes=G, num_perturbations=4, num_cell_types=3, num_batches=3)
    for name, parameter in denoiser.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    loss, settings = LossConfig(mmd_statistic=statistic), TrainConfig(**train)  # pyright: ignore[reportArgumentType]
    return TrainingModule(denoiser, Config(model=small, loss=loss, train=settings, seed=3))


def tiny_batch() -> CellSetBatch:
    """Eight sets, twins side by side."""
    target, control = torch.rand(2, B, S, G, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([1, 1, 2, 2, 3, 3, 1, 1])
    return CellSetBatch(
        target, control, ids, ids % 2 + 1, ids % 2 + 1, torch.zeros(B, dtype=torch.int64), ids
    )
