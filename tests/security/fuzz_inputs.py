"""Sound inputs of every kind, made by the real stages, and the commands that read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import forked

RECIPE = ("--config", "tiny", "--set", "split.held_out=[d2]", "--set", "split.valid_fraction=0.4")
QUICK = (
    *("--set", "evaluate.bootstrap=20", "--set", "evaluate.embed_conditions=0"),
    *("--metrics", "expression,de", "--threads", "1"),
)


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes
    ----------
    targets
        Names of the files and folders that are damaged, in the folder of sound inputs.
    commands
        Command lines that read it. ``{bad}`` stands for the folder with the damaged copy, ``{good}`` for that of the
        sound inputs, ``{out}`` for the output.
    checked
        Whether the input carries checksums, so that no damage may change a result.
    free
        Whether a damaged input may be another valid input: a setting, a table of the user's.
    share
        How many mutations it gets, in relation to the others.
    """

    targets: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    checked: bool = False
    free: bool = False
    share: int = 10


def _of_file(name: str) -> tuple[str, ...]:
    return name, f"{name}.manifest.json", f"{name}.run.json"


_PREPROCESS = ("preprocess", "{bad}/counts.h5ad", "--out", "{out}/store", *RECIPE, "--jobs", "1")
_PREPROCESS_GOOD = ("preprocess", "{good}/counts.h5ad", *_PREPROCESS[2:])
_TRAIN = ("train", "{good}/store", "--split", "{good}/split.parquet", "--out", "{out}/bundle", *RECIPE)
_SAMPLE = ("--split", "{good}/split.parquet", "--out", "{out}/cells.h5ad", "--device", "cpu")
_REPORT = (
    *("report", "{bad}/scores", "{bad}/base", "{good}/ceiling", "--out", "{out}/page.html"),
    *("--bundle", "{good}/bundle", "--split", "{good}/split.parquet"),
)

KINDS: dict[str, Kind] = {
    "counts": Kind(("counts.h5ad",), (_PREPROCESS,), share=14),
    "tenx": Kind(
        ("counts.h5",),
        (("preprocess", "{bad}/counts.h5", *_PREPROCESS[2:], "--obs", "{good}/labels.csv"),),
        share=4,
    ),
    "zarr": Kind(
        ("counts.zarr",),
        (("preprocess", "{bad}/counts.zarr", "--out", "{out}/store", *RECIPE, "--jobs", "1"),),
        share=8,
    ),
    "cells": Kind(
        ("mine.h5ad",),
        (
            ("evaluate", "{bad}/mine.h5ad", "{good}/real.h5ad", "--out", "{out}/scores", *QUICK),
            ("evaluate", "{good}/real.h5ad", "{bad}/mine.h5ad", "--out", "{out}/scores", *QUICK),
        ),
        share=8,
    ),
    "store": Kind(
        ("store",),
        (
            ("store", "export", "{bad}/store", "--out", "{out}/x.h5ad"),
            ("evaluate", "{good}/pred.h5ad", "{bad}/store", "--out", "{out}/scores", *QUICK),
            ("sample", "{good}/bundle", "{bad}/store", *_SAMPLE),
            ("split", "{bad}/store", "--out", "{out}/split.parquet", *RECIPE),
            ("train", "{bad}/store", "--split", "{good}/split.parquet", "--out", "{out}/bundle", *RECIPE),
            ("stats", "{bad}/store", "--out", "{out}/stats", "--pairs", "5"),
        ),
        checked=True,
        share=16,
    ),
    "bundle": Kind(
        ("bundle",),
        (
            ("sample", "{bad}/bundle", "{good}/store", *_SAMPLE),
            ("sample", "{bad}/bundle", "{good}/store", *_SAMPLE),
            (
                *("finetune", "{bad}/bundle", "{good}/store", "--split", "{good}/split.parquet"),
                *("--out", "{out}/tuned", *RECIPE),
            ),
            ("report", "{good}/scores", "--out", "{out}/page.html", "--bundle", "{bad}/bundle"),
        ),
        checked=True,
        share=14,
    ),
    "predictions": Kind(
        _of_file("pred.h5ad"),
        (("evaluate", "{bad}/pred.h5ad", "{good}/store", "--out", "{out}/scores", *QUICK),),
        checked=True,
        share=12,
    ),
    "parts": Kind(
        (*_of_file("part0.h5ad"), *_of_file("part1.h5ad")),
        (("merge", "{bad}/part0.h5ad", "{bad}/part1.h5ad", "--out", "{out}/cells.h5ad"),),
        checked=True,
        share=4,
    ),
    "report": Kind(("scores", "base"), (_REPORT,), checked=True, share=12),
    "statistics": Kind(
        ("stats",),
        (("report", "{good}/scores", "--out", "{out}/page.html", "--stats", "{bad}/stats"),),
        checked=True,
        share=3,
    ),
    "split": Kind(
        (*_of_file("split.parquet"), "split.parquet.counts.csv"),
        (
            ("ceiling", "{good}/store", "--split", "{bad}/split.parquet", "--out", "{out}/scores", *QUICK),
            ("train", "{good}/store", "--split", "{bad}/split.parquet", "--out", "{out}/bundle", *RECIPE),
            ("report", "{good}/scores", "--out", "{out}/page.html", "--split", "{bad}/split.parquet"),
        ),
        checked=True,
        share=8,
    ),
    "recipe": Kind(
        ("recipe.yaml",),
        (
            ("config", "show", "{bad}/recipe.yaml"),
            ("split", "{good}/store", "--out", "{out}/split.parquet", "--config", "{bad}/recipe.yaml"),
        ),
        free=True,
        share=10,
    ),
    "toml": Kind(
        ("split.toml",),
        (("split", "{good}/store", "--out", "{out}/split.parquet", "--toml", "{bad}/split.toml"),),
        free=True,
        share=5,
    ),
    "genes": Kind(("genes.txt",), ((*_PREPROCESS_GOOD, "--genes", "{bad}/genes.txt"),), free=True, share=2),
    "conditions": Kind(
        ("wanted.csv",),
        (("sample", "{good}/bundle", "{good}/store", "--conditions", "{bad}/wanted.csv", *_SAMPLE[2:]),),
        free=True,
        share=2,
    ),
    "embedding": Kind(
        ("embedding.parquet",),
        ((*_TRAIN, "--embedding", "perturbation={bad}/embedding.parquet"),),
        free=True,
        share=3,
    ),
    "npz": Kind(
        ("embedding.npz",),
        ((*_TRAIN, "--embedding", "perturbation={bad}/embedding.npz"),),
        free=True,
        share=3,
    ),
    "expected": Kind(
        ("expected.csv",),
        (("report", "{good}/scores", "--out", "{out}/page.html", "--expected", "{bad}/expected.csv"),),
        free=True,
        share=2,
    ),
    "labels": Kind(
        ("labels.csv",),
        (("preprocess", "{good}/counts.h5", *_PREPROCESS[2:], "--obs", "{bad}/labels.csv"),),
        free=True,
        share=3,
    ),
}
"""Every kind of input."""

