"""Shared by the tests of training: an end that nobody expected."""

import pytest

from perturbdiff.training.run_folder import CheckpointFolder


@pytest.fixture
def power_cut(monkeypatch) -> list[int]:
    """A training ends with an error once it has written its first checkpoint, the next goes on; at which step."""
    save, ended = CheckpointFolder.save, []

    def crash(self, state):
        save(self, state)
        if not ended:
            ended.append(state["global_step"])
            raise RuntimeError("power cut")

    monkeypatch.setattr(CheckpointFolder, "save", crash)
    return ended
