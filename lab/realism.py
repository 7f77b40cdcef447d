"""Are predicted changes large enough, and do predicted cells look like cells? By settings, on held-out cells.

    python lab/realism.py DATA --out FOLDER --tasks kang-cd4t kang-cd14 --arms "" "train.min_steps=1400" [--seeds 0 1]

DATA is the folder with the two small published screens. A task is a data set and what is held out; an arm is a list of
settings (`--set`), separated by spaces, on top of the recipe of the task. `--tasks pairs` stands for the ten pairs of
Kang's cell types, with 1,016 genes. Each is trained without validation, so that
the weights are those of the last step. Prints a line for each run and appends it to `runs.csv`: CPU-seconds of the
training, slope on training and on held-out conditions, energy distance, PDCorr, DE overlap, realism of the cells, and
the agreement of gene–gene correlations over all held-out conditions together.
"""

from __future__ import annotations

import argparse
import shutil
import time
from itertools import combinations
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.baselines.baseline_stage import predict
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.evaluation.metrics.realism import correlation_agreement
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.sampling import sample
from perturbdiff.simulation.simulation_stage import simulate
from perturbdiff.splits.splits import make_split
from perturbdiff.store.store import Store
from perturbdiff.training.training_stages import train

KANG, PAPALEXI = "kang18_ifnb_muscat.h5ad", "papalexi21_thp1_ko.h5ad"
SHARED = Path(__file__).parents[1] / "assets" / "experiments" / "kang18_shared_genes.txt"
TYPES = {"b": "B", "cd14": "CD14+Mono", "cd4t": "CD4T", "cd8t": "CD8T", "fcgr3a": "FCGR3A+Mono"}
PAIRS = {f"pair-{a}-{b}": (TYPES[a], TYPES[b]) for a, b in combinations(TYPES, 2)}
TASKS = {
    # name: file (or None: simulated), preset, settings of the data, what is held out
    "kang-cd4t": (KANG, "kang18", (), ("CD4T",)),
    "kang-cd14": (KANG, "kang18", (), ("CD14+Mono",)),
    "kang-b": (KANG, "kang18", (), ("B",)),
    "kang-cd8t": (KANG, "kang18", (), ("CD8T",)),
    "kang-fcgr3a": (KANG, "kang18", (), ("FCGR3A+Mono",)),
    "kang-far": (KANG, "kang18", (), ("B", "CD14+Mono")),
    "kang600-cd4t": (KANG, "kang18", ("data.num_hvgs=600", "data.target_sum=10000"), ("CD4T",)),
    "kang600-cd14": (KANG, "kang18", ("data.num_hvgs=600", "data.target_sum=10000"), ("CD14+Mono",)),
    "kang600-far": (KANG, "kang18", ("data.num_hvgs=600", "data.target_sum=10000"), ("B", "CD14+Mono")),
    "kang600-b": (KANG, "kang18", ("data.num_hvgs=600", "data.target_sum=10000"), ("B",)),
    "papalexi-2": (PAPALEXI, "papalexi21", (), ("rep_2",)),
    "papalexi-3": (PAPALEXI, "papalexi21", (), ("rep_3",)),
    "sim": (None, "demo", ("data.num_hvgs=300", "simulate.tiny_fraction=0", "split.valid_fraction=0"), ()),
    **{name: (KANG, "kang18", (), held) for name, held in PAIRS.items()},
}
BASELINES = ("control", "nearest-context", "linear")
METRICS = (
    "energy_distance", "effect_slope", "PDCorr", "DEOver_10", "nonzero_ratio", "gene_sd_ratio", "library_ratio",
    "library_sd_ratio", "total_sd_ratio", "above_depth", "detected_sd_ratio", "cell_sd_ratio", "mean_variance_gap",
    "correlation_agreement",
)  # fmt: skip
COLUMNS = ["task", "arm", "seed", "cpu_s", "slope_train", *METRICS, "pooled_agreement"]


