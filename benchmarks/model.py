"""Training and guided sampling on the CPU, beside a straightforward implementation of the same mathematics.

    OMP_NUM_THREADS=1 python benchmarks/model.py [--repeats 5] [--out model.json]

Both sides get the same weights, cells and noise, and have to agree on loss and samples before they are timed. One
repeat is: each kind of training step on either side in turn, then a guided reverse process on either side. Kinds of
step are the four outcomes of two even coins, for self-conditioning and for dropped covariates (the straightforward
side conditions every cell on its own where there are covariates, as the released code does); "mix" is their
expectation. A step is noise, forward, backward, clipping, AdamW and a tenth of a moving average. CPU seconds are of
all threads; medians over repeats; ratios are of those medians. Memory is of one process for each side. FLOPs are
counted from the matrix products; the peak is a measured large product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from measuring import denoiser
from straightforward import LABELS, training_loss, with_weights_of
from straightforward import sample as straightforward_sample
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from perturbdiff.config import recipes
from perturbdiff.diffusion.samplers import sample
from perturbdiff.diffusion.schedule import NoiseSchedule
from perturbdiff.model import Covariates, Estimates
from perturbdiff.training.module import Draws, TrainingModule
from perturbdiff.training.optimizer import Optimizer

EMA_EVERY = 10
KINDS = {
    "told": (False, False), "told, again": (False, True), "dropped": (True, False), "dropped, again": (True, True)
}  # fmt: skip


class ExpressionView:
    """What both sides have in common."""

    name: str
    module: torch.nn.Module
    average: AveragedModel

    def loss(self, *, drop: bool, again: bool, noise: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def sample(self) -> Tensor:
        raise NotImplementedError

    def update(self) -> None:
        """Take an optimiser step with the gradients that there are, and drop them."""
        raise NotImplementedError

    def step(self, *, drop: bool, again: bool) -> None:
        self.loss(drop=drop, again=again).backward()
        self.update()

    def works(self) -> dict[str, Callable[[], object]]:
        steps = {kind: partial(self.step, drop=drop, again=again) for kind, (drop, again) in KINDS.items()}
        return steps | {
            "average": partial(self.average.update_parameters, self.module),
            "sampling": self.sample,
        }


class Ours(ExpressionView):
    """The package's own training module and sampler, without the trainer around them."""

    name = "perturbdiff"

    def __init__(self, given: argparse.Namespace, cells: SimpleNamespace) -> None:
        overrides = [f"model.{key}={getattr(given, key)}" for key in ("width", "depth", "heads")]
        config = recipes.load("released", [*overrides, "model.gene_embedding=shared"])
        self.cells, self.given = cells, given
        self.module = TrainingModule(denoiser(given, given.genes), config)
        self.optimizer = Optimizer(self.module.denoiser, config.train)
        self.average = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        self.sets = SimpleNamespace(
            target=cells.target, control=cells.control, dataset=torch.zeros(given.sets, dtype=torch.long),
            perturbation=cells.labels[0], cell_type=cells.labels[1], batch=cells.labels[2],
        )  # fmt: skip
        self.schedule = NoiseSchedule(1000)
        self.settings = config.sample.model_copy(
            update={
                "num_steps": given.steps, "start_level": None, "sampler": "ddim", "eta": 0.0, "guidance": 1.0,
                "self_condition": True, "cutoff": 0.0,
            }
        )  # fmt: skip

    def update(self) -> None:
        self.optimizer.step(self.module.config.train.warmup_steps)

    def loss(self, *, drop: bool, again: bool, noise: Tensor | None = None) -> Tensor:
        if noise is None:
            noise = self.module.draws(self.cells.target.shape, 0).noise
        dropped = torch.full((len(self.cells.t),), drop)
        return self.module.objective(self.sets, Draws(self.cells.t, noise, dropped, again))["total"]

    @torch.inference_mode()
    def sample(self) -> Tensor:
        one, model = self.cells, self.module.denoiser
        control, told = one.control[:1], Covariates(*(ids[:1] for ids in one.labels))
        estimates = Estimates(model, control, told, guided=True)
        return sample(
            estimates, lambda: one.start, self.schedule, self.settings, clean=lambda x: x.clamp_min(0)
        )


