"""Lightning's way to a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from perturbdiff.training.checkpoints.run_folder import CheckpointFolder


class Writer(TorchCheckpointIO):
    """Lets a trainer write into a checkpoint folder, straight to where it belongs."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the trainer's state; called on the first rank alone."""
        assert Path(path) == self.folder.last
        self.folder.write(checkpoint)
