"""Is a knock-out a family over its guides? The sets of a guide that was held out, against sampled ones.

    python lab/guides.py --data papalexi21.h5ad --out FOLDER [--seeds 0 1 2] [--models sets]

The guides of a gene differ in efficacy, so that their cells may be different draws of one family. Of each gene with
enough guides one is held out, and of the non-targeting guides a third. A family is scored by the energy score whose
points are sets of cells, against sets of the held-out guide (`perturbdiff.evaluation.metrics.set_metrics`). It is made
of: the sets of the seen guides; their cells, pooled and dealt into sets at random; and the sets that a model samples
which was trained on the seen guides, by the loss of sets (the recipe `family` of `lab/premise.py`) and by the default
loss. The cells of sampled sets are also dealt anew, which leaves their pooled distribution and takes the family away.
First it is asked how much the guides of a gene differ at all: the variance between them beyond the draw of their cells,
and how often a shuffle of the cells has as much.

Prints tables in Markdown and writes `guides.csv` and `differences.csv`. What is done already is not done again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import premise
from scipy import sparse

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.evaluation.metrics import set_metrics as sm
from perturbdiff.evaluation.metrics import spread as sv
from perturbdiff.evaluation.scoring.intervals import bootstrap_mean
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.sampling import sample
from perturbdiff.splits.splits import make_split
from perturbdiff.store.store import Store
from perturbdiff.training.training_stages import train

SIZE = 32  # cells of a set
SETS = 30  # of each family
GUIDE, GENE, HALF = "guide", "perturbation", "half"
RECIPE = (
    f"data.batch_key={HALF}", f"data.set_key={GUIDE}", "data.num_hvgs=null", "split.context_column=batch",
    "split.held_out=[test]", "split.train_fraction=0", "split.valid_fraction=0", "train.max_epochs=null",
    "model.covariates=[perturbation]", f"train.set_size={SIZE}", "train.sets_per_step=8", "train.max_steps=1800",
    "train.min_steps=1800",
)  # fmt: skip
FAMILY = tuple(change for change in premise.MODELS["family"] if not change.startswith("data."))
MODELS = {"default": ("sampled, default loss", ()), "sets": ("sampled, loss of sets", FAMILY)}
SEEN, POOLED = "sets of the seen guides", "pooled cells of the seen guides"

Draw = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Screen:
    """A store whose batch says which guides are held out, and the rows of each guide by gene and half."""

    store: Path
    split: Path
    rows: dict[tuple[str, str], dict[str, np.ndarray]]


def held_out(obs: pd.DataFrame, control: str, seed: int) -> set[str]:
    """Return one guide of each gene that keeps two others of `SIZE` cells, and a third of the control's guides."""
    rng = np.random.default_rng(seed)
    chosen: set[str] = set()
    for gene, cells in obs.groupby(GENE, observed=True):
        counts = cells[GUIDE].astype(str).value_counts()
        large = sorted(counts.index[counts >= SIZE])
        number = len(large) // 3 if gene == control else int(len(large) >= 3)
        chosen |= set(rng.choice(large, number, replace=False).tolist()) if number else set()
    return chosen


