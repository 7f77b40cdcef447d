"""Do sampled sets vary as the true sets do? On simulated screens whose wells have a latent factor, or have none.

    python lab/premise.py --out FOLDER [--seeds 0 1 2] [--models paper recommended]

Half of the wells of every condition are held out. A model is trained on the other half, its sets drawn from one well
each (*apart*: the well is the batch) or from all of them (*mixed*: as the paper and the authors' code draw them), in
the paper's mathematics (sampled in 100 reverse steps and in one) and in ours; `squared-error` is the paper's without
the MMD. `family` is ours with the loss of whole sets, which is told which cells were a set (*sets*). With --tools,
external methods predict the held-out wells (`perturbdiff baseline`, settings `quick`), too. Sampled sets are
compared with the true sets of the held-out wells: their variance beyond the draw of cells, who lies within whose cloud
(`perturbdiff.evaluation.metrics.spread`), and the energy score whose points are sets. References: the true sets
of the training wells; their pooled cells, a method that predicts one distribution; control sets plus the mean change;
and, with --shuffles, every method with its cells shuffled between the sets of a condition.

A screen whose `sets.csv` is in FOLDER is taken as it is. Prints tables in Markdown (means over conditions, of the
variances the ratio of means; then means over screens with 95 % intervals by Student's t) and writes `sets.csv`, a line
for each condition.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse, stats

from perturbdiff.baselines.external import known_tools
from perturbdiff.baselines.external.external_stage import predict_external
from perturbdiff.baselines.external.methods import tool_method
from perturbdiff.config import recipes
from perturbdiff.config.settings import BaselineConfig, Config
from perturbdiff.evaluation.metrics import spread as sv
from perturbdiff.evaluation.metrics.set_metrics import SetDistances, family_score
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.sampling import sample
from perturbdiff.simulation.simulation_stage import simulate
from perturbdiff.splits.splits import make_split
from perturbdiff.store.store import Store
from perturbdiff.training.training_stages import train

LEVELS = {"absent": (0.0, 0.0), "default": (0.25, 0.1), "strong": (0.5, 0.3)}
SCREEN = (
    "simulate.cells=16000", "simulate.genes=200", "simulate.cell_types=2", "simulate.batches=1",
    "simulate.knockdowns=0", "simulate.drugs=0", "simulate.cytokines=3", "simulate.control_fraction=0.25",
    "simulate.size_spread=0", "simulate.tiny_fraction=0", "simulate.wells=40",
    "data.num_hvgs=null", "split.context_column=batch", "split.train_fraction=0", "split.valid_fraction=0",
    "train.max_epochs=null", "model.covariates=[perturbation,cell_type]",
    "train.set_size=32", "train.sets_per_step=8",  # a well has about 50 cells: a set has to fit in
)  # fmt: skip
MODELS = {
    "paper": ("variant=paper", "sample.guidance=0"),
    "squared-error": ("variant=paper", "sample.guidance=0", "loss.mmd_weight=0"),
    "released": ("variant=released", "sample.guidance=0"),
    "recommended": (),
    "family": (
        "data.set_key=set", "loss.mmd_statistic=set", "model.anchor=control", "model.gene_noise=false",
        "sample.zeros=predicted", "sample.totals=predicted",
    ),
}  # fmt: skip
TOOLS = {"cellflow": {}, "state": {"basal_mapping_strategy": "batch"}}  # changes to `quick`
STORES = {"family": ("sets",)}  # of the other models: a well is a batch (apart), or half of all are (mixed)
SETS = 19  # of a condition on either side: the range of 19 sets holds 18 of 20 alike
DRAWS = 5  # as many sets as often, in one step: sets that differ have another mean in each draw of 19
LABELS = ["cell_type", "perturbation"]

Collection = dict[tuple[str, str], np.ndarray]
"""Sets of each perturbed condition (cell type, perturbation): float32 log1p [S, m, G]."""


@dataclass(frozen=True)
class Screen:
    """One simulated screen: three stores of the same cells, and which wells are held out."""

    folder: Path
    stores: dict[str, Path]
    splits: dict[str, Path]
    wells: dict[str, list[str]]


def recipe(model: str, level: str, options: argparse.Namespace) -> Config:
    """Return the recipe of a model at a size of the latent factor."""
    strength, shift = LEVELS[level]
    steps = options.steps[model]
    return recipes.load("recommended", [
        *SCREEN, *MODELS[model], f"simulate.latent_strength={strength}", f"simulate.latent_shift={shift}",
        f"train.max_steps={steps}", f"train.min_steps={steps}", *options.set,
    ])  # fmt: skip


def screen(folder: Path, config: Config, seed: int) -> Screen:
    """Simulate a screen and make its stores: a batch is a well (*apart*), or half of all wells (*mixed*).

    The third store is as *mixed*, and knows the wells as *sets*.
    """
    cells = folder / "cells.h5ad"
    if not cells.is_file():
        data = ad.read_h5ad(simulate(folder / "simulated", config.simulate, seed=seed) / "counts.h5ad")
        well = data.obs["well"].astype(str).str.removeprefix("well_").astype(int).to_numpy() - 1
        data.obs["apart"] = [f"well_{w:02d}" for w in well]
        data.obs["mixed"] = np.where(well < config.simulate.wells // 2, "train", "test")
        labels = data.obs[["cell_type", "perturbation", "apart"]].astype(str)
        data.obs["set"] = labels.agg(" ".join, axis=1)  # wells of two conditions are two wells
        data.write_h5ad(cells)
    stores, splits = {}, {}
    names = [f"well_{w:02d}" for w in range(config.simulate.wells)]
    half = len(names) // 2
    for how, held in (("apart", names[half:]), ("mixed", ["test"]), ("sets", ["test"])):
        batch, sets = ("mixed", "set") if how == "sets" else (how, None)
        section = config.data.model_copy(update={"batch_key": batch, "set_key": sets})
        stores[how] = preprocess([cells], folder / f"store-{how}", section)
        rule = config.split.model_copy(update={"held_out": tuple(held)})
        own = config.model_copy(update={"data": section, "split": rule})
        splits[how] = make_split(stores[how], folder / f"split-{how}.parquet", own)
    return Screen(folder, stores, splits, {"train": names[:half], "test": names[half:]})


def _pair(labels: object) -> tuple[str, str]:
    cell_type, perturbation = labels if isinstance(labels, tuple) else (labels, "")
    return str(cell_type), str(perturbation)


def true_sets(made: Screen, part: str, size: int, *, control: bool = False) -> Collection:
    """Return ``SETS`` sets of each condition, each the first ``size`` cells of a well of the part."""
    store = Store(made.stores["apart"])
    table = store.conditions
    here = table["batch"].isin(made.wells[part]) & (table["is_control"] == control)
    here &= table["stop"] - table["start"] >= size
    found: Collection = {}
    for labels, wells in table[here].groupby(LABELS, observed=True):
        if len(wells) < SETS:
            raise SystemExit(f"only {len(wells)} wells of {labels} hold {size} cells: take smaller sets")
        starts = wells.sort_values("batch")["start"].to_numpy()[:SETS]
        rows = (starts[:, None] + np.arange(size)).ravel()
        found[_pair(labels)] = store.expression(rows).toarray().reshape(SETS, size, -1)
    return found


def pooled_cells(made: Screen, size: int, seed: int) -> Collection:
    """Return sets drawn from all training cells of each condition, the wells forgotten."""
    store = Store(made.stores["mixed"])
    table = store.conditions
    here = (table["batch"] == "train") & ~table["is_control"]
    rng = np.random.default_rng(seed)
    found: Collection = {}
    for labels, own in table[here].groupby(LABELS, observed=True):
        rows = rng.choice(np.arange(own["start"].min(), own["stop"].max()), SETS * size, replace=False)
        found[_pair(labels)] = store.expression(rows).toarray().reshape(SETS, size, -1)
    return found


def moved_controls(made: Screen, size: int) -> Collection:
    """Return control sets of the held-out wells, every cell moved by the mean change of the training wells."""
    controls, before = (true_sets(made, part, size, control=True) for part in ("test", "train"))
    mean = {labels[0]: sets.mean(axis=(0, 1)) for labels, sets in before.items()}
    moved = {labels[0]: sets for labels, sets in controls.items()}
    after = true_sets(made, "train", size)
    return {
        (c, p): np.maximum(moved[c] + sets.mean(axis=(0, 1)) - mean[c], 0) for (c, p), sets in after.items()
    }


def sampled_sets(
    made: Screen, how: str, bundle: Path, config: Config, seed: int, cells_of_set: int | None = None
) -> Collection:
    """Return ``SETS`` sets of each condition drawn by a model, control cells from the held-out wells.

    In one step they are drawn ``DRAWS`` times. ``cells_of_set`` takes so many cells of each sampled set.
    """
    size, store = config.train.set_size, Store(made.stores[how])
    sets = SETS * (DRAWS if config.sample.num_steps == 1 and how != "apart" else 1)
    table = store.conditions[["cell_type", "batch", "perturbation", "is_control"]]
    wells = made.wells["test"][:SETS] if how == "apart" else ["test"]
    wanted = table[table["batch"].isin(wells) & ~table["is_control"]].drop(columns="is_control")
    wanted = wanted.assign(n_cells=sets * size // len(wells))
    request = bundle.parent / f"{bundle.name}.wanted.csv"
    wanted.to_csv(request, index=False)
    out = bundle.parent / f"{bundle.name}-{config.sample.num_steps}.h5ad"
    cells = ad.read_h5ad(
        sample(bundle, made.stores[how], out, conditions=request, config=config.sample, seed=seed)
    )
    cells = cells[cells.obs["source"] == "predicted", list(map(str, store.genes))]
    values = sparse.csr_matrix(cells.X).toarray()
    found: Collection = {}
    for labels, own in cells.obs.assign(place=np.arange(cells.n_obs)).groupby(LABELS, observed=True):
        # sets are written one after the other
        found[_pair(labels)] = values[own["place"]].reshape(sets, size, -1)[:, :cells_of_set]
    return found


def tool_sets(made: Screen, how: str, tool: str, size: int, seed: int) -> Collection:
    """Return ``SETS`` sets of each condition predicted by an external tool.

    A set is ``size`` predicted cells of a held-out well (*apart*), or of all of them (*mixed*). The tool is told the
    well as its batch, so far as it reads one, and each cell starts from a control cell of the same batch.
    """
    method = tool_method(known_tools.load(tool), BaselineConfig(settings="quick", options=TOOLS[tool]))
    out = made.folder / f"{tool}-{how}.h5ad"
    cells = ad.read_h5ad(predict_external(method, made.stores[how], made.splits[how], out, seed=seed))
    genes = list(map(str, Store(made.stores[how]).genes))
    cells = cells[cells.obs["source"] == "predicted", genes]
    values, rng = sparse.csr_matrix(cells.X), np.random.default_rng(seed)
    obs = cells.obs.assign(place=np.arange(cells.n_obs))
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for (*labels, _), own in obs.groupby([*LABELS, "batch"], observed=True):
        rows = rng.permutation(own["place"].to_numpy())
        sets = rows[: len(rows) // size * size].reshape(-1, size)[: 1 if how == "apart" else SETS]
        found.setdefault(_pair(tuple(labels)), []).extend(values[one].toarray() for one in sets)
    return {labels: np.stack(sets[:SETS]) for labels, sets in found.items()}


def shuffled(sets: Collection, seed: int) -> Collection:
    """Return the same cells, shuffled between the sets of their condition."""
    rng = np.random.default_rng(seed)
    return {
        labels: rng.permutation(values.reshape(-1, values.shape[2])).reshape(values.shape)
        for labels, values in sets.items()
    }


def measure(predicted: Collection, real: Collection, training: Collection) -> Iterator[dict[str, object]]:
    """Yield the measures of each condition; the leading axis comes from the training wells.

    Variances and the distance are of all sampled sets, the others are means over draws of ``SETS`` sets.
    """
    for labels, true in real.items():
        sets, axis = predicted[labels], sv.leading_axis(training[labels])[:, None]
        on_axis, true_on_axis = sets @ axis, true @ axis
        middle = (training[labels] @ axis).mean()
        draws = [_of_draw(one, true, axis, middle) for one in np.split(sets, len(sets) // SETS)]
        yield {
            **dict(zip(LABELS, labels, strict=True)),
            "between": sv.between_variance(sets).sum(),
            "true_between": sv.between_variance(true).sum(),
            "within": sv.within_variance(sets).sum(),
            "true_within": sv.within_variance(true).sum(),
            "axis_between": sv.between_variance(on_axis)[0],
            "true_axis_between": sv.between_variance(true_on_axis)[0],
            "distance": sv.distances(_one(sets), _one(true))[0, 0],
            **pd.DataFrame(draws).mean().to_dict(),
        }


def _of_draw(sets: np.ndarray, true: np.ndarray, axis: np.ndarray, middle: float) -> dict[str, float]:
    """Return who lies within whose cloud, and the score, for as many sampled sets as there are true ones."""
    means, true_means = ((x @ axis).mean(axis=(1, 2)) for x in (sets, true))
    across, own, their = (sv.distances(a, b) for a, b in ((true, sets), (sets, sets), (true, true)))
    return {
        "range": sv.within_range(true_means, means),
        "range_centred": sv.within_range(true_means, means - means.mean() + middle),
        "recall": sv.within_cloud(across, own),
        "precision": sv.within_cloud(across.T, their),
        "score": family_score(*SetDistances.of(sets, true).apart()[:2]),
    }


def _one(sets: np.ndarray) -> np.ndarray:
    return sets.reshape(1, -1, sets.shape[2])


def methods(
    made: Screen, level: str, seed: int, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Collection]]]:
    """Yield every method's name and what draws its sets."""
    size = recipe("recommended", level, options).train.set_size
    yield "true sets, training wells", lambda: true_sets(made, "train", size)
    yield "pooled training cells", lambda: pooled_cells(made, size, seed)
    yield "control sets + mean change", lambda: moved_controls(made, size)
    for model in options.models:
        config = recipe(model, level, options).model_copy(update={"seed": seed})
        for how in STORES.get(model, options.training_sets):
            start = time.process_time()
            bundle = train(made.stores[how], made.splits[how], made.folder / f"{model}-{how}", config)
            print(f"{level} {seed} {model} {how}: {time.process_time() - start:.0f} CPU s", flush=True)
            for steps in sorted({config.sample.num_steps, 1}, reverse=True):
                own = config.model_copy(
                    update={"sample": config.sample.model_copy(update={"num_steps": steps})}
                )
                name = f"{model}, {how}, {steps} step{'s' if steps > 1 else ''}"
                yield name, lambda own=own, how=how, bundle=bundle: sampled_sets(made, how, bundle, own, seed)
    for tool in options.tools:
        for how in options.training_sets:
            yield f"{tool}, {how}", lambda tool=tool, how=how: tool_sets(made, how, tool, size, seed)


