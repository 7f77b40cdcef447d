"""Gates that follow the data: a gene's rises while more predicted values pass it than real ones are above zero."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from perturbdiff.model import Denoiser
from perturbdiff.training.module import TrainingModule, ends_step


class Gates(pl.Callback):
    """Moves `Denoiser.gate_threshold` after each step, by the shares of non-zeros that the step's cells showed.

    The energy distance hardly sees how often a gene is zero. A gate that only knows the detection limit lets too many
    values pass; one that has moved during training is part of what the loss judges. It never falls below the
    detection limit. Averaged and saved with the weights.

    Parameters
    ----------
    denoiser
        Its gates, as they are, are the detection limit: log1p [G].
    rate
        ``train.gate_rate``, log1p units.
    """

    def __init__(self, denoiser: Denoiser, rate: float) -> None:
        self.limit, self.rate = denoiser.gate_threshold.clone(), rate
        self._excess: Tensor | None = None

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up the passes of a step; move after the last."""
        assert isinstance(pl_module, TrainingModule)
        seen = pl_module.excess / trainer.accumulate_grad_batches
        excess = seen if self._excess is None else self._excess + seen
        self._excess = excess
        if ends_step(trainer, batch_idx):
            gates = pl_module.denoiser.gate_threshold
            gates.add_(self.rate * excess).clamp_(min=self.limit.to(gates.device))
            self._excess = None