_MADE = (
    ("preprocess", "{0}/counts.h5ad", "--out", "{0}/store", *RECIPE, "--jobs", "1"),
    ("split", "{0}/store", "--out", "{0}/split.parquet", *RECIPE),
    ("stats", "{0}/store", "--out", "{0}/stats", "--pairs", "5"),
    ("train", "{0}/store", "--split", "{0}/split.parquet", "--out", "{0}/bundle", *RECIPE),
    (
        *("sample", "{0}/bundle", "{0}/store", "--split", "{0}/split.parquet", "--out", "{0}/pred.h5ad"),
        *("--device", "cpu"),
    ),
    *(
        (
            *(
                "sample",
                "{0}/bundle",
                "{0}/store",
                "--split",
                "{0}/split.parquet",
                "--out",
                f"{{0}}/part{k}.h5ad",
            ),
            *("--device", "cpu", "--shard", f"{k}/2"),
        )
        for k in (0, 1)
    ),
    ("baseline", "control", "{0}/store", "--split", "{0}/split.parquet", "--out", "{0}/control.h5ad"),
    ("evaluate", "{0}/pred.h5ad", "{0}/store", "--out", "{0}/scores", *QUICK),
    ("evaluate", "{0}/control.h5ad", "{0}/store", "--out", "{0}/base", *QUICK),
    ("ceiling", "{0}/store", "--out", "{0}/ceiling", "--split", "{0}/split.parquet", *QUICK),
)

_TOML = """\
[datasets]
tiny = "store"

[training]
tiny = "train"

[fewshot."tiny.d2"]
val = ["p1"]
test = ["p2", "p3"]
"""

_YAML = """\
base: tiny
name: mine
data:
  num_hvgs: 50
split:
  held_out: [d2]
  valid_fraction: 0.4
model:
  width: 32
  depth: 2
train:
  max_steps: 20
  learning_rate: 2.0e-3
sample:
  num_steps: 4
"""


def make(folder: Path, scratch: Path) -> None:
    """Make all sound inputs in ``folder``.

    Raises
    ------
    RuntimeError
        If a stage fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _succeed(forked.forked(lambda: _write(folder), folder=scratch))
    for line in _MADE:
        _succeed(forked.command([word.format(folder) for word in line], folder=scratch, limit=600))


def _succeed(ended: forked.Ended) -> None:
    if ended.code != 0:
        raise RuntimeError(ended.err)


def _write(folder: Path) -> int:
    """Write what no stage makes."""
    import numpy as np
    import pandas as pd
    import zarr
    from evaluation_pair import pair_side
    from tenx import write_tenx
    from tiny_data import tiny_counts

    zarr.config.set({"array.write_empty_chunks": True})
    adata = tiny_counts()
    adata.write_h5ad(folder / "counts.h5ad", compression="gzip")
    adata.write_zarr(folder / "counts.zarr")
    write_tenx(folder / "counts.h5", adata)
    adata.obs.to_csv(folder / "labels.csv")
    pair_side(1).write_h5ad(folder / "mine.h5ad")
    pair_side(0).write_h5ad(folder / "real.h5ad")
    (folder / "genes.txt").write_text("".join(f"g{i}\n" for i in range(60)))
    (folder / "wanted.csv").write_text("cell_type,batch,perturbation,n_cells\nB,d1,p1,5\nT,d2,p2,6\n")
    (folder / "expected.csv").write_text("dataset,method,kind,log\nstore,cpa,baseline,cpa.log\n")
    (folder / "split.toml").write_text(_TOML)
    (folder / "recipe.yaml").write_text(_YAML)
    names, vectors = ["p1", "p2", "p3"], np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    table = pd.DataFrame(vectors, columns=[f"v{i}" for i in range(8)])
    table.insert(0, "name", names)
    table.to_parquet(folder / "embedding.parquet", index=False)
    np.savez(folder / "embedding.npz", names=np.array(names), vectors=vectors)
    return 0