def study(level: str, seed: int, options: argparse.Namespace) -> pd.DataFrame:
    """Return the lines of one screen."""
    folder = options.out / f"{level}-{seed}"
    if (folder / "sets.csv").is_file():
        return pd.read_csv(folder / "sets.csv")
    config = recipe("recommended", level, options)
    folder.mkdir(parents=True, exist_ok=True)
    made = screen(folder, config, seed)
    size = config.train.set_size
    real, training = (true_sets(made, part, size) for part in ("test", "train"))
    rows: list[dict[str, object]] = []
    for name, draw in methods(made, level, seed, options):
        sets = draw()
        kinds = {name: sets, **({f"{name}, shuffled": shuffled(sets, seed)} if options.shuffles else {})}
        for kind, collection in kinds.items():
            found = measure(collection, real, training)
            rows += [{"level": level, "seed": seed, "method": kind, **row} for row in found]
    table = pd.DataFrame(rows)
    table.to_csv(folder / "sets.csv", index=False, float_format="%.6g")
    return table


def markdown(table: pd.DataFrame) -> Iterator[str]:
    """Yield the lines of the table, a method in each, and of what each differs from ``recommended`` in."""
    shares = ["range", "range_centred", "recall", "precision"]
    heads = [
        "factor",
        "method",
        "between sets",
        "sampled / true",
        "along the axis",
        *shares,
        "distance",
        "score",
    ]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    alike = [sv.alike_range(SETS)] * 2 + [sv.alike_cloud(SETS)] * 2
    yield "| | *if alike* | | 1 | 1 | " + " | ".join(f"{x:.2f}" for x in alike) + " | 0 | |"
    for (level, method), rows in table.groupby(["level", "method"], sort=False):
        screens = rows.groupby("seed").sum(numeric_only=True)
        means = rows.groupby("seed").mean(numeric_only=True)
        ratios = (screens[name] / screens[f"true_{name}"] for name in ("between", "axis_between"))
        cells = ["–", "–"] if level == "absent" else [_interval(one) for one in ratios]
        cells = [_text(means["between"].mean(), 3), *cells, *(_interval(means[x]) for x in shares)]
        cells += [_interval(means["distance"], 3), _interval(means["score"], 4)]
        yield f"| {level} | {method} | " + " | ".join(cells) + " |"
    yield from _against(table, "recommended, mixed, 1 step")


