"""The mistakes that users make, with what they must be told. They are printed as a table by
`PYTHONPATH=tests python tests/fault/user_mistakes.py`.

The lines run in a folder with the tiny data set, its store, split and bundle, and predictions of a baseline.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from tiny_data import tiny_counts
from trained_folder import make_trained

MEMBERS = ("counts.h5ad", "store", "split.parquet", "bundle", "predictions.h5ad")
"""What the folder holds, from one training."""


@dataclass(frozen=True)
class Mistake:
    """A command line that is wrong.

    Attributes
    ----------
    what
        The mistake, in the user's words.
    line
        The command, without the program's name.
    says
        What the message must contain: the place of the mistake, and the remedy.
    make
        Writes the files of this mistake into the folder.
    """

    what: str
    line: str
    says: tuple[str, ...]
    make: Callable[[Path], None] | None = None


def counts(
    change: Callable[[ad.AnnData], ad.AnnData | None], name: str = "mine.h5ad"
) -> Callable[[Path], None]:
    """Return a function that writes the tiny counts after a change."""

    def make(folder: Path) -> None:
        adata = tiny_counts()
        made = change(adata)
        (adata if made is None else made).write_h5ad(folder / name)

    return make


def predicted(
    change: Callable[[ad.AnnData], ad.AnnData | None], name: str = "theirs.h5ad"
) -> Callable[[Path], None]:
    """Return a function that writes the predictions after a change, as another program would."""

    def make(folder: Path) -> None:
        adata = ad.read_h5ad(folder / "predictions.h5ad")
        del adata.uns["perturbdiff"]
        made = change(adata)
        (adata if made is None else made).write_h5ad(folder / name)

    return make


def log1p(adata: ad.AnnData) -> None:
    adata.layers["counts"] = adata.X.copy()
    adata.X.data = np.log1p(adata.X.data)


def centred(adata: ad.AnnData) -> None:
    adata.X = adata.X.toarray() - adata.X.toarray().mean(axis=0)


def unlabelled(adata: ad.AnnData) -> None:
    adata.obs["perturbation"] = adata.obs["perturbation"].where(np.arange(adata.n_obs) > 2)


def same_names(adata: ad.AnnData) -> None:
    adata.var_names = ["g0", "g0", *adata.var_names[2:]]


def ids(adata: ad.AnnData) -> None:
    adata.var_names = [f"ENSG{i:011d}" for i in range(adata.n_vars)]


def no_control_in_d2(adata: ad.AnnData) -> ad.AnnData:
    return adata[~((adata.obs["batch"] == "d2") & (adata.obs["perturbation"] == "control"))].copy()


def single_cells(adata: ad.AnnData) -> ad.AnnData:
    control = adata.obs["perturbation"] == "control"
    return adata[control | ~adata.obs.duplicated(["perturbation", "cell_type", "batch"])].copy()


def tenth(adata: ad.AnnData) -> None:
    adata.X.data /= 10


def unlogged(adata: ad.AnnData) -> None:
    adata.X.data = np.expm1(adata.X.data) * 50


def renamed(adata: ad.AnnData) -> None:
    adata.obs = adata.obs.rename(columns={"perturbation": "guide"})


def truncated(folder: Path) -> None:
    counts(lambda adata: None)(folder)
    os.truncate(folder / "mine.h5ad", 20_000)


def wanted(**labels: str) -> Callable[[Path], None]:
    """Return a function that writes a table of one condition to predict."""

    def make(folder: Path) -> None:
        row = {"cell_type": "B", "batch": "d1", "perturbation": "p1", "n_cells": 4} | labels
        pd.DataFrame([row]).to_csv(folder / "wanted.csv", index=False)

    return make


def written(name: str, text: str) -> Callable[[Path], None]:
    """Return a function that writes a text file."""

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return make


def other_store(folder: Path) -> None:
    """Write a store with other labels and other genes."""
    from perturbdiff.config import recipes
    from perturbdiff.preprocessing.preprocessing_stage import preprocess

    adata = tiny_counts()
    ids(adata)
    adata.obs["batch"] = adata.obs["batch"].cat.rename_categories({"d1": "e1", "d2": "e2"})
    adata.write_h5ad(folder / "other.h5ad")
    preprocess([folder / "other.h5ad"], folder / "other", recipes.load("tiny").data)


MISTAKES = (
    # files
    Mistake(
        "a misspelt path",
        "preprocess conuts.h5ad --out out",
        ("input not found: conuts.h5ad", "did you mean 'counts.h5ad'"),
    ),
    Mistake(
        "a folder that does not exist",
        "store info results/store",
        ("results/store", "there is no folder results"),
    ),
    Mistake(
        "an empty file",
        "preprocess mine.h5ad --out out",
        ("mine.h5ad", "empty", "copy or make the file again"),
        written("mine.h5ad", ""),
    ),
    Mistake(
        "a damaged or half-copied file",
        "preprocess mine.h5ad --out out",
        ("mine.h5ad", "truncated", "copy or make the file again"),
        truncated,
    ),
    Mistake(
        "a text file in place of cells",
        "preprocess mine.h5ad --out out",
        ("mine.h5ad", "not an h5ad file", "give h5ad, zarr or 10x h5"),
        written("mine.h5ad", "cell,gene\n"),
    ),
    Mistake(
        "a folder in place of a file",
        "preprocess store --out out",
        ("store", "this is a store, not a file of counts", "h5ad"),
    ),
    Mistake(
        "a file in place of a store",
        "store info counts.h5ad",
        ("counts.h5ad", "this is an h5ad file of cells, not a store", "perturbdiff preprocess"),
    ),
    # swapped files
    Mistake(
        "predictions and truth swapped",
        "evaluate counts.h5ad predictions.h5ad --out out",
        ("predictions.h5ad", "this is a predictions file", "did you swap them?", "PREDICTIONS TRUTH"),
    ),
    Mistake(
        "bundle and store swapped",
        "sample store bundle --split split.parquet --out out.h5ad",
        ("bundle: this is a model bundle, not a store", "did you swap them?"),
    ),
    Mistake(
        "a bundle in place of a store",
        "train bundle --split split.parquet --out out --config tiny --device cpu",
        ("bundle: this is a model bundle, not a store", "did you swap them?"),
    ),
    Mistake(
        "predictions in place of a split",
        "train store --split predictions.h5ad --out out --config tiny --device cpu",
        ("predictions.h5ad: this is a predictions file, not a split", "perturbdiff split"),
    ),
    Mistake(
        "predictions in place of counts",
        "preprocess predictions.h5ad --out out",
        ("predictions.h5ad: this is a predictions file, not a file of counts",),
    ),
    Mistake(
        "predictions in place of scores",
        "report predictions.h5ad --out out.html",
        ("predictions.h5ad: this is a predictions file, not a folder of scores", "perturbdiff evaluate"),
    ),
    # columns, labels, genes
    Mistake(
        "a column that is not there",
        "preprocess counts.h5ad --out out --pert-col perturbatio",
        ("counts.h5ad", "no obs column 'perturbatio'", "--pert-col", "did you mean 'perturbation'"),
    ),
    Mistake(
        "two columns that are not there",
        "preprocess counts.h5ad --out out --pert-col gene --batch-col plate",
        (
            "no obs column 'gene'",
            "no obs column 'plate'",
            "columns: cell_type, batch, perturbation",
            "none if the data have none",
        ),
    ),
    Mistake(
        "another name of the control",
        "preprocess counts.h5ad --out out --control ctrl",
        ("counts.h5ad", "'ctrl'", "--control", "did you mean 'control'"),
    ),
    Mistake(
        "cells without a label",
        "preprocess mine.h5ad --out out",
        ("mine.h5ad", "obs column 'perturbation'", "3 ", "label"),
        counts(unlabelled),
    ),
    Mistake(
        "a dose that is no number",
        "preprocess counts.h5ad --out out --set data.dose_key=cell_type",
        ("counts.h5ad", "obs column 'cell_type' is not a number", "give doses as numbers"),
    ),
    Mistake(
        "genes that occur twice",
        "preprocess mine.h5ad --out out",
        ("mine.h5ad", "not unique (g0)", "var_names_make_unique"),
        counts(same_names),
    ),
    Mistake(
        "a layer that is not there",
        "preprocess mine.h5ad --out out --set data.layer=count",
        ("mine.h5ad", "'count'", "did you mean 'counts'"),
        counts(log1p),
    ),
    Mistake(
        "gene ids on one side, symbols on the other",
        "evaluate theirs.h5ad counts.h5ad --out out --control control --scale counts",
        (
            "theirs.h5ad",
            "counts.h5ad",
            "no gene in common",
            "ENSG00000000000",
            "g0, g1, g2",
            "gene ids",
            "gene names",
        ),
        predicted(ids),
    ),
    # values
    Mistake(
        "log data in place of counts",
        "preprocess mine.h5ad --out out",
        ("mine.h5ad: X", "looks log-transformed", "data.layer", "layers/counts", "data.input_scale=log1p"),
        counts(log1p),
    ),
    Mistake(
        "centred data in place of counts",
        "preprocess mine.h5ad --out out",
        ("mine.h5ad: X", "negative", "data.layer"),
        counts(centred),
    ),
    Mistake(
        "predictions whose scale is not said",
        "evaluate theirs.h5ad store --out out --control control",
        ("theirs.h5ad", "--scale log1p"),
        predicted(lambda a: None),
    ),
    Mistake(
        "predictions that are not log1p",
        "evaluate theirs.h5ad store --out out --control control --scale log1p",
        ("theirs.h5ad", "too large for log1p", "--scale counts"),
        predicted(unlogged),
    ),
    Mistake(
        "predictions on another scale than the truth",
        "evaluate theirs.h5ad store --out out --control control --scale log1p",
        ("theirs.h5ad", "store", "different scales", "log1p of counts normalised to the same depth"),
        predicted(tenth),
    ),
    # splits, bundles, conditions
    Mistake(
        "a context that is not there",
        "split store --out out.parquet --set split.held_out=[d22]",
        ("'d22'", "'batch'", "did you mean 'd2'"),
    ),
    Mistake(
        "a batch without control cells held out",
        "split mine.h5ad --out out.parquet --set split.held_out=d2",
        ("'d2'", "no control cells", "hold out another"),
        counts(no_control_in_d2),
    ),
    Mistake(
        "a split of another store",
        "train store --split other.parquet --out out --config tiny --device cpu",
        ("other.parquet: none of the conditions of store", "made from other data", "perturbdiff split"),
        lambda folder: (
            pd.read_parquet(folder / "split.parquet")
            .assign(batch="e1")
            .drop_duplicates(["cell_type", "batch", "perturbation"])
            .to_parquet(folder / "other.parquet")
        ),
    ),
    Mistake(
        "a part without conditions",
        "sample bundle store --split all.parquet --out out.h5ad --device cpu",
        ("store", "no perturbed conditions in part 'test'", "in train", "--part"),
        lambda folder: (
            pd.read_parquet(folder / "split.parquet").assign(part="train").to_parquet(folder / "all.parquet")
        ),
    ),
    Mistake(
        "a store whose genes the bundle does not know",
        "sample bundle other --conditions wanted.csv --out out.h5ad --device cpu",
        ("other", "no gene in common", "the model: g", "ENSG"),
        lambda folder: (other_store(folder), wanted(batch="e1")(folder)),
    ),
    Mistake(
        "a perturbation that the model does not know",
        "sample bundle store --conditions wanted.csv --out out.h5ad --device cpu",
        ("wanted.csv", "perturbation p11", "did you mean 'p1'", "leave these conditions out"),
        wanted(perturbation="p11"),
    ),
    Mistake(
        "a cell type that the store does not have",
        "sample bundle store --conditions wanted.csv --out out.h5ad --device cpu",
        ("wanted.csv", "the cell type 'b'", "did you mean 'B'"),
        wanted(cell_type="b"),
    ),
    Mistake(
        "conditions of too few cells",
        "ceiling mine.h5ad --out out --control control --scale counts",
        ("mine.h5ad", "at least two cells", "give conditions with more cells"),
        counts(single_cells),
    ),
    # options and recipes
    Mistake(
        "a command of another tool",
        "predict bundle store --out out.h5ad",
        ("no command 'predict'", "did you mean 'sample'"),
    ),
    Mistake(
        "an option of another tool",
        "train store --split split.parquet --out out --epochs 3",
        ("no option --epochs", "--set train.max_epochs="),
    ),
    Mistake(
        "another tool's name of the GPU",
        "train store --split split.parquet --out out --accelerator gpu",
        ("no option --accelerator", "--device cuda"),
    ),
    Mistake(
        "a device that is not one of ours",
        "train store --split split.parquet --out out --device gpu",
        ("--device", "'gpu' is not one of auto, cpu, cuda", "did you mean 'cuda'"),
    ),
    Mistake(
        "no GPU in this machine",
        "train store --split split.parquet --out out --config tiny --device cuda",
        ("no GPU", "--device cpu", "perturbdiff doctor"),
    ),
    Mistake(
        "a forgotten option",
        "train store --out out",
        ("--split is missing", "perturbdiff train store --split split.parquet --out bundle"),
    ),
    Mistake(
        "an option's file without the option",
        "train store split.parquet --out out",
        ("--split is missing", "for example: perturbdiff train store --split split.parquet"),
    ),
    Mistake(
        "a misspelt part",
        "sample bundle store --split split.parquet --part tets --out out.h5ad",
        ("--part", "'tets'", "did you mean 'test'"),
    ),
    Mistake(
        "a misspelt preset",
        "preprocess counts.h5ad --out out --config recommendedd",
        ("'recommendedd'", "did you mean 'recommended'", "presets: "),
    ),
    Mistake(
        "a path in place of a preset's name",
        "preprocess counts.h5ad --out out --config presets/kang18.yaml",
        ("presets/kang18.yaml", "did you mean 'kang18'"),
    ),
    Mistake(
        "a misspelt key of the recipe",
        "preprocess counts.h5ad --out out --set data.num_hvg=50",
        ("unknown key 'data.num_hvg'", "did you mean 'data.num_hvgs'"),
    ),
    Mistake(
        "a wrong value in the recipe",
        "preprocess counts.h5ad --out out --set data.num_hvgs=many",
        ("'data.num_hvgs'", "integer", "'many'"),
    ),
    Mistake(
        "a recipe that is not YAML",
        "preprocess counts.h5ad --out out --config mine.yaml",
        ("mine.yaml", "not valid YAML", "line 2"),
        written("mine.yaml", "data: [1, 2\n"),
    ),
    Mistake(
        "a metric that we do not know",
        "evaluate predictions.h5ad store --out out --metrics PDCor",
        ("PDCor", "did you mean 'PDCorr'"),
    ),
    Mistake(
        "a method that we do not know",
        "baseline linaer store --split split.parquet --out out.h5ad",
        ("no baseline 'linaer'", "did you mean 'linear'"),
    ),
    # outputs
    Mistake(
        "the working folder as output",
        "preprocess counts.h5ad --out .",
        (".: is a folder", "name a new place"),
    ),
    Mistake(
        "an output that someone else made",
        "preprocess counts.h5ad --out notes",
        ("notes", "not made by 'preprocess'", "nothing was touched", "choose another output"),
        written("notes/todo.txt", "mine\n"),
    ),
    Mistake(
        "an output that is an input",
        "preprocess mine.h5ad --out mine.h5ad",
        ("mine.h5ad", "input", "choose another output"),
        counts(lambda adata: None),
    ),
)


def prepare(trained: Path, folder: Path) -> None:
    """Link what the lines need into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MEMBERS:
        (folder / name).symlink_to(trained / name)
        for record in (f"{name}.manifest.json", f"{name}.run.json"):
            if (trained / record).exists():
                (folder / record).symlink_to(trained / record)


