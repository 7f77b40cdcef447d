"""Does the prior help? Scratch against pretrained, at several shares of the perturbed cells, over seeds.

    python benchmarks/finetuning.py COUNTS.h5ad --atlas UNPERTURBED.h5ad --out FOLDER --config kang18
    python benchmarks/finetuning.py --simulate 60000 --out FOLDER

Both start from the same recipe and seed and take the same number of steps; the cells of a share are the same for
both, and contain those of a smaller share. Both are trained once more over more passes (`--longer`), which tells
what a prior knows from what mere steps bring. Stages are those of the command line: what is done already is not done
again, so an interrupted run goes on. Prints a table (mean over seeds, and the paired differences) and writes
`scores.csv`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from perturbdiff import recipes
from perturbdiff.baselines import predict
from perturbdiff.config import Config
from perturbdiff.data.preprocess import preprocess
from perturbdiff.data.splits import make_split
from perturbdiff.data.synthetic import simulate
from perturbdiff.evaluation.run import evaluate
from perturbdiff.files import existing
from perturbdiff.sampling import sample
from perturbdiff.training.run import finetune, pretrain, train

METRICS = ("R2", "PDCorr", "DEOver", "PDS_L1")
ATLAS_SHARE = 5 / 6
ARMS = ("scratch", "finetuned", "scratch, longer", "finetuned, longer")
SIMULATED = (
    "simulate.control_fraction=0.6", "simulate.cell_types=4", "simulate.batches=2", "simulate.knockdowns=20",
    "data.num_hvgs=null", "split.context_column=cell_type", "split.num_held_out=1", "split.train_fraction=0.3",
    "split.valid_fraction=0.0",
)  # fmt: skip


def simulated(out: Path, config: Config) -> tuple[Path, Path]:
    """Simulate a screen with many controls; most of them become the unperturbed atlas. Return counts and atlas."""
    folder = simulate(out / "simulated", config.simulate, seed=config.seed)
    counts, atlas = out / "counts.h5ad", out / "atlas.h5ad"
    if not (counts.is_file() and atlas.is_file()):
        data = ad.read_h5ad(folder / "counts.h5ad")
        controls = np.flatnonzero(data.obs["perturbation"].to_numpy() == "control")
        chosen = np.random.default_rng(0).permutation(controls)[: round(ATLAS_SHARE * len(controls))]
        there = np.isin(np.arange(data.n_obs), chosen)
        data[there].write_h5ad(atlas)
        data[~there].write_h5ad(counts)
    return counts, atlas


def read_scores(folder: Path) -> dict[str, float]:
    """Return pooled metrics and the mean energy distance of one evaluation."""
    table = pd.read_csv(folder / "aggregate.csv")
    pooled = table[table["scope_kind"] == "pooled"].set_index("metric")["nanmean"].to_dict()
    conditions = pd.read_csv(folder / "conditions.csv")
    found = {name: float(pooled[name]) for name in METRICS if name in pooled}
    means = {name: float(np.mean(conditions[name])) for name in ("energy_distance", "nonzero_ratio")}
    return {**means, **found}


def longer(config: Config, factor: float) -> dict[str, float | int]:
    """Return the training settings that make a training so many times as long."""
    train = config.train
    if train.max_epochs is None:
        return {"max_steps": round(train.max_steps * factor)}
    return {"max_epochs": train.max_epochs * factor}


class Study:
    """The runs of one data set, each stage in a folder of its own."""

    def __init__(self, out: Path, counts: Path, atlas: Path, args: argparse.Namespace) -> None:
        self.out, self.args = out, args
        self.config = recipes.load(args.config, args.set)
        self.prior = recipes.load(args.prior, [*args.set, *args.set_prior])
        self.store = preprocess([counts], out / "store", self.config.data, genes=args.genes)
        keys = {"perturbation_key": None, "cell_type_key": self.config.data.cell_type_key}
        self.atlas = preprocess(
            [atlas],
            out / "atlas",
            self.config.data.model_copy(update=keys | {"batch_key": args.atlas_batch_key}),
            genes=self._genes(),
        )

    def _genes(self) -> Path:
        """Return the store's gene list as a file: the atlas is cut to it."""
        from perturbdiff.data.store import Store

        path = self.out / "genes.txt"
        path.write_text("\n".join(Store(self.store).genes) + "\n")
        return path

    def run(self, seed: int) -> list[dict[str, object]]:
        """Return the scores of all runs of a seed."""
        config = self.config.model_copy(update={"seed": seed})
        split = make_split(self.store, self.out / f"split-{seed}.parquet", config, seed=seed)
        prior = pretrain(
            [self.atlas],
            self.out / f"prior-{seed}",
            self.prior.model_copy(update={"seed": seed}),
            downstream=[(self.store, split)],
        )
        rows: list[dict[str, object]] = []
        for share in self.args.shares:
            for how in ARMS:
                bundle = self.out / f"{how.replace(', ', '-')}-{share:g}-{seed}"
                factor = self.args.longer if how.endswith("longer") else 1
                section = config.train.model_copy(update={"cells_fraction": share, **longer(config, factor)})
                recipe = config.model_copy(update={"train": section})
                if how.startswith("finetuned"):
                    finetune(prior, self.store, split, bundle, recipe, transfer="keep")
                else:
                    train(self.store, split, bundle, recipe)
                cells = sample(bundle, self.store, self.out / f"{bundle.name}.h5ad", split=split, seed=seed)
                rows.append({"seed": seed, "share": share, "how": how, **self._score(cells, bundle.name)})
        for name in ("nearest-context", "control"):
            cells = predict(name, self.store, split, self.out / f"{name}-{seed}.h5ad", seed=seed)
            rows.append({"seed": seed, "share": 1.0, "how": name, **self._score(cells, f"{name}-{seed}")})
        return rows

    def _score(self, cells: Path, name: str) -> dict[str, float]:
        folder = evaluate(
            cells,
            self.store,
            self.out / "evaluated" / name,
            self.config.evaluate,
            method=name,
            dataset="study",
        )
        return read_scores(folder)


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return finetuned minus scratch, paired by seed: mean, smallest and largest for each share and length."""
    metrics = [c for c in table if c not in ("seed", "share", "how")]
    wide = table[table["how"].isin(ARMS)].pivot(index=["share", "seed"], columns="how")
    gain = pd.DataFrame(
        {
            f"{m}{length}": wide[m][f"finetuned{length}"] - wide[m][f"scratch{length}"]
            for m in metrics
            for length in ("", ", longer")
        }
    )
    return pd.DataFrame(gain.groupby("share").agg(["mean", "min", "max"]))


def main() -> None:
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("counts", type=Path, nargs="?")
    parser.add_argument("--atlas", type=Path)
    parser.add_argument("--atlas-batch-key", default="batch")
    parser.add_argument("--simulate", type=int, metavar="CELLS")
    parser.add_argument("--genes", type=Path)
    parser.add_argument("--config", default="recommended")
    parser.add_argument("--prior", default="recommended-pretrain")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--set-prior", action="append", default=[])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--longer", type=float, default=5.0, help="passes of the longer training, as a factor"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.simulate:
        args.set = [f"simulate.cells={args.simulate}", *SIMULATED, *args.set]
        counts, atlas = simulated(args.out, recipes.load(args.config, args.set))
    else:
        counts, atlas = existing(args.counts, "counts"), existing(args.atlas, "atlas")
    study = Study(args.out, counts, atlas, args)
    rows = []
    for seed in args.seeds:
        rows += study.run(seed)
        table = pd.DataFrame(rows)
        table.to_csv(args.out / "scores.csv", index=False, float_format="%.5g")
    print(table.groupby(["share", "how"]).mean().drop(columns="seed").round(4).to_string())
    print(differences(table).round(4).T.to_string())


if __name__ == "__main__":
    main()
