"""The command line of baselines: help without heavy imports, methods and sub-commands side by side."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "numpy",
    "pandas",
    "anndata",
    "scanpy",
    "zarr",
    "lightning",
    "rich",
)  # typer itself loads pydantic here


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], ["install", "list", "show", "remove", "NAME STORE --split SPLIT --out OUT"]),
        (["cpa", "-h"], ["--script", "--python", "--keep", "--threads", "baseline.settings=quick"]),
        (["script", "store", "--help"], ["--script"]),
        (["install", "--help"], ["NAME"]),
    ],
)
def test_help_imports_nothing_heavy(words, shown):
    code = f"""
import sys
from perturbdiff.cli import main as cli
sys.argv = ["perturbdiff", "baseline", *{words!r}]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for text in shown:
        assert text in " ".join(done.stdout.split())


def test_options_may_come_before_the_name(run_cli, tmp_path):
    done = run_cli("baseline", "--split", "s.parquet", "--out", tmp_path / "p.h5ad", "control", "no-store")
    assert done.code == 2
    assert "no-store" in done.err


def test_no_words_show_the_help(run_cli):
    done = run_cli("baseline")
    assert "perturbdiff baseline [OPTIONS] NAME STORE" in " ".join((done.out + done.err).split())
