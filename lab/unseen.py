"""Are perturbations without any training cell predicted through semantic vectors? On simulated screens.

    python lab/unseen.py --out FOLDER --seed 0     # again with --seed 1 and --seed 2, into the same folder
    python lab/unseen.py --out FOLDER --table      # the tables of all seeds

A quarter of the perturbations is for test and 15 % are for validation, each entirely. Their vectors are the true
effects with noise (`perturbation_vectors`): perfect, of quality .7, and useless. The recommended recipe is trained with
both anchors and compared with kernel ridge regression on the same vectors, and with baselines without vectors.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.baselines import predict
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.sampling import sample
from perturbdiff.simulation.simulation_stage import perturbation_vectors, simulate
from perturbdiff.simulation.true_effects import draw_truth
from perturbdiff.splits.splits import make_split, read_split
from perturbdiff.training.training_stages import train

METRICS = ("PDCorr", "PDS_L1", "DEOver", "R2", "energy_distance")
SCREEN = (
    "simulate.cell_types=1", "simulate.batches=1", "simulate.drugs=0", "simulate.cytokines=0", "simulate.genes=400",
    "simulate.knockdowns=80", "simulate.cells=10000", "data.num_hvgs=null", "split.context_column=cell_type",
    "split.num_held_out=1", "split.valid_fraction=0.0",
)  # fmt: skip
QUALITIES = (0.0, 0.7, 1.0)
PARTS = ("valid", "test")
SHARES = {"test": 0.25, "valid": 0.15}
WITHOUT = ("mean-overall", "nearest-context", "linear")
ANCHORS = ("predicted", "control")
DRAWS = 10_000


def hold_out(made: Path, path: Path, seed: int) -> None:
    """Put shares of the perturbations into the parts for test and validation, and everything else into training."""
    split = read_split(made)
    labels = np.sort(split.loc[split["perturbation"] != "control", "perturbation"].unique())
    order = np.random.default_rng(seed).permutation(labels)
    split["part"] = "train"
    for part, share in SHARES.items():
        chosen, order = np.split(order, [round(share * len(labels))])
        split.loc[split["perturbation"].isin(chosen), "part"] = part
    split.to_parquet(path)


class Study:
    """One screen: its files, and the scores of each method for each perturbation."""

    screen, parts = SCREEN, PARTS

    def __init__(self, out: Path, seed: int, overrides: list[str]) -> None:
        self.out, self.seed = out / f"seed{seed}", seed
        recipe = recipes.load("recommended", [*self.screen, *overrides]).model_copy(update={"seed": seed})
        metrics = recipe.evaluate.model_copy(update={"metrics": METRICS})
        self.recipe: Config = recipe.model_copy(update={"evaluate": metrics})
        simulated = simulate(self.out / "simulated", recipe.simulate, seed=seed)
        self.store = preprocess([simulated / "counts.h5ad"], self.out / "store", recipe.data)
        self.split = self.out / "split.parquet"
        if not self.split.is_file():
            self.hold_out(make_split(self.store, self.out / "made.parquet", recipe))

    def hold_out(self, made: Path) -> None:
        """Write the split."""
        hold_out(made, self.split, self.seed)

    def score(self, name: str, part: str, predicted: Path) -> None:
        """Score a file of predictions."""
        folder = self.out / "scores" / part / name
        evaluate(predicted, self.store, folder, self.recipe.evaluate, method=name)

    def vectors(self, quality: float) -> Path:
        """Write the vectors of a quality."""
        path = self.out / f"vectors-{quality:g}.parquet"
        config = self.recipe.simulate
        perturbation_vectors(config, draw_truth(config, self.seed), quality, self.seed).to_parquet(
            path, index=False
        )
        return path

    def baseline(self, method: str, name: str, table: Path | None = None) -> None:
        """Predict with a baseline and score it."""
        for part in self.parts:
            out = self.out / f"{name}-{part}.h5ad"
            predict(method, self.store, self.split, out, part=part, seed=self.seed, embedding=table)
            self.score(name, part, out)

    def model(self, anchor: str, name: str, table: Path | None) -> None:
        """Train with an anchor, and with vectors if there is a table of them, predict and score."""
        model = self.recipe.model.model_copy(update={"anchor": anchor})
        recipe, begin = self.recipe.model_copy(update={"model": model}), time.process_time()
        tables = {"perturbation": table} if table else {}
        bundle = train(self.store, self.split, self.out / name, recipe, embeddings=tables)
        print(f"{name}: {time.process_time() - begin:.0f} CPU-seconds of training", flush=True)
        for part in self.parts:
            self.score(name, part, self.sampled(bundle, name, part))

    def sampled(self, bundle: Path, name: str, part: str) -> Path:
        """Predict the conditions of a part with a network."""
        out = self.out / f"{name}-{part}.h5ad"
        return sample(bundle, self.store, out, split=self.split, part=part, seed=self.seed)


def values(out: Path, part: str) -> pd.DataFrame:
    """Return the scores of all seeds: seed, method, perturbation, metric, value."""
    found = []
    for folder in sorted(out.glob(f"seed*/scores/{part}/*")):
        table = pd.read_csv(folder / "metrics.csv").query("scope_kind == 'pooled' and status == 'ok'")
        distance = pd.read_csv(folder / "conditions.csv").rename(columns={"energy_distance": "value"})
        both = pd.concat([table, distance.assign(metric="energy_distance")])
        found.append(
            both[["perturbation", "metric", "value"]].assign(seed=folder.parts[-4], method=folder.name)
        )
    return pd.concat(found)


def interval(differences: pd.Series) -> str:
    """Return the mean of paired differences and its 95 % bootstrap interval over perturbations."""
    rng, found = np.random.default_rng(0), differences.dropna().to_numpy()
    means = found[rng.integers(0, len(found), (DRAWS, len(found)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{found.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def show(out: Path) -> None:
    """Print mean scores of each method, and differences in PDCorr from kernel ridge and from the mean of all."""
    for part in PARTS:
        scores = values(out, part)
        means = scores.groupby(["seed", "method", "metric"])["value"].mean().unstack("metric")
        print(part, means.groupby("method").mean()[list(METRICS)].round(3).to_string(), sep="\n")
        wide = scores[scores["metric"] == "PDCorr"].pivot_table("value", ["seed", "perturbation"], "method")
        for quality in QUALITIES:
            for anchor in ANCHORS:
                ours = wide.get(f"{anchor}-{quality:g}")
                for other in (f"kernel-ridge-{quality:g}", "mean-overall") if ours is not None else ():
                    print(part, f"{anchor}-{quality:g} less {other}:", interval(ours - wide[other]))


def main() -> None:
    """Run the study, or print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quality", type=float, nargs="*", default=QUALITIES)
    parser.add_argument("--anchors", nargs="*", default=ANCHORS)
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--set", action="append", default=[], help="change the recipe")
    given = parser.parse_args()
    if given.table:
        show(given.out)
        return
    study = Study(given.out, given.seed, given.set)
    for name in WITHOUT:
        study.baseline(name, name)
    for quality in given.quality:
        table = study.vectors(quality)
        study.baseline("kernel-ridge", f"kernel-ridge-{quality:g}", table)
        for anchor in given.anchors:
            study.model(anchor, f"{anchor}-{quality:g}", table)


if __name__ == "__main__":
    main()
