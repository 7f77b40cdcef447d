"""The tutorials run as they stand, and what the site shows of them is what they say today."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import nbformat
import notebooks
import pytest

from perturbdiff import datasets
from perturbdiff.runtime.errors import UserError

SOURCES = notebooks.sources()
IDS = [source.stem for source in SOURCES]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _kept(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_every_notebook_has_a_source():
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == set(IDS)


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_a_notebook_says_what_its_source_says(source):
    kept, fresh = _kept(source), notebooks.cells(source)
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == [
        (cell.cell_type, cell.source) for cell in fresh.cells
    ], f"{source.name} has changed: run 'make notebooks'"


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_a_notebook_holds_outputs_and_nothing_of_a_machine(source):
    kept = _kept(source)
    assert list(notebooks.faults(kept)) == []
    assert sum(bool(cell.get("outputs")) for cell in kept.cells) >= 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("saved to /home/me/out", "depends on the machine"),
        ("done in 3.1 s", "depends on the machine"),
        ("<object at 0x7f00aabbcc>", "depends on the machine"),
        ("UserWarning: careful", "depends on the machine"),
    ],
)
def test_faults_are_found(text, why):
    output = nbformat.v4.new_output("stream", name="stdout", text=text)
    cell = nbformat.v4.new_code_cell("1", outputs=[output])
    assert [why in fault for fault in notebooks.faults(nbformat.v4.new_notebook(cells=[cell]))] == [True]


def test_large_missing_and_undescribed_figures_and_words_on_stderr_are_faults():
    picture = base64.b64encode(bytes(notebooks.LARGEST_FIGURE + 1)).decode()
    outputs = [
        nbformat.v4.new_output("execute_result", data={"text/plain": "<Figure size 640x480>"}),
        nbformat.v4.new_output("display_data", data={"image/png": picture}),
        nbformat.v4.new_output("stream", name="stderr", text="hm"),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=outputs)])
    assert len(list(notebooks.faults(notebook))) == 4


def _shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return what each cell shows: texts, and 'figure' for a picture."""
    shown = []
    for cell in notebook.cells:
        texts = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts.append(
                "figure" if "image/png" in data else str(output.get("text", data.get("text/plain", "")))
            )
        shown.append(texts)
    return shown


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_a_tutorial_runs_and_shows_what_the_notebook_shows(source, tmp_path, quick_program, monkeypatch):
    for name in notebooks.data_sets(source):
        try:
            datasets.find(name)
        except UserError as missing:
            pytest.skip(str(missing))
    monkeypatch.setenv("PATH", f"{quick_program}:{os.environ['PATH']}")
    monkeypatch.setattr("sys.argv", ["notebooks", source.stem, "--out", str(tmp_path)])
    assert notebooks.main() == 0
    fresh = nbformat.read(tmp_path / f"{source.stem}.ipynb", as_version=4)
    for now, kept in zip(_shown(fresh), _shown(_kept(source)), strict=True):
        assert [NUMBER.sub("#", text).split() for text in now] == [
            NUMBER.sub("#", text).split() for text in kept
        ]
        for a, b in zip(NUMBER.findall(" ".join(now)), NUMBER.findall(" ".join(kept)), strict=True):
            # another kind of processor may give slightly different numbers
            assert abs(float(a) - float(b)) <= 0.1 + 0.1 * abs(float(b))
