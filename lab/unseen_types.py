"""Do semantic vectors help in a cell type that training does not know, or knows in part? On simulated screens.

    python lab/unseen_types.py --out FOLDER --seed 0     # again with --seed 1 and --seed 2, into the same folder
    python lab/unseen_types.py --out FOLDER --table      # the tables of all seeds

Screens of several cell types, one of which is held out: *none*, so that training has only its control cells, or
*few*, so that training has 30 % of its perturbations too. A sixth of the perturbations is in no training cell of any
type. All are asked in the held-out cell type. Vectors are those of `lab/unseen.py`. The recommended recipe is trained
without vectors, with them, and with the anchor `predicted`; *always moved* is with vectors and without the rule that
one training set in five starts from control cells as they are. What is scored already is not done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import unseen
from unseen import QUALITIES, WITHOUT, interval, values

from perturbdiff.sampling import sample
from perturbdiff.splits.splits import read_split
from perturbdiff.training import module

SPLITS = {"none": 0.0, "few": 0.3}  # share of the held-out cell type's perturbations that are training data
UNSEEN = 1 / 6  # share of the perturbations that no training cell has
KINDS = ("seen elsewhere", "unseen")
METRICS = ("PDCorr", "DEOver", "energy_distance")
PLAIN = "transferred"  # the recommended recipe, without vectors


class Study(unseen.Study):
    """One screen and one split of it."""

    screen = (
        "simulate.cell_types=4", "simulate.batches=1", "simulate.drugs=0", "simulate.cytokines=0",
        "simulate.genes=200", "simulate.knockdowns=30", "simulate.cells=8000", "data.num_hvgs=null",
        "split.context_column=cell_type", "split.num_held_out=1", "split.train_fraction=0",
        "split.valid_fraction=0",
    )  # fmt: skip
    parts = ("test",)

    def __init__(self, out: Path, seed: int, how: str, overrides: list[str]) -> None:
        self.share = SPLITS[how]
        super().__init__(out / how, seed, overrides)

    def hold_out(self, made: Path) -> None:
        """Give some of the held-out cell type's perturbations to training, and take others from all cell types."""
        split = read_split(made)
        held = split["part"] == "test"
        labels = np.sort(split.loc[held, "perturbation"].unique())
        order = np.random.default_rng(self.seed).permutation(labels)
        known, never = order[: round(self.share * len(order))], order[-round(UNSEEN * len(order)) :]
        split.loc[held & split["perturbation"].isin(known), "part"] = "train"
        split.loc[~held & split["perturbation"].isin(never), "part"] = "unused"
        split.to_parquet(self.split)

    def sampled(self, bundle: Path, name: str, part: str) -> Path:
        """Predict the conditions of a part with a network, which without vectors cannot be asked for unknown ones."""
        if name != PLAIN:
            return super().sampled(bundle, name, part)
        split, request = read_split(self.split), self.out / f"{name}.csv"
        never = split.loc[split["part"] == "unused", "perturbation"].unique()
        wanted = split[(split["part"] == part) & ~split["perturbation"].isin(never)]
        wanted[["cell_type", "batch", "perturbation", "n_cells"]].to_csv(request, index=False)
        out = self.out / f"{name}-{part}.h5ad"
        return sample(bundle, self.store, out, conditions=request, seed=self.seed)

    def once(self, name: str, make: Callable[[], None]) -> None:
        """Make and score predictions, if that is not done."""
        if not (self.out / "scores" / "test" / name / "metrics.csv").is_file():
            make()

    def run(self, qualities: list[float], moved: list[float]) -> None:
        """Score all methods; ``moved`` are the qualities at which training sets are also always moved."""
        for name in WITHOUT:
            self.once(name, lambda name=name: self.baseline(name, name))
        self.once(PLAIN, lambda: self.model(PLAIN, PLAIN, None))
        for quality in qualities:
            table = self.vectors(quality)
            ridge = f"kernel-ridge-{quality:g}"
            self.once(ridge, lambda name=ridge, table=table: self.baseline("kernel-ridge", name, table))
            for anchor in (PLAIN, "predicted"):
                name = f"{anchor}-{quality:g}"
                self.once(name, lambda anchor=anchor, name=name, table=table: self.model(anchor, name, table))
            name = f"{PLAIN}-{quality:g}-always-moved"
            if quality in moved:
                with patch.object(module, "_UNTOLD", 0.0):
                    self.once(name, lambda name=name, table=table: self.model(PLAIN, name, table))


def scores(out: Path, how: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the two kinds of perturbations with their scores, as `unseen.values` returns them."""
    found = values(out / how, "test")
    never = {
        (path.parent.name, str(label))
        for path in (out / how).glob("seed*/split.parquet")
        for label in read_split(path).query("part == 'unused'")["perturbation"].unique()
    }
    is_never = np.array([pair in never for pair in zip(found["seed"], found["perturbation"], strict=True)])
    yield KINDS[0], found[~is_never]
    yield KINDS[1], found[is_never]


def show(out: Path, splits: list[str]) -> None:
    """Print mean scores of each method, and paired differences over perturbations with their intervals."""
    for how in splits:
        for kind, table in scores(out, how):
            means = table.groupby(["seed", "method", "metric"])["value"].mean().unstack("metric")
            print(f"\n{how}, {kind}", means.groupby("method").mean()[list(METRICS)].round(3), sep="\n")
            wide = table.pivot_table("value", ["seed", "perturbation"], ["metric", "method"])
            for ours, other in pairs(list(wide["PDCorr"].columns)):
                gaps = (interval(wide[m, ours] - wide[m, other]) for m in METRICS)
                told = "   ".join(f"{m} {gap}" for m, gap in zip(METRICS, gaps, strict=True))
                print(f"{how}, {kind}: {ours} less {other}: {told}")


def pairs(methods: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the methods to compare: each network with networks and baselines that have as much to go by."""
    for name in methods:
        if not name.startswith((PLAIN, "predicted")):
            continue
        if name.endswith("-always-moved"):
            others = [name.removesuffix("-always-moved")]
        elif name == PLAIN:
            others = ["nearest-context", "linear", "mean-overall"]
        else:
            others = [PLAIN, f"kernel-ridge-{name.split('-')[1]}", "mean-overall"]
        yield from ((name, other) for other in others if other in methods)


def main() -> None:
    """Run the study, or print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--quality", type=float, nargs="*", default=list(QUALITIES))
    parser.add_argument("--always-moved", type=float, nargs="*", default=[0.7], help="at these qualities")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--set", action="append", default=[], help="change the recipe")
    given = parser.parse_args()
    if given.table:
        show(given.out, given.splits)
        return
    for how in given.splits:
        Study(given.out, given.seed, how, given.set).run(given.quality, given.always_moved)


if __name__ == "__main__":
    main()
