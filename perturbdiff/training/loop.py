"""The training loop: one optimiser step after the other, on one process or on several, from any step on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perturbdiff.loading.loader import CellSetBatch, PackedCellSetBatch
from perturbdiff.training.module import TrainingModule
from perturbdiff.training.optimizer import Optimizer, RunningAverage

if TYPE_CHECKING:
    from perturbdiff.training.distributed.processes import Processes


class Callback(Protocol):
    """What is done after each step, beside training: logs, validation, snapshots, checkpoints."""

    def after_step(self, loop: TrainingLoop) -> None:
        """Look at the loop; step ``loop.step`` has just ended."""


class KeptCallback(Callback, Protocol):
    """A callback with a state that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""


class TrainingLoop:
    """Trains a module.

    Parameters
    ----------
    module
        What is trained.
    device
        Where: ``cpu``, or ``cuda`` for this process's GPU.
    processes
        This process and how many there are.
    callbacks
        They see each step's end, in this order.
    kept
        Those of them whose state a checkpoint keeps, by name.

    Attributes
    ----------
    step
        Steps done.
    batch_shape
        Sets, cells in a set and genes of the last forward pass on this process.
    terms
        Loss terms of each forward pass of the last step, means over all processes, detached scalars.
    """

    def __init__(
        self,
        module: TrainingModule,
        device: Literal["cpu", "cuda"],
        processes: Processes,
        callbacks: Sequence[Callback] = (),
        kept: Mapping[str, KeptCallback] | None = None,
    ) -> None:
        self.settings = module.config.train
        self.device = torch.device("cuda", processes.local_rank) if device == "cuda" else torch.device("cpu")
        self.processes, self.callbacks, self.kept = processes, callbacks, dict(kept or {})
        if device == "cuda":
            torch.cuda.set_device(self.device)
        self.module = module.to(self.device).train()
        self.optimizer = Optimizer(module.denoiser, self.settings)
        decay, every = self.settings.ema_decay, self.settings.ema_every
        self.average = RunningAverage(module, decay, every) if decay else None
        self.step, self.max_steps = 0, self.settings.max_steps
        self.terms: list[dict[str, Tensor]] = []
        self.batch_shape = torch.Size()

    @property
    def first_process(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.processes.rank == 0

    @property
    def averaged(self) -> TrainingModule:
        """The module with averaged weights, or the module itself if nothing is averaged."""
        return self.module if self.average is None else self.average.module

    def run(self, batches: Iterable[CellSetBatch | PackedCellSetBatch]) -> None:
        """Train up to the last step, with the sets of one step after the other."""
        with _deterministic():
            if self.settings.compile:
                torch.use_deterministic_algorithms(True)  # tells the compiler, too
                self.module.compile_network()
            shared = self._shared()
            for loaded in batches:
                if self.step == self.max_steps:
                    break
                self.advance(loaded, shared)
                for callback in self.callbacks:
                    callback.after_step(self)

    def advance(self, loaded: CellSetBatch | PackedCellSetBatch, shared: nn.Module) -> None:
        """Take one optimiser step, in as many passes as the recipe says."""
        passes = self.settings.accumulate
        self.terms = []
        for number, part in enumerate(loaded.split(passes) if passes > 1 else [loaded]):
            batch = part.to(self.device)
            self.batch_shape = batch.target.shape
            draws = self.module.draws(
                self.batch_shape, self.step,
                rank=self.processes.rank, world=self.processes.world_size, part=number, parts=passes,
            )  # fmt: skip
            last = number == passes - 1
            # gradients of all processes are averaged once, in the last pass
            with (
                shared.no_sync()
                if isinstance(shared, DistributedDataParallel) and not last
                else nullcontext()
            ):
                with self._precision():
                    terms: dict[str, Tensor] = shared(batch, draws)
                (terms["total"] / passes).backward()
            self.terms.append(self._over_processes({name: value.detach() for name, value in terms.items()}))
        self.optimizer.step(self.step)
        self.step += 1
        if self.average is not None:
            self.average.update(self.optimizer.weights, self.step)

    def _shared(self) -> nn.Module:
        """Return the module, or what averages its gradients over the processes."""
        if self.processes.world_size == 1:
            return self.module
        # All processes start from equal weights, and every weight has a gradient in every pass.
        return DistributedDataParallel(self.module, broadcast_buffers=False)

    def _precision(self) -> torch.autocast:
        mixed = self.settings.precision == "bf16-mixed"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=mixed)

    def _over_processes(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of loss terms over the processes, so that what any of them records is the step's."""
        if self.processes.world_size == 1:
            return terms
        each = torch.stack([value.double() for value in terms.values()])
        torch.distributed.all_reduce(each)
        means = each / self.processes.world_size
        return dict(zip(terms, means, strict=True))

    def any_process(self, answer: bool) -> bool:  # noqa: FBT001
        """Return whether any of the processes answers yes; all must ask."""
        if self.processes.world_size == 1:
            return answer
        votes = torch.tensor(int(answer), device=self.device)
        torch.distributed.all_reduce(votes)
        return bool(votes)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: all that the next step depends on."""
        average = None if self.average is None else self.average.module.denoiser.state_dict()
        return {
            "global_step": self.step,
            "weights": self.module.denoiser.state_dict(),
            "average": average,
            "optimizer": self.optimizer.state_dict(),
            **{name: callback.state_dict() for name, callback in self.kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self.step = int(state["global_step"])
        self.module.denoiser.load_state_dict(state["weights"])
        if self.average is not None:
            self.average.module.denoiser.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, callback in self.kept.items():
            callback.load_state_dict(state[name])


@contextmanager
def _deterministic() -> Iterator[None]:
    """Compute the same bits each time while the block runs, and put torch's settings back."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    former = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    # With deterministic algorithms torch fills every new tensor before an operation does so: a tenth of a small step.
    memory.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode(
        "error"
    )  # use_deterministic_algorithms loads the compiler: 1.5 seconds
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(former)
        memory.fill_uninitialized_memory = filling
