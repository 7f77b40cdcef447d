"""How much did shared controls lift the ceiling, and what do spiked predictions gain in discrimination?

    python lab/ceilings.py --out FOLDER

Both halves of the real cells are scored twice: as `perturbdiff ceiling` does, each with its own half of the controls,
and as it did before, both with all controls. Spiked predictions know the perturbations' names and no biology: they
lower their own target gene and raise those of all others. What is done already is not done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import Condition
from perturbdiff.config import recipes
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.datasets import fetching
from perturbdiff.evaluation import DEFINITIONS, Comparison, score
from perturbdiff.evaluation.ceiling_stage import split_seeds
from perturbdiff.evaluation.readers.cells_by_condition import Cells
from perturbdiff.evaluation.readers.inputs import open_truth
from perturbdiff.evaluation.readers.pairing import held_out_conditions
from perturbdiff.evaluation.references import DUPLICATE, pair_reference
from perturbdiff.evaluation.scoring.condition_pass import score_cells
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.simulation.simulation_stage import simulate
from perturbdiff.splits.splits import make_split

METRICS = (
    "R2", "PDCorr", "MSE", "MAE", "PDS_L1", "PDS_L2", "PDS_cos", "DEOver", "DEPrec", "DirAgr", "LFCSpear", "ES",
    "AUROC", "AUPRC",
)  # fmt: skip
PDS = ("PDS_L1", "PDS_L2", "PDS_cos")
POOL = ("pooled", "pooled")
SPIKE = 8.0  # log1p units: three thousand counts of ten thousand


KNOCK_DOWNS = (
    "simulate.cells=8000", "simulate.tiny_fraction=0", "simulate.drugs=0", "simulate.cytokines=0",
    "simulate.knockdowns=60", "split.train_fraction=0.0", "split.valid_fraction=0.0",
)  # fmt: skip


class Data(NamedTuple):
    """A registered data set (empty: simulated), its recipe, and what is held out in turn."""

    name: str
    source: str
    recipe: str
    held_out: tuple[tuple[str, ...], ...]
    changes: tuple[str, ...] = ()


SETS = (
    Data("Papalexi", "papalexi21", "papalexi21", (("rep_3",),)),
    Data(
        "Kang",
        "kang18-ifnb",
        "kang18",
        tuple((c,) for c in ("B", "CD14+Mono", "CD4T", "CD8T", "FCGR3A+Mono")),
    ),
    Data("simulated", "", "demo", (), ("simulate.cells=8000", "simulate.tiny_fraction=0")),
    Data("knock-downs", "", "demo", (), KNOCK_DOWNS),
)


def both_ways(truth: Cells, wanted: Iterable[Condition], config: EvaluateConfig, seed: int) -> pd.DataFrame:
    """Return all values: split, controls (own, shared), metric, perturbation, value."""
    rows, wanted = [], list(wanted)
    metrics = config.model_copy(update={"metrics": METRICS})
    for number, drawn in enumerate(split_seeds(seed, config.ceiling_splits)):
        pairing = pair_reference(truth, wanted, DUPLICATE, seed=drawn, quiet=number > 0)
        for controls in ("own", "shared"):
            comparison = score_cells(pairing, metrics, seed=seed).comparisons[POOL]
            for name, values in score(comparison, METRICS).items():
                rows += [(number, controls, name, place, value) for place, value in enumerate(values)]
            pairing.controls = {g: truth.controls[g] for g in pairing.controls}
            pairing.predicted_controls = None
    return pd.DataFrame(rows, columns=pd.Index(["split", "controls", "metric", "perturbation", "value"]))


def spiked(comparison: Comparison) -> Comparison:
    """Return the comparison with predictions that know the target genes and nothing else."""
    real, place = comparison.real, {gene: i for i, gene in enumerate(comparison.genes)}
    means = np.tile(real.control, (len(comparison.perturbations), 1))
    means[:, comparison.target_genes] += SPIKE
    for row, name in enumerate(comparison.perturbations):
        if name in place:
            means[row, place[name]] = 0.0
    return replace(comparison, predicted=replace(real, mean=means, delta=means - real.control))


def attack(truth: Cells, wanted: Iterable[Condition], config: EvaluateConfig, seed: int) -> pd.DataFrame:
    """Return what spiked predictions score in each definition."""
    pairing = pair_reference(truth, wanted, DUPLICATE, seed=seed)
    chosen = config.model_copy(update={"metrics": PDS})
    attacked = spiked(score_cells(pairing, chosen, seed=seed).comparisons[POOL])
    rows = {
        name: {
            metric: float(v.mean()) for metric, v in score(replace(attacked, definition=rules), PDS).items()
        }
        for name, rules in DEFINITIONS.items()
    }
    return pd.DataFrame(rows).T.assign(targets=int(attacked.target_genes.sum()), genes=len(attacked.genes))


def study(data: Data, out: Path, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of one data set, those of several rotations stacked."""
    recipe = recipes.load(data.recipe, list(data.changes))
    folder = out / data.name
    if data.source:
        counts = fetching.find(data.source)
    else:
        counts = simulate(folder / "simulated", recipe.simulate, seed=seed) / "counts.h5ad"
    store = preprocess([counts], folder / "store", recipe.data)
    lifts, attacks = [], []
    for held_out in data.held_out or ((),):
        chosen = recipe.split if not held_out else recipe.split.model_copy(update={"held_out": held_out})
        name = "-".join(held_out).replace(" ", "_") or "test"
        split = make_split(store, folder / f"{name}.parquet", recipe.model_copy(update={"split": chosen}))
        truth = open_truth(store, recipe.evaluate)
        wanted = held_out_conditions(split, "test", truth)
        lifts.append(both_ways(truth, wanted, recipe.evaluate, seed).assign(held_out=name))
        if len({c.perturbation for c in wanted}) > 1:
            attacks.append(attack(truth, wanted, recipe.evaluate, seed))
    return pd.concat(lifts), pd.concat(attacks) if attacks else pd.DataFrame()


def summary(lifts: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of both ways, the lift, and the SD over splits of the new way, means over rotations.

    A perturbation whose value is not defined in a split has its mean over the others there, as in a ceiling.
    """
    one = ["controls", "metric", "held_out", "perturbation"]
    filled = lifts["value"].fillna(lifts.groupby(one)["value"].transform("mean"))
    by_split: Any = (
        lifts.assign(value=filled).groupby(["controls", "metric", "held_out", "split"])["value"].mean()
    )
    means = by_split.groupby(["metric", "controls"]).mean().unstack()
    sd = by_split["own"].groupby(["metric", "held_out"]).std(ddof=1).groupby("metric").mean()
    table = pd.DataFrame({"shared": means["shared"], "own": means["own"], "SD": sd})
    return table.assign(lift=table["shared"] - table["own"]).reindex(list(METRICS))


def main() -> None:
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="*", default=[data.name for data in SETS])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for data in SETS:
        if data.name in given.data:
            lifts, attacks = study(data, given.out, given.seed)
            lifts.to_csv(given.out / f"{data.name}.csv", index=False)
            print(f"\n{data.name}\n{summary(lifts).round(3).to_string()}")
            if len(attacks):
                print(f"\n{data.name}, spiked predictions\n{attacks.round(3).to_string()}")


if __name__ == "__main__":
    main()
