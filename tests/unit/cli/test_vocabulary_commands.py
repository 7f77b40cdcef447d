"""``perturbdiff vocabulary``: from studies to a store with the vocabulary's genes; light help; mistakes."""

import json
import subprocess
import sys

import anndata as ad
import pandas as pd
import pytest
from tiny_data import TINY, tiny_counts

HEAVY = ("torch", "numpy", "pandas", "anndata", "scanpy", "zarr")


@pytest.mark.parametrize("command", [[], ["build"], ["align"]])
def test_help_imports_nothing_heavy(command):
    code = f"""
import sys
from perturbdiff.cli import main as cli
sys.argv = ["perturbdiff", "vocabulary", *{command!r}, "--help"]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_from_studies_to_a_store_and_an_aligned_file(tmp_path, run_cli):
    for number in range(3):
        made = tiny_counts(seed=number)[:, 10 * number :]
        made.write_h5ad(tmp_path / f"study{number}.h5ad")
    (tmp_path / "more.txt").write_text("g1\ng2\n")
    (tmp_path / "studies.txt").write_text("study0.h5ad\nstudy1.h5ad\nstudy2.h5ad\n")
    vocabulary = tmp_path / "vocab"
    done = run_cli(
        *(
            "vocabulary",
            "build",
            tmp_path / "studies.txt",
            "--out",
            vocabulary,
            "--composites",
            2,
            "--top",
            20,
        ),
        *("--add", tmp_path / "more.txt", "--jobs", 1, "--memory-limit", "1GB", *TINY),
    )
    assert done.code == 0, done.err
    assert done.out.strip() == str(vocabulary)
    genes = (vocabulary / "genes.txt").read_text().split()
    assert {"g1", "g2"} < set(genes)
    assert 20 <= len(genes) <= 42

    counts = tmp_path / "study1.h5ad"
    assert run_cli("preprocess", counts, "--out", tmp_path / "store", "--genes", vocabulary, *TINY).code == 0
    stored = pd.read_parquet(tmp_path / "store" / "genes.parquet").index.tolist()
    assert stored == [g for g in genes if int(g[1:]) >= 10]

    aligned = tmp_path / "aligned.h5ad"
    done = run_cli(
        *("vocabulary", "align", tmp_path / "store", "--genes", vocabulary, "--out", tmp_path / "report"),
        *("--write", aligned),
    )
    assert done.code == 0, done.err
    assert ad.read_h5ad(aligned).var_names.tolist() == genes
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["shared"] == len(stored)
    assert summary["share_kept"] == 1


def test_mistakes_are_one_line(tmp_path, run_cli):
    outcome = run_cli("vocabulary", "build", tmp_path / "none.h5ad", "--out", tmp_path / "v")
    assert outcome.code == 2
    assert "none.h5ad" in outcome.err
    outcome = run_cli("vocabulary", "align", tmp_path / "x.h5ad", "--genes", tmp_path / "l", "--out", "r")
    assert outcome.code == 2
    assert "gene list not found" in outcome.err
    assert run_cli("vocabulary", "build", "x", "--out", "v", "--memory-limit", "much").code == 2
