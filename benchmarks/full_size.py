"""GPU hours of the full-size experiments, computed from their sheets: the tables of docs/reproduce.md.

    python benchmarks/full_size.py [--loader benchmarks/measured/loader.json] [--update docs/reproduce.md]

Nothing is run. The work of a row of `assets/experiments/NAME.csv` follows from its recipe (`training.counts`: FLOPs of
the network per cell and pass) and from the cells that the paper's Tab. data_summary counts; time is that work at an
assumed speed of the GPU, or the measured speed of the loader where that is slower. ``--update`` writes the tables into
the page and ``gpu_hours`` into NAME.yml; ``--check`` fails if they say something else; else the tables are printed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import yaml

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config, ModelConfig
from perturbdiff.datasets import registered
from perturbdiff.inspection.costs import SPEED
from perturbdiff.model import Denoiser
from perturbdiff.training.network_size import by_group, flops_per_cell

ROOT = Path(__file__).parents[1]
SHEETS = ROOT / "assets" / "experiments"
EXPERIMENTS = (
    *("main-replogle", "main-pbmc", "main-tahoe", "main"),
    *(
        "zeroshot",
        "zeroshot-epochs",
        "fewshot",
        "fewshot-steps",
        "scaling",
        "ablation",
        "variants",
        "guidance",
    ),
)
START, END = "<!-- computed: start -->", "<!-- computed: end -->"

SHARED_GENES = 12_626
OWN_GENES = 2000
THREADS_GAIN = 1.5
"""Cells per second with two loading threads, one thread = 1 (lab/speed.md)."""


SCREENS = {name: dataset.paper for name, dataset in registered().items() if dataset.paper}
"""What the paper counts in a data set: perturbed cells by part, controls, labels."""


@dataclass(frozen=True)
class Work:
    """FLOPs of the network, and cells that the loader prepares (targets and controls) at the genes of its stores."""

    flops: float = 0.0
    loaded: int = 0
    genes: int = OWN_GENES

    def seconds(self, precision: str, loader: dict[int, float]) -> float:
        """Return the larger of computing and loading, which overlap."""
        return max(self.flops / SPEED[precision], self.loaded / loader[self.genes])


@cache
def network(model: ModelConfig, genes: int, datasets: tuple[str, ...]) -> Denoiser:
    """Return a network without values: only its shapes are looked at."""
    screens = [SCREENS[name] for name in datasets]
    with torch.device("meta"):
        return Denoiser(
            model,
            num_genes=genes,
            num_perturbations=1 + sum(screen.perturbations + 1 for screen in screens),
            num_cell_types=1 + sum(screen.cell_types for screen in screens),
            num_batches=1 + sum(screen.batches for screen in screens),
            datasets=datasets,
        )


@cache
def forward(model: ModelConfig, genes: int, size: int, *, self_condition: bool) -> int:
    """Return the FLOPs of one cell in one pass; they do not depend on labels."""
    return flops_per_cell(network(model, genes, ("replogle",)), size, self_condition=self_condition)


def read_sheet(name: str) -> list[dict[str, str]]:
    with (SHEETS / f"{name}.csv").open() as handle:
        return list(csv.DictReader(handle))


def overrides_of(row: dict[str, str]) -> list[str]:
    """Return the overrides that do not speak to one data set of several."""
    return [part for part in row.get("overrides", "").split(";") if part and ":" not in part.split("=")[0]]


@cache
def loaded(preset: str, overrides: tuple[str, ...]) -> Config:
    return recipes.load(preset, list(overrides))


def recipe_of(row: dict[str, str], rows: Iterable[dict[str, str]]) -> Config:
    """Return a row's recipe; a sample row takes that of the row whose model it samples."""
    source = next(
        (r for r in rows if r["id"] == row.get("init") and r["mode"] in ("train", "finetune")), None
    )
    if row["mode"] == "sample" and source:
        return loaded(source["preset"], (*overrides_of(source), *overrides_of(row)))
    return loaded(row["preset"], tuple(overrides_of(row)))


