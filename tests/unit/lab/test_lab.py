"""The lab's index names every script and page in it, and every script still imports what it uses."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

LAB = Path(__file__).parents[3] / "lab"
SCRIPTS = sorted(path.stem for path in LAB.glob("*.py"))


def test_the_index_names_every_script_and_page():
    index = (LAB / "README.md").read_text()
    here = [path.name for path in LAB.iterdir() if path.suffix in (".py", ".md") and path.name != "README.md"]
    assert [name for name in here if name not in index] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_import(name):
    module = importlib.import_module(name)
    assert callable(module.main)