def _against(table: pd.DataFrame, other: str) -> Iterator[str]:
    """Yield a table of the distance and the score of each method less those of another, on the same screens."""
    means = table.groupby(["level", "method", "seed"], sort=False)[["distance", "score"]].mean()
    if other not in means.index.get_level_values("method"):
        return
    gaps = means - means.xs(other, level="method").reindex(means.index.droplevel("method")).to_numpy()
    yield from ("", f"| factor | method | distance less that of {other} | score less |", "|---|---|---|---|")
    for (level, method), rows in gaps.groupby(["level", "method"], sort=False):
        yield f"| {level} | {method} | {_interval(rows['distance'], 3)} | {_interval(rows['score'], 4)} |"


def _interval(values: pd.Series, digits: int = 2) -> str:
    """Return the mean over screens and its 95 % interval by Student's t."""
    mean, number = values.mean(), len(values)
    if number == 1 or values.nunique() == 1:
        return _text(mean, digits)
    half = stats.t.ppf(0.975, number - 1) * stats.sem(values)
    return f"{_text(mean, digits)} [{_text(mean - half, digits)}, {_text(mean + half, digits)}]"


def _text(value: float, digits: int = 2) -> str:
    return f"{value:z.{digits}f}".replace("-", "−")


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["paper", "recommended"])
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--training-sets", nargs="+", choices=("mixed", "apart"), default=["mixed", "apart"])
    parser.add_argument(
        "--shuffles", action="store_true", help="also measure every method with shuffled cells"
    )
    parser.add_argument("--steps-paper", type=int, default=900)
    parser.add_argument("--steps-recommended", type=int, default=600)
    parser.add_argument("--steps-family", type=int, default=1800)
    parser.add_argument("--set", action="append", default=[], help="change the recipes")
    options = parser.parse_args()
    options.steps = dict.fromkeys(MODELS, options.steps_paper)
    options.steps |= {"recommended": options.steps_recommended, "family": options.steps_family}
    table = pd.concat([study(level, seed, options) for seed in options.seeds for level in options.levels])
    table.to_csv(options.out / "sets.csv", index=False, float_format="%.6g")
    print("\n".join(markdown(table)))


if __name__ == "__main__":
    main()