def screen(data: Path, folder: Path, config: Config, seed: int) -> Screen:
    """Make the store of one choice of held-out guides."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = folder / "cells.h5ad"
    if not cells.is_file():
        counts = ad.read_h5ad(data)
        guides = held_out(counts.obs, str(config.data.control), seed)
        counts.obs[HALF] = np.where(counts.obs[GUIDE].astype(str).isin(guides), "test", "train")
        counts.write_h5ad(cells)
    store = preprocess([cells], folder / "store", config.data)
    split = make_split(store, folder / "split.parquet", config)
    opened = Store(store)
    labels = np.asarray(opened.sets, object)[opened.set_of(slice(0, opened.n_cells))]
    rows: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for condition in opened.conditions.itertuples():
        own = np.arange(condition.start, condition.stop)
        guides = {str(g): own[labels[own] == g] for g in sorted(set(labels[own]))}
        rows[str(condition.perturbation), str(condition.batch)] = guides
    return Screen(store, split, rows)


def genes_of(made: Screen, control: str) -> list[str]:
    """Return the genes with a held-out guide and at least two seen ones of `SIZE` cells."""
    return sorted(g for g, half in made.rows if half == "test" and g != control and len(large(made, g)) >= 2)


def large(made: Screen, gene: str, half: str = "train") -> list[np.ndarray]:
    """Return the rows of the guides of a gene that have at least `SIZE` cells."""
    return [rows for rows in made.rows.get((gene, half), {}).values() if len(rows) >= SIZE]


def real_families(made: Screen, gene: str) -> dict[str, Draw]:
    """Return what draws sets of real training cells: each set from one guide, or from all; a guide counts by cells."""
    store, guides = Store(made.store), large(made, gene)
    share = np.array([len(rows) for rows in guides]) / sum(len(rows) for rows in guides)

    def draw(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return store.expression(rng.choice(rows, SIZE, replace=False)).toarray()

    def apart(rng: np.random.Generator) -> np.ndarray:
        return np.stack([draw(guides[k], rng) for k in rng.choice(len(guides), SETS, p=share)])

    def pooled(rng: np.random.Generator) -> np.ndarray:
        return np.stack([draw(np.concatenate(guides), rng) for _ in range(SETS)])

    return {SEEN: apart, POOLED: pooled}


def true_sets(made: Screen, gene: str, rng: np.random.Generator) -> np.ndarray:
    """Return as many sets of the held-out guide as its cells make, each cell in one set, [T, m, G]."""
    (rows,) = large(made, gene, "test")
    number = len(rows) // SIZE
    drawn = rng.permutation(rows)[: number * SIZE]
    return Store(made.store).expression(drawn).toarray().reshape(number, SIZE, -1)


def sampled(made: Screen, genes: list[str], folder: Path, config: Config, seed: int) -> dict[str, np.ndarray]:
    """Train on the seen guides and return the sets of each gene, sampled with controls of the held-out guides."""
    start = time.process_time()
    bundle = train(made.store, made.split, folder, config)
    print(f"{folder.name}: {time.process_time() - start:.0f} CPU s", flush=True)
    store = Store(made.store)
    table = store.conditions[["cell_type", "batch", "perturbation"]]
    wanted = table[(table["batch"] == "test") & table["perturbation"].isin(genes)]
    request = folder.parent / f"{folder.name}.wanted.csv"
    wanted.assign(n_cells=SETS * SIZE).to_csv(request, index=False)
    out = folder.parent / f"{folder.name}.h5ad"
    cells = ad.read_h5ad(sample(bundle, made.store, out, conditions=request, config=config.sample, seed=seed))
    cells = cells[cells.obs["source"] == "predicted", list(map(str, store.genes))]
    values, obs = sparse.csr_matrix(cells.X).toarray(), cells.obs.assign(place=np.arange(cells.n_obs))
    found = {}
    for gene, own in obs.groupby("perturbation", observed=True):
        places = own.sort_values("set", kind="stable")["place"].to_numpy()
        found[str(gene)] = values[places].reshape(SETS, SIZE, -1)
    return found


def score(sets: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the energy score of a family, its variance between sets in units of the draw of a set's cells, and how
    far its pooled cells are from the true ones.
    """
    across, own, _ = sm.SetDistances.of(sets, true).apart()
    noise = sv.within_variance(sets).sum() / SIZE
    pooled, cells = (side.reshape(1, -1, side.shape[2]) for side in (sets, true))
    return {
        "score": sm.family_score(across, own),
        "between": float(sv.between_variance(sets).sum() / noise),
        "distance": float(sv.distances(pooled, cells)[0, 0]),
    }


def differences(made: Screen, control: str, seed: int, shuffles: int = 199) -> pd.DataFrame:
    """Return the variance between the guides of each gene beyond the draw of cells, and how often a shuffle has it."""
    rng, store, lines = np.random.default_rng(seed), Store(made.store), []
    for gene in [*genes_of(made, control), control]:
        guides = [*large(made, gene), *large(made, gene, "test")]
        cells = np.stack([store.expression(rng.choice(r, SIZE, replace=False)).toarray() for r in guides])
        found = sv.between_variance(cells).sum()
        flat = cells.reshape(-1, cells.shape[2])
        chance = [
            sv.between_variance(rng.permutation(flat).reshape(cells.shape)).sum() for _ in range(shuffles)
        ]
        noise = sv.within_variance(cells).sum() / SIZE
        p = (1 + sum(c >= found for c in chance)) / (1 + shuffles)
        lines.append(
            {"seed": seed, "gene": gene, "guides": len(guides), "between / noise": found / noise, "p": p}
        )
    return pd.DataFrame(lines)