def genes_of(row: dict[str, str], rows: Iterable[dict[str, str]]) -> int:
    """Return the length of the model's gene list: the prior's wherever it is kept."""
    if row["mode"] == "pretrain" or (row["mode"] == "finetune" and row["transfer"] != "new-genes"):
        return SHARED_GENES
    source = next((r for r in rows if r["id"] == row.get("init")), None)
    return genes_of(source, rows) if row["mode"] == "sample" and source else OWN_GENES


def stored_genes(row: dict[str, str], rows: Iterable[dict[str, str]]) -> int:
    """Return the genes of a row's store; a sample row without a list has those of the row that it samples."""
    source = next((r for r in rows if not row.get("genes") and r["id"] == row.get("init")), row)
    return SHARED_GENES if source["genes"] == "prior-genes" else OWN_GENES


def fitting(row: dict[str, str], rows: list[dict[str, str]]) -> Work:
    """Return the work of a training; a backward pass is two forward passes, self-conditioning half a pass more."""
    if row["mode"] not in ("train", "finetune", "pretrain"):
        return Work()
    config, genes = recipe_of(row, rows), genes_of(row, rows)
    train = config.train
    cells = train.max_steps * train.sets_per_step * train.set_size
    once = forward(config.model, genes, train.set_size, self_condition=train.self_condition > 0)
    # distances of every two cells of a set, thrice, and twice that in the backward pass
    once_loss = 3 * 2 * train.set_size * genes if config.loss.mmd_weight else 0
    flops = cells * (once * (3 + train.self_condition) + 3 * once_loss)
    return Work(flops, cells * (1 if train.zero_control else 2), stored_genes(row, rows))


def sampling(row: dict[str, str], rows: list[dict[str, str]]) -> Work:
    """Return the work of predicting the cells of a row's part."""
    if row["mode"] not in ("train", "finetune", "sample"):
        return Work()
    config, genes = recipe_of(row, rows), genes_of(row, rows)
    screen = SCREENS[row["dataset"]]
    cells = screen.valid if row.get("part") == "valid" else screen.test
    size = config.sample.set_size or config.train.set_size
    passes = config.sample.num_steps * (2 if config.sample.guidance else 1)
    once = forward(config.model, genes, size, self_condition=config.sample.self_condition)
    return Work(cells * passes * once, cells, stored_genes(row, rows))


def loader_speed(path: Path) -> dict[int, float]:
    """Return cells per second of the windowed loader with two threads, by number of genes."""
    rows = json.loads(path.read_text())["rows"]
    return {
        OWN_GENES: rows["windowed, 2 threads"]["cells/s"],
        SHARED_GENES: rows["windowed, 12626 genes"]["cells/s"] * THREADS_GAIN,
    }


@dataclass(frozen=True)
class Total:
    """GPU hours of an experiment: training and sampling in float32, all of it in bfloat16; rows of each kind."""

    fitted: int
    sampled: int
    tools: int
    fit: float
    sample: float
    half: float

    @property
    def hours(self) -> float:
        return self.fit + self.sample


def total(name: str, loader: dict[int, float]) -> Total:
    rows = read_sheet(name)
    fits = [fitting(row, rows) for row in rows]
    draws = [sampling(row, rows) for row in rows]

    def hours(works: list[Work], precision: str) -> float:
        return sum(work.seconds(precision, loader) for work in works) / 3600

    return Total(
        sum(work.flops > 0 for work in fits),
        sum(work.flops > 0 for work in draws),
        sum(row["mode"] in ("state", "cpa", "cellflow", "squidiff") for row in rows),
        hours(fits, "32-true"),
        hours(draws, "32-true"),
        hours([*fits, *draws], "bf16-mixed"),
    )