def prepared(name: str, data: Path, out: Path) -> tuple[Path, Path, list[str]]:
    """Return the store and the split of a task, and its recipe as a list of settings."""
    file, preset, settings, held = TASKS[name]
    config = recipes.load(preset, list(settings))
    which = file or f"simulated-{preset}"
    store = out / f"{which.split('_')[0]}-{'shared' if name in PAIRS else config.data.num_hvgs}"
    if not store.exists():
        source = data / file if file else simulate(out / "simulated", config.simulate, seed=0) / "counts.h5ad"
        own = recipes.load(preset, [*settings]).data
        preprocess([source], store, own, genes=SHARED if name in PAIRS else None)
    if held:
        config = config.model_copy(update={"split": config.split.model_copy(update={"held_out": held})})
    split = make_split(store, out / f"{name}.split.parquet", config)
    return store, split, [preset, *settings]


def pooled_agreement(predictions: Path, store: Store) -> float:
    """Return the agreement of gene–gene correlations, cells of all predicted conditions together."""
    data = ad.read_h5ad(predictions)
    data = data[data.obs["source"] == "predicted"]
    asked = set(zip(*(data.obs[c].astype(str) for c in ("cell_type", "batch", "perturbation")), strict=True))
    table = store.conditions
    rows = [
        np.arange(a, b)
        for *labels, a, b in table[["cell_type", "batch", "perturbation", "start", "stop"]].itertuples(
            index=False
        )
        if tuple(map(str, labels)) in asked
    ]
    real = sparse.csr_matrix(store.expression(np.concatenate(rows)))
    values = sparse.csr_matrix(data[:, list(map(str, store.genes))].X)
    return correlation_agreement(values, real)


def scored(predictions: Path, store: Path, folder: Path, config: Config) -> dict[str, float]:
    """Return the means over held-out conditions."""
    own = config.evaluate.model_copy(update={"metrics": METRICS, "bootstrap": 0, "embed_conditions": 0})
    shutil.rmtree(folder, ignore_errors=True)
    table = pd.read_csv(evaluate(predictions, store, folder, own) / "aggregate.csv")
    found = table[table["scope_kind"] == "pooled"].set_index("metric")["nanmean"].to_dict()
    return {
        **{m: found.get(m, np.nan) for m in METRICS},
        "pooled_agreement": pooled_agreement(predictions, Store(store)),
    }


def run(task: str, arm: str, seed: int, data: Path, out: Path) -> dict[str, object]:
    """Train an arm on a task, or make a baseline's predictions, and score them."""
    store, split, (preset, *settings) = prepared(task, data, out)
    config = recipes.load(preset, [*settings, *(() if arm in BASELINES else arm.split())])
    config = config.model_copy(update={"seed": seed})
    work = out / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if arm in BASELINES:
        cells = predict(arm, store, split, work / "cells.h5ad", seed=seed)
        return {"task": task, "arm": arm, "seed": seed, **scored(cells, store, work / "scores", config)}
    begin = time.process_time()
    bundle = train(store, split, work / "bundle", config, device="cpu")
    spent = time.process_time() - begin
    cells = sample(bundle, store, work / "cells.h5ad", split=split, config=config.sample, seed=seed)
    told = {"cpu_s": round(spent, 1), "slope_train": Bundle.load(bundle).training["effect_slope"]}
    return {"task": task, "arm": arm, "seed": seed, **told, **scored(cells, store, work / "scores", config)}


def main() -> None:
    """Run all arms on all tasks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, "pairs"], default=list(TASKS))
    parser.add_argument("--arms", nargs="+", default=[""], help="settings, or the name of a baseline")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out / "runs.csv"
    for task in [each for name in given.tasks for each in (PAIRS if name == "pairs" else [name])]:
        for arm in given.arms:
            for seed in given.seeds:
                row = pd.DataFrame([run(task, arm, seed, given.data, given.out)]).reindex(columns=COLUMNS)
                row.to_csv(table, mode="a", header=not table.exists(), index=False)
                print(row.round(3).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