class Theirs(ExpressionView):
    """The straightforward network with the training loop of a first version."""

    name = "straightforward"

    def __init__(self, given: argparse.Namespace, cells: SimpleNamespace) -> None:
        self.cells, self.given = cells, given
        self.net = with_weights_of(denoiser(given, given.genes), given.genes)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=2e-4, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        self.module = self.net
        self.labels = tuple(ids[:, None].expand(-1, given.cells) for ids in cells.labels)

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, *, drop: bool, again: bool, noise: Tensor | None = None) -> Tensor:
        one = self.cells
        noise = torch.randn(one.target.shape, dtype=torch.float64) if noise is None else noise.double()
        labels = None if drop else self.labels
        return training_loss(self.net, one.target, one.control, labels, one.t, noise, again=again)["total"]

    def sample(self) -> Tensor:
        one = self.cells
        labels = tuple(ids[:1] for ids in self.labels)
        return straightforward_sample(
            self.net, one.start, one.control[:1], labels, steps=self.given.steps, weight=1.0
        )


def material(given: argparse.Namespace) -> SimpleNamespace:
    """Return log1p-like sparse cells, labels, levels and start noise."""
    torch.manual_seed(1)
    shape = (given.sets, given.cells, given.genes)
    target, control = (torch.relu(torch.randn(shape) - 1) for _ in range(2))
    labels = tuple(torch.randint(1, n, (given.sets,)) for n in LABELS.values())
    t = torch.linspace(10, 990, given.sets).long()
    return SimpleNamespace(
        target=target, control=control, labels=labels, t=t, start=torch.randn(1, *shape[1:])
    )


def agreement(ours: Ours, theirs: Theirs) -> dict[str, float]:
    """Return the largest relative differences of loss and samples; both sides have the same weights still."""
    noise = torch.randn(ours.cells.target.shape, generator=torch.Generator().manual_seed(2))
    found = {}
    for kind in ("told, again", "dropped, again"):
        drop, again = KINDS[kind]
        with torch.no_grad():
            a, b = (side.loss(drop=drop, again=again, noise=noise).item() for side in (ours, theirs))
        found[f"loss, {kind}"] = abs(a - b) / abs(b)
    a, b = ours.sample(), theirs.sample()
    found["samples"] = float((a - b).norm() / b.norm())
    return found


def cpu(work: Callable[[], object]) -> tuple[float, float]:
    """Return CPU seconds of all threads and wall seconds of ``work``."""
    wall, used = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - used, time.perf_counter() - wall


def flops(work: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def peak_rate(size: int) -> float:
    """Return the FLOP/s per CPU second of one large product."""
    a, b = torch.randn(2, size, size)
    return 2 * size**3 / min(cpu(lambda: a @ b)[0] for _ in range(5))


def timings(sides: tuple[Ours, Theirs], repeats: int) -> tuple[dict, dict]:
    """Return (CPU, wall) seconds of each kind of work side by side, and the FLOPs of each."""
    found: dict[str, dict[str, list]] = {}
    counted: dict[str, dict[str, float]] = {}
    for repeat in range(repeats + 1):
        for kind in [*KINDS, "average", "sampling"]:
            for side in sides if repeat % 2 else sides[::-1]:
                work = side.works()[kind]
                if repeat:
                    found.setdefault(kind, {}).setdefault(side.name, []).append(cpu(work))
                else:  # warms up
                    counted.setdefault(kind, {})[side.name] = flops(work)
    return found, counted


def memory(given: argparse.Namespace) -> None:
    """Print one side's memory as JSON: kept activations, and how far two steps (or sampling) raise the peak."""
    side = {one.name: one for one in (Ours, Theirs)}[given.memory](given, material(given))
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in side.module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = peak_memory()
    side.sample()
    sampled = peak_memory()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = side.loss(drop=False, again=True)
    total = sum(kept.values()) / 2**20
    loss.backward()
    side.update()
    side.step(drop=False, again=True)
    print(json.dumps({
        "kept activations": total, "peak before": before, "peak, sampling": sampled, "peak, training": peak_memory(),
    }))  # fmt: skip


def in_a_process(side: str) -> dict[str, float]:
    """Return what `memory` says of a side in a process of its own."""
    command = [sys.executable, *sys.argv, "--memory", side]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def peak_memory() -> float:
    """Return this process's peak memory in MiB (ru_maxrss would start at the parent's)."""
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) / 1024


