"""Run the tutorials, docs/tutorials/NAME.py, and keep what they print and draw in NAME.ipynb beside them.

    python docs/hooks/notebooks.py [NAME …] [--out FOLDER]

The Python files are the source: change these, and never a notebook. A notebook runs in an empty folder. It has to end
without an error and with nothing on stderr but what our commands find in scores. What it keeps may not depend on this
machine.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "tutorials"
LARGEST = 400_000
LARGEST_FIGURE = 100_000
_SECONDS = 600  # for a cell
_DATASET = re.compile(r"""datasets\.find\(\s*["']([\w-]+)["']""")
_STYLE = """
figure.dpi: 90
figure.figsize: 4.6, 3.4
savefig.dpi: 90
figure.constrained_layout.use: True
axes.spines.top: False
axes.spines.right: False
legend.frameon: False
"""


def sources() -> list[Path]:
    """Return the tutorials' files."""
    return sorted(FOLDER.glob("*.py"))


def data_sets(source: Path) -> list[str]:
    """Return the registered data sets that a tutorial reads."""
    return sorted(set(_DATASET.findall(source.read_text())))


def cells(source: Path) -> NotebookNode:
    """Return the notebook of a tutorial without outputs. Nothing in it depends on when it was made."""
    notebook = jupytext.read(source)
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", NotebookNode()
    return notebook


def executed(source: Path) -> NotebookNode:
    """Return the notebook of a tutorial with its outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails.
    """
    notebook = cells(source)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "matplotlibrc").write_text(_STYLE)
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        client = NotebookClient(
            notebook,
            timeout=_SECONDS,
            startup_timeout=_SECONDS,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            extra_arguments=["--IPKernelApp.log_level=40"],  # errors alone
        )
        client.execute(env=environment)
    notebook.metadata.language_info = NotebookNode(name="python")
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        _leave_out_findings(cell)
        for output in cell.get("outputs", []):
            output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    return notebook


def _leave_out_findings(cell: NotebookNode) -> None:
    """Leave out what our commands and functions find in scores: the lines may carry the time of day."""
    told = "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stderr")
    if told and all(_FINDING.match(line) for line in told.splitlines()):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


_FINDING = re.compile(r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING|warning:) [\w-]+: |$")


def faults(notebook: NotebookNode) -> Iterator[str]:
    """Yield what should not be in a notebook: words on stderr, what depends on the machine, large outputs."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" or output.output_type == "error":
                yield f"an output on stderr: {output.get('text', output.get('evalue', ''))[:200]}"
            picture = output.get("data", {}).get("image/png", "")
            if (size := len(base64.b64decode(picture))) > LARGEST_FIGURE:
                yield f"a figure of {size} bytes"
            if picture and "# alt: " not in cell.source:
                yield "a figure whose cell has no comment '# alt: …' that says what it shows"
            shown = str(output.get("data", {}).get("text/plain", ""))
            if shown.startswith("<Figure") and not picture:
                yield "a figure that is not shown"
            text = str(output.get("text", "")) + shown
            for found in _OF_THE_MACHINE.findall(text):
                yield f"depends on the machine: {found!r}"
    if (size := len(as_text(notebook))) > LARGEST:
        yield f"a notebook of {size} bytes"


_OF_THE_MACHINE = re.compile(
    rf"/(?:home|tmp|root|work|usr|var|mnt|scratch)/\S*|{re.escape(os.uname().nodename)}|0x[0-9a-f]{{6,}}"
    r"|\d+(?:\.\d+)? ?(?:s|sec|seconds|minutes|it/s)\b|[Ww]arning"
)


def as_text(notebook: NotebookNode) -> str:
    """Return the file of a notebook."""
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    """Run the tutorials that are named, or all, and write the notebooks."""
    parser = argparse.ArgumentParser(description="Run the tutorials and keep their outputs.")
    parser.add_argument("names", nargs="*", help="such as score-predictions; default: all")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    code = 0
    for source in sources():
        if options.names and source.stem not in options.names:
            continue
        notebook = executed(source)
        for fault in faults(notebook):
            print(f"{source.name}: {fault}", file=sys.stderr)
            code = 1
        place = options.out / f"{source.stem}.ipynb"
        place.write_text(as_text(notebook))
        print(f"{place}: {place.stat().st_size // 1000} kB")
    return code


if __name__ == "__main__":
    sys.exit(main())
