"""Are perturbations without any training cell predicted through semantic vectors? On a simulated screen.

    python lab/unseen.py --out FOLDER

Some perturbations are held out in every cell type. Their vectors are the true effects, turned by a random matrix, with
noise of several sizes; at the end, noise alone. The model is compared with the baselines that need no cell of the
perturbation: the mean of all cells, the mean change of the others (`nearest-context`), and no change. What is done
already is not done again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.baselines import predict
from perturbdiff.config import recipes
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.sampling import sample
from perturbdiff.simulation.simulation_stage import simulate
from perturbdiff.splits.splits import make_split, read_split
from perturbdiff.training.training_stages import train

METRICS = ("R2", "PDCorr", "DEOver", "PDS_L1")
SCREEN = (
    "simulate.cell_types=1", "simulate.batches=1", "simulate.drugs=0", "simulate.cytokines=0", "simulate.genes=400",
    "data.num_hvgs=null", "split.context_column=cell_type", "split.valid_fraction=0.0",
)  # fmt: skip
WIDTH = 32
SHARE = 0.25


def tables(effects: pd.DataFrame, noises: list[float], seed: int) -> dict[str, EmbeddingTable]:
    """Return tables made of the true effects and noise, sizes relative to the effects' own; and noise alone."""
    rng = np.random.default_rng(seed)
    wide = effects.pivot_table("log_fold_change", "perturbation", "gene", observed=True)
    known = wide.to_numpy() @ rng.normal(size=(wide.shape[1], WIDTH))
    known = (known - known.mean(0)) / known.std()
    noise = rng.normal(size=known.shape)
    names = tuple(map(str, wide.index))
    found = {f"noise {size:g}": EmbeddingTable(names, known + size * noise) for size in noises}
    return {**found, "noise alone": EmbeddingTable(names, noise)}


def hold_out(path: Path, seed: int) -> None:
    """Put a share of the perturbations into the test part, and everything else into training."""
    split = read_split(path)
    treated = split["perturbation"] != "control"
    labels = np.sort(split.loc[treated, "perturbation"].unique())
    lost = np.random.default_rng(seed).choice(labels, round(SHARE * len(labels)), replace=False)
    split["part"] = np.where(split["perturbation"].isin(lost), "test", "train")
    split.to_parquet(path)


def scores(folder: Path) -> dict[str, float]:
    """Return the pooled metrics of one evaluation."""
    table = pd.read_csv(folder / "aggregate.csv")
    pooled = table[table["scope_kind"] == "pooled"].set_index("metric")["nanmean"].to_dict()
    return {name: pooled.get(name, np.nan) for name in METRICS}


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--perturbations", type=int, default=80)
    parser.add_argument("--cells", type=int, default=10000)
    parser.add_argument("--noise", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="change the recipe")
    given = parser.parse_args()
    screen = (*SCREEN, f"simulate.knockdowns={given.perturbations}", f"simulate.cells={given.cells}")
    recipe = recipes.load("recommended", [*screen, *given.set]).model_copy(update={"seed": given.seed})
    out = given.out
    simulated = simulate(out / "simulated", recipe.simulate, seed=given.seed)
    store = preprocess([simulated / "counts.h5ad"], out / "store", recipe.data)
    split = out / "split.parquet"
    if not split.is_file():
        make_split(store, split, recipe)
        hold_out(split, given.seed)
    rows = {}
    effects = pd.read_parquet(simulated / "effects.parquet")
    for name, table in tables(effects, given.noise, given.seed).items():
        folder = out / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        table.write(folder / "table.npz")
        embeddings = {"perturbation": folder / "table.npz"}
        bundle = train(store, split, folder / "bundle", recipe, embeddings=embeddings)
        predicted = sample(bundle, store, folder / "predictions.h5ad", split=split, seed=given.seed)
        rows[name] = scores(evaluate(predicted, store, folder / "metrics", recipe.evaluate))
    for name in ("mean-overall", "nearest-context", "control"):
        predicted = predict(name, store, split, out / f"{name}.h5ad", seed=given.seed)
        rows[name] = scores(evaluate(predicted, store, out / f"{name}.metrics", recipe.evaluate))
    table = pd.DataFrame(rows).T
    table.to_csv(out / "scores.csv")
    print(table.round(3).to_string())


if __name__ == "__main__":
    main()
