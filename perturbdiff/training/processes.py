"""Who computes: one process, or several started by torchrun or srun."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from perturbdiff.data.shared_memory import Node

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Processes:
    """One process among those of a run.

    Attributes
    ----------
    rank, world_size
        Number of this process, and how many there are.
    per_node
        Processes on each node.
    launcher
        Who started them.
    local_rank
        Number of this process on its node.
    run
        What tells this run from others on the node.
    """

    rank: int = 0
    world_size: int = 1
    per_node: int = 1
    launcher: Literal["none", "torchrun", "srun"] = "none"
    local_rank: int = field(default=0, compare=False)
    run: str = field(default="", compare=False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Processes:
        """Read what torchrun or srun set; an allocation of several tasks without srun is one process."""
        if "TORCHELASTIC_RUN_ID" in env and int(env.get("WORLD_SIZE", "1")) > 1:
            run = " ".join(
                env.get(k, "") for k in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
            )
            place = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
            return cls(*place, "torchrun", int(env.get("LOCAL_RANK", "0")), run)
        tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1:
            nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
            run = f"{env.get('SLURM_JOB_ID', '')} {env.get('SLURM_STEP_ID', '')}"
            place = int(env["SLURM_PROCID"]), tasks, tasks // nodes
            return cls(*place, "srun", int(env.get("SLURM_LOCALID", "0")), run)
        return cls()

    def node(self) -> Node | None:
        """Return what the processes of this node share memory by, None if there is one or the system cannot."""
        if self.per_node < 2 or not Node.supported():
            return None
        return Node(self.run, self.local_rank, self.per_node)

    def environment(self) -> ClusterEnvironment:
        """Return Lightning's view, which must neither guess nor requeue jobs by itself."""
        # Imported here: sampling needs this module but not Lightning, which takes seconds to load.
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
        from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

        if self.launcher == "torchrun":
            return TorchElasticEnvironment()
        return SLURMEnvironment(auto_requeue=False) if self.launcher == "srun" else LightningEnvironment()

    def trainer_options(self, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
        """Return the Trainer's arguments that say where it runs."""
        return {
            "accelerator": "gpu" if device == "cuda" else "cpu",
            "devices": self.per_node,
            "num_nodes": self.world_size // self.per_node,
            "strategy": "ddp" if self.world_size > 1 else "auto",
            "plugins": [self.environment()],
        }
