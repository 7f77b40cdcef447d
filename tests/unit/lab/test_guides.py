"""The study of guides runs on a small screen, and finds guides that differ."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

SCRIPT = Path(__file__).parents[3] / "lab" / "guides.py"


def counts() -> ad.AnnData:
    """Return a gene whose guides differ, one whose guides do not, and controls: 4 guides of 70 cells each."""
    rng, blocks, obs = np.random.default_rng(0), [], []
    for gene, spread in (("apart", 1.0), ("alike", 0.0), ("non-targeting", 0.0)):
        for guide in range(4):
            change = np.zeros(20)
            change[:5] = 1.0 + spread * (guide - 1.5)
            blocks.append(rng.poisson(np.exp(1.0 + change), (70, 20)))
            obs += [(gene, f"{gene}-{guide}", "rep_1", "THP-1")] * 70
    frame = pd.DataFrame(obs, columns=["perturbation", "guide", "replicate", "cell_type"])
    frame.index = [f"c{i}" for i in range(len(frame))]
    names = pd.DataFrame(index=[f"g{i}" for i in range(20)])
    return ad.AnnData(sp.csr_matrix(np.concatenate(blocks).astype(np.float32)), frame, names)


def test_guides_that_differ_are_found(tmp_path, monkeypatch, capsys):
    counts().write_h5ad(tmp_path / "cells.h5ad")
    given = [
        "--data",
        str(tmp_path / "cells.h5ad"),
        "--out",
        str(tmp_path / "out"),
        "--seeds",
        "0",
        "--models",
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "sets of the seen guides" in capsys.readouterr().out
    found = pd.read_csv(tmp_path / "out" / "differences.csv").set_index("gene")
    assert found.loc["apart", "p"] < 0.05
    assert found.loc["apart", "between / noise"] > 5 * abs(found.loc["alike", "between / noise"])
    scores = pd.read_csv(tmp_path / "out" / "guides.csv").pivot(
        index="gene", columns="family", values="between"
    )
    assert (
        scores.loc["apart", "sets of the seen guides"]
        > 1
        > scores.loc["apart", "pooled cells of the seen guides"]
    )