def number(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def model_table(loader: dict[int, float]) -> list[str]:
    """Return the work of one training and of one prediction, for every row of the main experiment."""
    lines = [
        "| | genes | parameters | MFLOP per cell and pass | cells trained on, M | PFLOP | h, float32 | h, bfloat16 "
        "| loading, h | cells predicted, M | PFLOP | h, float32 | h, bfloat16 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = read_sheet("main")
    for row in rows:
        fit, draw = fitting(row, rows), sampling(row, rows)
        if not fit.flops:
            continue
        config, genes = recipe_of(row, rows), genes_of(row, rows)
        names = (
            tuple(row["dataset"].split("|"))
            if row["mode"] != "finetune"
            else ("pbmc", "tahoe100m", "replogle")
        )
        size = sum(by_group(network(config.model, genes, names)).values())
        once = forward(config.model, genes, config.train.set_size, self_condition=True)
        cells = config.train.max_steps * config.train.sets_per_step * config.train.set_size
        predicted = SCREENS[row["dataset"]].test if draw.flops else 0
        speeds = [work.flops / SPEED[p] / 3600 for work in (fit, draw) for p in SPEED]
        loading = fit.loaded / loader[fit.genes] / 3600
        lines.append(
            f"| {row['id']} | {genes:,} | {size / 1e6:.0f} M | {once / 1e6:.0f} | {cells / 1e6:.1f} "
            f"| {fit.flops / 1e15:,.0f} | {number(speeds[0])} | {number(speeds[1])} | {number(loading)} "
            + (
                f"| {predicted / 1e6:.2f} | {draw.flops / 1e15:,.0f} | {number(speeds[2])} | {number(speeds[3])} |"
                if predicted
                else "| – | – | – | – |"
            )
        )
    return lines


def experiment_table(totals: dict[str, Total]) -> list[str]:
    """Return the GPU hours of each experiment."""
    lines = [
        "| experiment | trainings | predictions | training, h | sampling, h | **together, float32** | bfloat16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in totals.items():
        more = f", and {one.tools} runs of external methods" if one.tools else ""
        lines.append(
            f"| `{name}` | {one.fitted} | {one.sampled}{more} | {number(one.fit)} | {number(one.sample)} "
            f"| **{math.ceil(one.hours)} h** | {math.ceil(one.half)} h |"
        )
    return lines


def page(loader: dict[int, float]) -> tuple[str, dict[str, Total]]:
    """Return the computed part of the page, and the totals."""
    totals = {name: total(name, loader) for name in EXPERIMENTS}
    models = "\n".join(model_table(loader))
    return f"### One model\n\n{models}\n\n### Experiments\n\n" + "\n".join(experiment_table(totals)), totals


def differences(text: str, totals: dict[str, Total], path: Path) -> list[str]:
    """Return what the page and the experiments' files say otherwise."""
    found = (
        []
        if text in path.read_text()
        else [f"{path}: its tables are not those of the sheets; run with --update"]
    )
    for name, one in totals.items():
        said = yaml.safe_load((SHEETS / f"{name}.yml").read_text())["gpu_hours"]
        if said != math.ceil(one.hours):
            found.append(f"{name}.yml: gpu_hours {said}, computed {math.ceil(one.hours)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loader", type=Path, default=ROOT / "benchmarks" / "measured" / "loader.json")
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")
    parser.add_argument("--check", type=Path, help="page whose tables are compared")
    given = parser.parse_args()
    text, totals = page(loader_speed(given.loader))
    if given.check:
        found = differences(text, totals, given.check)
        print("\n".join(found))
        sys.exit(bool(found))
    if given.update is None:
        print(text)
        return
    before, rest = given.update.read_text().split(START)
    given.update.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    for name, one in totals.items():
        path = SHEETS / f"{name}.yml"
        path.write_text(
            re.sub(r"(?m)^gpu_hours: .*$", f"gpu_hours: {math.ceil(one.hours)}", path.read_text())
        )


if __name__ == "__main__":
    main()
