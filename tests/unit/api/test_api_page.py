"""docs/api.md: its blocks run as they stand, in a program of a user, which says what it does and leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from own_screen import own_screen

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FIT = 'PerturbDiff(adata, perturbation="stim", control="ctrl")'
QUICK = FIT[:-1] + ', config="tiny", settings={"train.max_steps": 4, "evaluate.bootstrap": 20})'


SIMULATED = "simulate(cells=1500, seed=1)"
SMALL = """simulate(cells=800, seed=1, settings={
    "simulate.genes": 90, "simulate.knockdowns": 4, "simulate.drugs": 0, "simulate.cytokines": 1})"""


def messy_screen():
    """A screen as in the page: columns 'stim' and 'ctrl', IFNB among the perturbations, others to be guessed."""
    adata = own_screen()
    first = sorted(set(adata.obs["gene"]) - {"ntc"})[0]
    adata.obs["stim"] = adata.obs.pop("gene").replace({"ntc": "ctrl", first: "IFNB"})
    adata.obs = adata.obs.rename(columns={"line": "cell_type", "plate": "donor"})
    return adata


def test_from_anndata_to_scores_in_five_lines():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 5


def test_the_page_runs_as_it_stands(tmp_path):
    messy_screen().write_h5ad(tmp_path / "my.h5ad")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = "\n".join(BLOCKS)
    assert program.count(FIT) == 1
    assert program.count(SIMULATED) == 1
    (tmp_path / "program.py").write_text(program.replace(FIT, QUICK).replace(SIMULATED, SMALL))
    place = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "cell type: cell_type" in done.stderr  # what was guessed is said
    assert "batch: donor" in done.stderr
    assert str(temporary) not in done.stderr
    for name in ("scores.png", "report.html", "bundle", "store", "trained", "predicted.h5ad", "scored"):
        assert (tmp_path / name).exists(), name
    assert list(temporary.iterdir()) == []


def test_the_page_names_every_public_name_and_is_short():
    import perturbdiff

    assert len(PAGE.encode()) < 8192
    for name in set(perturbdiff.__all__) - {"__version__"}:
        assert f"`{name}`" in PAGE or f"perturbdiff.{name}" in PAGE, name