def study(seed: int, options: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return scores and differences for one choice of held-out guides."""
    folder = options.out / str(seed)
    files = folder / "guides.csv", folder / "differences.csv"
    if all(file.is_file() for file in files):
        return pd.read_csv(files[0]), pd.read_csv(files[1])
    config = recipes.load("papalexi21", [*RECIPE, *options.set]).model_copy(update={"seed": seed})
    made = screen(options.data, folder, config, seed)
    genes, rng = genes_of(made, str(config.data.control)), np.random.default_rng(seed)
    true = {gene: true_sets(made, gene, rng) for gene in genes}
    lines = []
    for gene in genes:
        for name, draw in real_families(made, gene).items():
            lines.append({"seed": seed, "gene": gene, "family": name, **score(draw(rng), true[gene])})
    for name, changes in (MODELS[model] for model in options.models):
        own = recipes.load("papalexi21", [*RECIPE, *changes, *options.set]).model_copy(update={"seed": seed})
        drawn = sampled(made, genes, folder / name.replace(", ", "-").replace(" ", "-"), own, seed)
        dealt = {
            gene: rng.permutation(x.reshape(-1, x.shape[2])).reshape(x.shape) for gene, x in drawn.items()
        }
        for kind, families in ((name, drawn), (f"{name}, dealt anew", dealt)):
            for gene, sets in families.items():
                lines.append({"seed": seed, "gene": gene, "family": kind, **score(sets, true[gene])})
    tables = pd.DataFrame(lines), differences(made, str(config.data.control), seed)
    for table, file in zip(tables, files, strict=True):
        table.to_csv(file, index=False, float_format="%.6g")
    return tables


def markdown(scores: pd.DataFrame, guides: pd.DataFrame) -> str:
    """Return two tables: families against real cells, and how much the guides of each gene differ."""
    wide = scores.pivot_table(index=["seed", "gene"], columns="family", values="score")
    text = [
        f"| family | energy score | less that of the {POOLED} | less that of {SEEN} | between sets / draw of cells | "
        "distance |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in scores.groupby("family", sort=False):
        gaps = (_gap(wide, str(name), other) for other in (POOLED, SEEN))
        text.append(
            f"| {name} | {wide[name].mean():.3f} | {' | '.join(gaps)} | {rows['between'].mean():.2f} | "
            f"{rows['distance'].mean():.3f} |"
        )
    others = [str(name) for name in dict.fromkeys(scores["family"]) if name != POOLED]
    heads = ["gene", "guides", "between guides / draw of cells", "p", *others]
    text += [
        "",
        f"Score less that of the {POOLED}:",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    by_gene = wide[others].sub(wide[POOLED], axis=0).groupby("gene").mean()
    for gene, rows in guides.groupby("gene"):
        gaps = [f"{gap:+.4f}" for gap in by_gene.loc[gene]] if gene in by_gene.index else ["–"] * len(others)
        between, p = rows["between / noise"].mean(), rows["p"].median()
        text.append(f"| {gene} | {rows['guides'].max()} | {between:.2f} | {p:.3f} | {' | '.join(gaps)} |")
    return "\n".join(text)


def _gap(wide: pd.DataFrame, name: str, other: str) -> str:
    """Return the mean difference of two families' scores and its 95 % interval over genes."""
    gap = (wide[name] - wide[other]).groupby("gene").mean().to_numpy()
    low, high = bootstrap_mean(gap, draws=2000, seed=0)
    return f"{gap.mean():+.4f} [{low:+.4f}, {high:+.4f}]"


def main() -> None:
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="by their losses")
    parser.add_argument("--set", action="append", default=[], help="change the recipes")
    options = parser.parse_args()
    both = [study(seed, options) for seed in options.seeds]
    scores, guides = (pd.concat([tables[k] for tables in both]) for k in (0, 1))
    scores.to_csv(options.out / "guides.csv", index=False, float_format="%.6g")
    guides.to_csv(options.out / "differences.csv", index=False, float_format="%.6g")
    print(markdown(scores, guides))


if __name__ == "__main__":
    main()