def summary(given: argparse.Namespace, took: dict, counted: dict, peak: float) -> dict[str, dict[str, float]]:
    """Return rates and ratios of each kind of work."""
    cells = given.sets * given.cells
    rows = {}
    names = [Ours.name, Theirs.name]
    median = {
        kind: {n: [statistics.median(x[i] for x in times[n]) for i in (0, 1)] for n in names}
        for kind, times in took.items()
    }
    for kind in [*KINDS, "mix", "sampling"]:
        row: dict[str, float] = {}
        for name in names:
            of = list(KINDS) if kind == "mix" else [kind]
            used, wall = (sum(median[k][name][i] for k in of) / len(of) for i in (0, 1))
            if kind != "sampling":
                used, wall = (
                    total + median["average"][name][i] / EMA_EVERY for i, total in enumerate((used, wall))
                )
            done = given.cells if kind == "sampling" else cells
            work = sum(counted[k][name] for k in of) / len(of)
            row |= {
                f"{name}: cells/CPU-s": done / used, f"{name}: cells/s": done / wall,
                f"{name}: GFLOP": work / 1e9, f"{name}: share of peak": work / used / peak,
            }  # fmt: skip
        row["ratio"] = row[f"{Ours.name}: cells/CPU-s"] / row[f"{Theirs.name}: cells/CPU-s"]
        pairs = [
            statistics.median(
                b[0] / a[0] for a, b in zip(took[k][Ours.name], took[k][Theirs.name], strict=True)
            )
            for k in (KINDS if kind == "mix" else [kind])
        ]
        row["ratio, pairs"] = statistics.mean(pairs)
        rows[kind] = row
    return rows


def show(rows: dict[str, dict[str, float]], used: dict[str, dict[str, float]]) -> None:
    print(f"{'':16} {'cells/CPU-s':>21} {'cells/s':>15} {'GFLOP':>15} {'of peak':>13} {'ratio':>7}")
    for kind, row in rows.items():
        values = [
            f"{row[f'{Ours.name}: {what}']:{w}.{d}f} {row[f'{Theirs.name}: {what}']:{w}.{d}f}"
            for what, w, d in (
                ("cells/CPU-s", 10, 1),
                ("cells/s", 7, 0),
                ("GFLOP", 7, 0),
                ("share of peak", 6, 2),
            )
        ]
        print(f"{kind:16} {' '.join(values)} {row['ratio']:7.2f}")
    for what in used.get(Ours.name, {}):
        a, b = used[Ours.name][what], used[Theirs.name][what]
        print(f"MiB, {what:20} {a:10.0f} {b:10.0f} {b / a:7.2f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("width", 512), ("depth", 4), ("heads", 8), ("genes", 2000), ("sets", 4), ("cells", 256), ("steps", 5),
        ("repeats", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tiny:
        given.width, given.depth, given.heads, given.genes = 32, 2, 4, 50
        given.sets, given.cells, given.steps, given.repeats = 2, 8, 2, 1
    return given


def main() -> None:
    given = parse()
    if given.memory:
        memory(given)
        return
    cells = material(given)
    sides = Ours(given, cells), Theirs(given, cells)
    alike = agreement(*sides)
    if max(alike.values()) > (1e-4 if given.tiny else 1e-5):
        sys.exit(f"the two sides differ: {alike}")
    peak = peak_rate(512 if given.tiny else 2048)
    took, counted = timings(sides, given.repeats)
    rows = summary(given, took, counted, peak)
    del sides
    used = {} if given.tiny else {side.name: in_a_process(side.name) for side in (Ours, Theirs)}
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, product {peak / 1e9:.0f} GFLOP per CPU second"
    )
    print(
        f"largest relative difference: loss {max(list(alike.values())[:-1]):.1e}, samples {alike['samples']:.1e}"
    )
    show(rows, used)
    if given.out:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "peak GFLOP/s": peak / 1e9}
        settings = {k: v for k, v in vars(given).items() if isinstance(v, int | bool)}
        text = json.dumps(
            {"facts": facts | settings, "agreement": alike, "rows": rows, "MiB": used}, indent=1
        )
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
