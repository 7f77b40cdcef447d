"""Synthetic runs and bundles, laid out as `evaluate` and `train` write them, for tests of the report."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.scoring.aggregate import aggregate

SKILL = {"perturbdiff": 0.9, "linear": 0.6, "nearest-context": 0.7, "control": 0.1, "ceiling": 0.97}
CONTEXTS = ("B cell", "Monocyte")


def make_run(
    folder: Path,
    method: str,
    *,
    dataset: str = "toy",
    perturbations: int = 5,
    skill: float | None = None,
    cells: int = 20,
    shown: int = 2,
    names: tuple[str, ...] = (),
    definition: str = "cell-eval-0.6.6",
    made_by: dict[str, object] | None = None,
    predictions: str = "",
    sets: bool = False,
) -> Path:
    """Write what `evaluate` leaves for a method of a given skill (0 to 1); ``sets``: where sets of cells are known."""
    folder.mkdir(parents=True)
    skill = SKILL.get(method, 0.5) if skill is None else skill
    rng = np.random.default_rng(sum(map(ord, dataset)))
    names = names or tuple(f"drug {i}" for i in range(perturbations))
    noise = np.random.default_rng(sum(map(ord, method)))
    conditions = [(f"{c}|donor 1", name) for c in CONTEXTS for name in names]
    rows = []
    for kind, scope in (("pooled", "pooled"), *(("context", c) for c in CONTEXTS)):
        for metric in METRICS.values():
            if metric.compute is not None:
                for name in names if metric.per_perturbation else ("*",):
                    value = metric_value(metric.direction, skill, rng.uniform(0, 0.3), noise)
                    if (metric.name == "AUROC" and name == names[-1]) or (
                        len(names) == 1 and single(metric.name)
                    ):
                        value = np.nan
                    rows.append((kind, scope, name, metric.name, value))
    for scope, name in conditions:
        for metric in METRICS.values():
            if metric.family == "distribution" or (sets and metric.family == "sets"):
                value = metric_value(metric.direction, skill, rng.uniform(0, 0.3), noise)
                rows.append(("condition", scope, name, metric.name, value))
    metrics = pd.DataFrame(rows, columns=["scope_kind", "scope", "perturbation", "metric", "value"])
    metrics = metrics.assign(method=method, dataset=dataset, status="ok", n_cells=50, definition=definition)
    metrics.to_parquet(folder / "metrics.parquet")
    members = {c: [k for k in conditions if k[0].startswith(c)] for c in CONTEXTS}
    aggregate(metrics, members).assign(definition=definition).to_csv(folder / "aggregate.csv", index=False)
    write_genes(folder, names, skill, rng, noise)
    write_cells(folder, names, skill, cells, shown)
    if sets:
        places = pd.read_parquet(folder / "embedding.parquet").query("source != 'control'")
        places.assign(explained_x=0.6, explained_y=0.2).to_parquet(folder / "sets.parquet")
    summary = {
        "method": method,
        "dataset": dataset,
        "num_conditions": len(conditions),
        "made_by": made_by or {},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    manifest = {
        "stage": "evaluate",
        "seed": 0,
        "config": {"alpha": 0.05},
        "versions": {"perturbdiff": "0.1.0"},
        "inputs": {
            "truth": {"name": "store", "sha256": "a" * 64},
            "predictions": {"name": predictions or f"{folder.name}.h5ad", "sha256": "b" * 64},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    record = {
        "wall_seconds": 12.5,
        "cpu_seconds": 11.0,
        "peak_memory_mib": 812.0,
        "started": "2025-01-02T03:04:05",
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def single(name: str) -> bool:
    return name == "ES" or name.startswith("PDS")


def metric_value(direction: str, skill: float, hard: float, noise: np.random.Generator) -> float:
    good = np.clip(skill - hard + 0.08 * noise.standard_normal(), 0.01, 1)
    return float({"higher": good, "lower": 0.2 * (1.05 - good), "one": good, "none": 100 * good}[direction])


def write_genes(
    folder: Path, names: tuple[str, ...], skill: float, rng: np.random.Generator, noise: np.random.Generator
) -> None:
    genes = [f"GENE{i}" for i in range(40)]
    control = rng.uniform(0.1, 1.5, len(genes))
    tables = {"real": [], "pred": []}
    shared = 0.2 * rng.standard_normal(len(genes))
    for name in names:
        change = shared + 0.4 * rng.standard_normal(len(genes)) * (rng.random(len(genes)) < 0.4)
        guess = skill * change + (1 - skill) * shared + 0.02 * noise.standard_normal(len(genes))
        for side, delta in (("real", change), ("pred", guess)):
            mean = np.clip(control + delta, 0, None)
            fold = np.log2(np.clip(np.expm1(mean) / np.expm1(control), 0.05, 20))
            p = np.exp(-20 * np.abs(delta))
            tables[side].append(
                pd.DataFrame(
                    {
                        "scope_kind": "pooled",
                        "scope": "pooled",
                        "perturbation": name,
                        "gene": genes,
                        "p": p,
                        "q": np.minimum(1, 3 * p).astype(np.float32),
                        "log2fc": fold,
                        "mean": mean,
                        "control_mean": control,
                    }
                )
            )
    for side, parts in tables.items():
        pd.concat(parts, ignore_index=True).to_parquet(folder / f"de_{side}.parquet")


def write_cells(folder: Path, names: tuple[str, ...], skill: float, cells: int, conditions: int) -> None:
    rng = np.random.default_rng(1)
    parts = []
    for i, name in enumerate(names[:conditions]):
        shift = np.array([3 * np.cos(i), 3 * np.sin(i)])
        for source, move in (("control", 0.0), ("real", 1.0), ("predicted", skill)):
            xy = rng.standard_normal((cells, 2)) + move * shift
            label = f"CD4 T cell|donor 1|{name}"
            parts.append(pd.DataFrame({"condition": label, "source": source, "x": xy[:, 0], "y": xy[:, 1]}))
    pd.concat(parts, ignore_index=True).to_parquet(folder / "embedding.parquet")


def make_bundle(folder: Path) -> Path:
    folder.mkdir()
    steps = np.arange(0, 2000, 20)
    rng = np.random.default_rng(0)
    train = pd.DataFrame({"step": steps, "split": "train", "total": 1 / (1 + steps / 200)})
    train["total"] += 0.02 * rng.random(len(steps))
    valid = train.iloc[::20].assign(split="valid", total=lambda t: t["total"] * 1.1)
    both = pd.concat([train, valid])
    both.assign(mmd=both["total"] * 0.8, mse=both["total"] * 0.2).to_csv(folder / "training.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"name": "tiny", "model": {"width": 64}}))
    (folder / "manifest.json").write_text(json.dumps({"stage": "train", "seed": 1}))
    return folder