def make_members(trained: Path) -> None:
    """Add the predictions of a baseline to a folder with a store and a split."""
    from perturbdiff.baselines import predict

    if not (trained / "predictions.h5ad").exists():
        predict("control", trained / "store", trained / "split.parquet", trained / "predictions.h5ad")


def entries(folder: Path) -> list[str]:
    """Return everything in a folder, without what links lead to."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def message_of(error: str) -> list[str]:
    """Return the messages in what a command wrote to standard error."""
    return [line.removeprefix("error: ") for line in error.splitlines() if line.startswith("error: ")]


def table(folder: Path) -> str:
    """Carry out every mistake in ``folder`` and return the table in Markdown."""
    make_trained(folder / "trained")
    make_members(folder / "trained")
    rows = ["| mistake | command | message | exit code |", "|---|---|---|---|"]
    for number, mistake in enumerate(MISTAKES):
        place = folder / str(number)
        prepare(folder / "trained", place)
        if mistake.make is not None:
            mistake.make(place)
        done = subprocess.run(
            [sys.executable, "-m", "perturbdiff", *shlex.split(mistake.line)],
            cwd=place, capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = " ".join(message_of(done.stderr)).replace("|", "\\|")
        rows.append(f"| {mistake.what} | `{mistake.line}` | {said} | {done.returncode} |")
    return "\n".join(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(table(Path(scratch)))
