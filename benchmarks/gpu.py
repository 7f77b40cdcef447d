"""Training and sampling on a GPU: cells per second, TFLOP/s of the matrix products, memory, share of data.

    python benchmarks/gpu.py [--out gpu.json] [--peak 790] [--parts equality,training,sampling,data]

Needs torch, numpy and this repository's `perturbdiff/model` and `perturbdiff/diffusion`; nothing is installed. A unit
of training is four steps, the outcomes of two even coins (self-conditioning, dropped covariates), in bfloat16: noise,
forward, backward, clipping, fused AdamW; a tenth of a moving average is added to each step. Variants of one size take
turns in one run; times are CUDA events, medians over turns.

    eager            our network as it is
    blocks           its blocks compiled
    graph            blocks compiled, the whole step replayed as one CUDA graph
    straightforward  `straightforward.py`, as it is

`fed` is the best of ours with each batch gathered on the host, shipped as sparse rows and densified on the device while
the step before runs; its data share is what that adds to the time. FLOPs are counted at the first size and are
linear in the sets. The largest batch is foretold from the memory of two sizes and halved until it fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from feed import Cells  # noqa: E402
from measuring import Clock, count, denoiser, interleaved, peak_memory, show  # noqa: E402
from straightforward import LABELS, Loss, training_loss, with_weights_of  # noqa: E402

from perturbdiff.diffusion.losses import hybrid_loss  # noqa: E402
from perturbdiff.diffusion.samplers import sample  # noqa: E402
from perturbdiff.diffusion.schedule import NoiseSchedule  # noqa: E402
from perturbdiff.model import Covariates, Denoiser, Estimates  # noqa: E402

EMA_EVERY = 10
UNIT = [(drop, again) for drop in (False, True) for again in (False, True)]


class Trainer:
    """Optimiser steps of one network on batches of one size."""

    def __init__(self, variant: str, given: argparse.Namespace, genes: int, sets: int, cells: Cells) -> None:
        self.variant, self.given, self.sets, self.device = variant, given, sets, cells.device
        ours = denoiser(given, genes)
        self.ours = variant != "straightforward"
        self.net = (ours if self.ours else with_weights_of(ours, genes)).to(self.device)
        if variant in ("blocks", "graph"):
            for block in ours.blocks:
                block.compile(dynamic=False)
        parameters = list(self.net.parameters())
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            parameters, lr=2e-4, betas=(0.9, 0.98), weight_decay=0.01,
            **({"fused": True, "capturable": on_gpu} if self.ours else {}),
        )  # fmt: skip
        self.mean = [p.detach().clone() for p in parameters]
        self.data = cells.batch(sets, given.cells)
        ids = [torch.randint(1, n, (sets,), device=self.device) for n in LABELS.values()]
        self.covariates = Covariates(*ids)
        self.labels = tuple(each[:, None].expand(-1, given.cells) for each in ids)
        self.t = torch.randint(0, 1000, (sets,), device=self.device)
        bar = torch.from_numpy(NoiseSchedule(1000).alpha_bar)
        self.signal, self.spread = (x.sqrt().float().to(self.device) for x in (bar, 1 - bar))
        self.drop = torch.zeros(sets, dtype=torch.bool, device=self.device)
        self.worker, self.coming = ThreadPoolExecutor(1), None
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        if variant == "graph":
            for again in (False, True):
                self._capture(again)

    def _capture(self, again: bool) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(None, again)
        torch.cuda.current_stream().wait_stream(side)
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None  # they never run together
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._step(None, again)
        self.graphs[again] = graph

    def loss(self, drop: bool | None, again: bool) -> Tensor:
        target, control = self.data
        with torch.autocast(self.device.type, torch.bfloat16):
            if not self.ours:
                noise = torch.randn(target.shape, dtype=torch.float64, device=self.device)
                labels = None if drop else self.labels
                return training_loss(self.net, target, control, labels, self.t, noise, again=again)["total"]
            noise = torch.randn_like(target)
            noised = self.signal[self.t][:, None, None] * target + self.spread[self.t][:, None, None] * noise
            previous = None
            if again:
                with torch.no_grad():
                    previous = self.net(noised, self.t, control, self.covariates, drop=self.drop)
            estimate = self.net(
                noised, self.t, control, self.covariates, self_condition=previous, drop=self.drop
            )
            return hybrid_loss(estimate, target, Loss())["total"]

    def _step(self, drop: bool | None, again: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(drop, again).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()

    def step(self, drop: bool, again: bool) -> None:
        self.drop.fill_(drop)
        if self.graphs:
            self.graphs[again].replay()
        else:
            self._step(drop, again)

    def unit(self) -> None:
        for drop, again in UNIT:
            self.step(drop, again)

    def fed(self, cells: Cells) -> None:
        """Do a unit on fresh cells, each batch prepared while the step before runs."""
        shape = (self.sets, self.given.cells)
        for drop, again in UNIT:
            coming = self.coming or self.worker.submit(cells.gather, 2 * shape[0] * shape[1])
            parts = coming.result()
            self.coming = self.worker.submit(cells.gather, 2 * shape[0] * shape[1])
            if cells.stream is None:
                self.data.copy_(cells.dense(*shape, parts))
            else:
                with torch.cuda.stream(cells.stream):
                    fresh = cells.dense(*shape, parts)
                torch.cuda.current_stream().wait_stream(cells.stream)
                self.data.copy_(fresh)
                fresh.record_stream(torch.cuda.current_stream())
            self.step(drop, again)

    def average(self) -> None:
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.net.parameters()], 0.01)


def training(
    given: argparse.Namespace, genes: int, sets: int, variants: list[str], flops: dict
) -> list[dict]:
    """Return a row for each variant at one size; raises when the memory is too small."""
    device, size = given.where, given.cells
    clock, cells = Clock(device), Cells(given, genes, device)
    trainers: dict[str, Trainer] = {}
    memory = {}
    for variant in variants:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20 if device.type == "cuda" else 0.0
        trainer = Trainer(variant, given, genes, sets, cells)
        trainer.unit()
        memory[variant] = peak_memory(device) - before
        trainers[variant] = trainer
    for variant, trainer in trainers.items():
        kind = (genes, trainer.ours)
        if kind not in flops:
            plain = (
                trainer
                if variant in ("eager", "straightforward")
                else Trainer("eager", given, genes, sets, cells)
            )
            flops[kind] = count(plain.unit) / len(UNIT) / sets
    works: dict[str, Callable[[], object]] = {name: one.unit for name, one in trainers.items()}
    best = next(name for name in ("graph", "blocks", "eager") if name in trainers)
    works["fed"] = lambda: trainers[best].fed(cells)
    works["average"] = trainers[best].average
    works["data"] = lambda: cells.batch(sets, size)
    took = interleaved(works, clock, given.turns)
    rows = []
    for name in [*trainers, "fed"]:
        seconds = took[name] / len(UNIT) + took["average"] / EMA_EVERY
        one = flops[genes, name != "straightforward"] * sets
        rows.append({
            "what": f"train {name}", "genes": genes, "sets": sets, "cells/s": sets * size / seconds,
            "ms": 1000 * seconds, "TFLOP/s": one / seconds / 1e12, "of peak": one / seconds / 1e12 / given.peak,
            **({"MiB": memory[name]} if memory.get(name) else {}),
        })  # fmt: skip
    rows[-1]["data share"] = max(0.0, 1 - took[best] / took["fed"])
    rows.append({"what": "data alone", "genes": genes, "sets": sets, "cells/s": sets * size / took["data"],
                 "ms": 1000 * took["data"]})  # fmt: skip
    return rows


def largest(given: argparse.Namespace, genes: int, flops: dict) -> list[dict]:
    """Return the rows of the largest batch that fits: foretold from two sizes, then halved until it does."""
    variant = "blocks" if "blocks" in given.variants else given.variants[0]
    free = torch.cuda.get_device_properties(0).total_memory / 2**20
    low, high = given.sets, 4 * given.sets
    turns, given.turns = given.turns, 1
    used = []
    for sets in (low, high):
        release()
        used.append(training(given, genes, sets, [variant], flops)[0]["MiB"])
    given.turns = turns
    per_set = max((used[1] - used[0]) / (high - low), 1.0)
    room = (0.9 * free - used[0]) / per_set + low
    sets = low
    while 2 * sets <= min(room, given.max_sets):
        sets *= 2
    while sets > low:
        release()
        try:
            return training(given, genes, sets, [variant], flops)
        except RuntimeError as error:  # out of memory, or an index beyond what a kernel takes
            print(f"{sets} sets of {genes} genes: {str(error).splitlines()[0]}")
        sets //= 2
    return []


def release() -> None:
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sampling(given: argparse.Namespace, genes: int) -> list[dict]:
    """Return rows for the guided reverse process, ours and straightforward."""
    device, clock, sets = given.where, Clock(given.where), given.sample_sets
    control = Cells(given, genes, device).batch(sets, given.cells)[1]
    ids = [torch.randint(1, n, (sets,), device=device) for n in LABELS.values()]
    schedule, noise = NoiseSchedule(1000), torch.randn(control.shape, device=device)
    settings = SimpleNamespace(
        sampler="ddim", num_steps=given.steps, start_level=None, eta=0.0, guidance=1.0, self_condition=True,
        ddpm_variance="posterior", arithmetic="single",
    )  # fmt: skip

    def run(net: torch.nn.Module, denoise: Callable) -> Tensor:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            return sample(
                denoise(net), lambda: noise, schedule, settings, clean=lambda x: x.float().clamp_min(0)
            )

    def shared(net: Denoiser) -> Estimates:
        return Estimates(net, control, Covariates(*ids), guided=True)

    def plain(net: torch.nn.Module) -> Callable:
        labels = tuple(each[:, None].expand(-1, given.cells) for each in ids)

        def denoise(x: Tensor, level: int, previous: Tensor | None, told: bool) -> Tensor:
            t = torch.full((len(x),), level, device=device)
            return net(x, t, control, labels if told else None, previous)[0]

        return denoise

    ours, compiled = (denoiser(given, genes).to(device) for _ in range(2))
    theirs = with_weights_of(denoiser(given, genes), genes).to(device)
    works = {"eager": lambda: run(ours, shared)}
    if "blocks" in given.variants or "graph" in given.variants:
        for block in compiled.blocks:
            block.compile(dynamic=False)
        works["blocks"] = lambda: run(compiled, shared)
    works["straightforward"] = lambda: run(theirs, plain)
    done = {name: count(works[name]) for name in ("eager", "straightforward")}
    took = interleaved(works, clock, max(given.turns // 3, 1))
    return [{
        "what": f"sample {name}", "genes": genes, "sets": sets, "cells/s": sets * given.cells / seconds,
        "ms": 1000 * seconds, "TFLOP/s": done.get(name, done["eager"]) / seconds / 1e12,
        "of peak": done.get(name, done["eager"]) / seconds / 1e12 / given.peak,
    } for name, seconds in took.items()]  # fmt: skip


def equality(given: argparse.Namespace, genes: int) -> dict[str, float]:
    """Return relative differences between the device and the CPU in float32: estimate, loss, gradient."""
    torch.manual_seed(3)
    x, control, target = torch.rand(3, 2, min(64, given.cells), genes)
    ids, t = Covariates(*(torch.randint(1, n, (2,)) for n in LABELS.values())), torch.tensor([30, 700])
    found = []
    for device in (torch.device("cpu"), given.where):
        net = denoiser(given, genes).to(device)
        out = net(x.to(device), t.to(device), control.to(device), Covariates(*(i.to(device) for i in ids)))
        loss = hybrid_loss(out, target.to(device), Loss())["total"]
        loss.backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in net.parameters() if p.grad is not None])
        found.append((out.detach().cpu(), loss.detach().cpu(), gradient))
    names = ("estimate", "loss", "gradient")
    return {n: float((b - a).norm() / a.norm()) for n, a, b in zip(names, *found, strict=True)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("width", 512), ("depth", 8), ("heads", 8), ("sets", 8), ("cells", 256), ("steps", 100), ("turns", 9),
        ("max-sets", 1024), ("sample-sets", 32), ("stored", 50_000), ("threads", 8),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--genes", type=lambda text: [int(x) for x in text.split(",")], default=[2000, 12626])
    parser.add_argument("--peak", type=float, default=790, help="TFLOP/s of a large bfloat16 product")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--variants", type=lambda x: x.split(","), help="default: eager on a CPU, all on a GPU"
    )
    parser.add_argument("--parts", default="equality,training,largest,sampling")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    given.where = torch.device(given.device)
    on_gpu = given.where.type == "cuda"
    given.variants = given.variants or (["eager", "blocks", "graph"] if on_gpu else ["eager"])
    if given.tiny:
        given.width, given.depth, given.heads, given.genes, given.cells = 32, 2, 4, [50], 8
        given.sets, given.steps, given.turns, given.sample_sets, given.stored, given.threads = (
            2,
            2,
            1,
            2,
            100,
            2,
        )
        given.max_sets = 8
    return given


def main() -> None:
    given = parse()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 64
    parts, flops, rows, alike = given.parts.split(","), {}, [], {}
    steps: list[Callable[[], list[dict]]] = []
    if "equality" in parts:
        alike = equality(given, given.genes[0])
        print("float32, device against CPU:", ", ".join(f"{k} {v:.1e}" for k, v in alike.items()))
        if max(alike["estimate"], alike["loss"]) > 1e-4:
            sys.exit("the device and the CPU differ by more than 1e-4")
    for genes in given.genes:
        if "training" in parts:
            both = [*given.variants, "straightforward"]
            steps.append(lambda g=genes, v=both: training(given, g, given.sets, v, flops))
        if "largest" in parts and given.where.type == "cuda":
            steps.append(lambda g=genes: largest(given, g, flops))
    if "sampling" in parts:
        steps.append(lambda: sampling(given, given.genes[0]))
    for step in steps:
        try:
            rows += step()
        except RuntimeError as error:  # one part's failure leaves the others
            print(f"failed: {str(error).splitlines()[0]}", file=sys.stderr)
        release()
        name = torch.cuda.get_device_name() if given.where.type == "cuda" else "cpu"
        if given.out:
            facts = {
                "device": name,
                "torch": torch.__version__,
                "peak TFLOP/s": given.peak,
                "agreement": alike,
            }
            given.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
