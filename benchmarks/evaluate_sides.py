"""One side of the benchmark of evaluation, in a process that stays: it loads and warms up, then takes turns.

    python benchmarks/evaluate_sides.py WAY REAL PREDICTED FOLDER [--threads N] [--prototype FILE]

It prints a line of JSON when it is ready, and for each line on stdin does its work once and prints another: seconds of
reading and of computing, CPU seconds of the latter, the peak of its memory so far. The values by metric (cell-eval's
columns) and perturbation are left in FOLDER. Runs with the Python of whatever it measures and needs nothing but that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROL, COLUMN = "control", "perturbation"
DEFINITION = "cell-eval-0.8.2"
COSTLY = ["pearson_edistance", "clustering_agreement"]
"""Metrics of cell-eval that ours has no counterpart of: left out, which makes it faster."""

Values = dict[str, dict[str, float]]
Turn = Callable[[], tuple[float, Values]]
"""Does the work once; returns the time (`perf_counter`) at which computing began, and what came out."""


def load(given: argparse.Namespace) -> list:
    import anndata as ad

    start = time.perf_counter()
    found = [ad.read_h5ad(path) for path in (given.real, given.predicted)]
    given.reading = time.perf_counter() - start
    return found


def cell_eval(given: argparse.Namespace) -> Turn:
    """Return turns of cell-eval on cells in memory; compiled on a few perturbations before."""
    from cell_eval import MetricsEvaluator

    real, predicted = load(given)
    outdir = str(given.folder / "cell-eval")

    def evaluate(*sides: object) -> Values:
        shutil.rmtree(outdir, ignore_errors=True)
        made = MetricsEvaluator(
            *sides, control_pert=CONTROL, pert_col=COLUMN, num_threads=given.threads, outdir=outdir
        )
        results, _ = made.compute(skip_metrics=COSTLY)
        table = {column: results[column].to_list() for column in results.columns}
        names = table.pop("perturbation")
        return {c: dict(zip(names, map(number, values), strict=True)) for c, values in table.items()}

    few = [CONTROL, *sorted(set(real.obs[COLUMN]) - {CONTROL})[:3]]
    evaluate(*(a[a.obs[COLUMN].isin(few)].copy() for a in (predicted, real)))
    return lambda: (time.perf_counter(), evaluate(predicted, real))


def number(value: object) -> float:
    return float("nan") if value is None else float(value)  # type: ignore[arg-type]


def prototype(given: argparse.Namespace) -> Turn:
    """Return turns of the prototype's ``evaluate`` on cells in memory."""
    spec = importlib.util.spec_from_file_location("prototype", given.prototype)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    real, predicted = load(given)

    def turn() -> tuple[float, Values]:
        start = time.perf_counter()
        names, found, *_ = module.evaluate(real, predicted, COLUMN, CONTROL, compat="0.8.2")
        names = list(map(str, names))
        return start, {c: dict(zip(names, map(float, v), strict=True)) for c, v in found.items()}

    turn()
    return turn


def names_of_theirs() -> tuple[str, ...]:
    from perturbdiff.evaluation.metrics.catalogue import METRICS

    return tuple(n for n, metric in METRICS.items() if metric.column or n == "R2")


def library(given: argparse.Namespace) -> Turn:
    """Return turns of `compare` and `tabulate` on cells in memory."""
    from perturbdiff.evaluation import METRICS, compare, tabulate

    real, predicted = load(given)
    labels = [side.obs[COLUMN].astype(str).to_numpy() for side in (real, predicted)]
    genes, names = list(real.var_names), names_of_theirs()

    def turn() -> tuple[float, Values]:
        start = time.perf_counter()
        found = compare(
            real.X,
            predicted.X,
            *labels,
            control=CONTROL,
            genes=genes,
            definition=DEFINITION,
            threads=given.threads,
        )
        table = tabulate(found, names)
        return start, {METRICS[n].column or n: table[n].astype(float).to_dict() for n in names}

    turn()
    return turn


def ours(given: argparse.Namespace) -> Turn:
    """Return turns that open the files, as `evaluate` does, and make the tests and cell-eval's metrics."""
    from perturbdiff.config.settings import EvaluateConfig
    from perturbdiff.evaluation.metrics import catalogue
    from perturbdiff.evaluation.readers import inputs, pairing
    from perturbdiff.evaluation.scoring import condition_pass

    names = names_of_theirs()
    config = EvaluateConfig(
        definition=DEFINITION, metrics=names, cell_type_key=None, batch_key=None, control=CONTROL
    )

    def turn() -> tuple[float, Values]:
        predicted = inputs.open_predictions(given.predicted, config)
        pairs = pairing.pair(predicted, inputs.open_truth(given.real, config, control=CONTROL), config)
        start = time.perf_counter()
        scored = condition_pass.score_cells(pairs, config, seed=0, threads=given.threads)
        (comparison,) = scored.comparisons.values()
        found = catalogue.score(comparison, names)
        of = comparison.perturbations
        return start, {
            catalogue.METRICS[n].column or n: dict(zip(of, for_each(v, len(of)), strict=True))
            for n, v in found.items()
        }

    turn()
    return turn


def for_each(values: Any, count: int) -> list[float]:
    """Return a value for each perturbation: one number for all of them is copied, as cell-eval does."""
    return [float(v) for v in values] * (count if len(values) == 1 else 1)


def whole(given: argparse.Namespace) -> Turn:
    """Return turns of the whole stage with every metric: from files to a folder of tables."""
    from perturbdiff.config.settings import EvaluateConfig
    from perturbdiff.evaluation import evaluation_stage

    config = EvaluateConfig(definition=DEFINITION, cell_type_key=None, batch_key=None, control=CONTROL)
    out = given.folder / f"tables-{given.threads}"

    def turn() -> tuple[float, Values]:
        start = time.perf_counter()
        evaluation_stage.evaluate(given.predicted, given.real, out, config, threads=given.threads, force=True)
        return start, {}

    turn()
    return turn


WAYS = {"library": library, "ours": ours, "whole": whole, "cell-eval": cell_eval, "prototype": prototype}


def peak() -> float:
    """Return the most memory that was resident in this process, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    for name in ("real", "predicted", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prototype", type=Path)
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(**found: float) -> None:
        print(json.dumps({**found, "peak": peak()}), file=answers, flush=True)

    start = time.perf_counter()
    turn = WAYS[given.way](given)
    answer(ready=time.perf_counter() - start)
    for _ in sys.stdin:
        opened, cpu = time.perf_counter(), time.process_time()
        began, values = turn()
        found = {"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        answer(reading=getattr(given, "reading", began - opened), **found)
        if values:
            (given.folder / f"{given.way}-{given.threads}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main()
