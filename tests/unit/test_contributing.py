"""The recipes of CONTRIBUTING.md work as they are written; the files that guides and decisions name are there.

A recipe is carried out in a copy of the checkout: "In `FILE`, below `TEXT`" (or above; each: every such line) and the
block after it, "In `FILE`, `OLD` becomes `NEW`", "New file `FILE`". What stands under "Check:" is then run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_store import small_store

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^### (Add .*?)\n(.*?)(?=^##)", PAGE, re.M | re.S))
BLOCK = r"[^`\n]*(?:`[^`\n]*`[^`\n]*)*:\n\n```\w*\n(?P<block>.*?)^```"
STEP = re.compile(
    r"In `(?P<file>[^`]+)`, (?P<where>above|below)(?P<each> each)? `(?P<anchor>.+?)`(?=[:,])" + BLOCK
    + r"|In `(?P<changed>[^`]+)`, `(?P<old>.+?)` becomes `(?P<new>.+?)`\."
    + r"|New file `(?P<made>[^`]+)`:\n\n```\w*\n(?P<text>.*?)^```",
    re.M | re.S,
)  # fmt: skip
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
GUIDES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *DECISIONS]
LEFT_OUT = {".git", ".cache", ".venv", ".nextflow", "work", "demo", "results"}


def carry_out(recipe: str, copy: Path) -> int:
    """Apply the steps of a recipe; return how many there were."""
    steps = list(STEP.finditer(recipe))
    for step in steps:
        if step["made"]:
            assert not (copy / step["made"]).exists()
            (copy / step["made"]).write_text(step["text"])
        elif step["changed"]:
            path = copy / step["changed"]
            assert path.read_text().count(step["old"]) == 1, step[0]
            path.write_text(path.read_text().replace(step["old"], step["new"]))
        else:
            insert(copy / step["file"], step)
    return len(steps)


def insert(path: Path, step: re.Match[str]) -> None:
    lines = path.read_text().splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if step["anchor"] in line]
    assert places, step[0]
    for i in reversed(places if step["each"] else places[:1]):
        lines.insert(i + (step["where"] == "below"), step["block"])
    path.write_text("".join(lines))


def left_out(folder: str, names: list[str]) -> set[str]:
    return LEFT_OUT & set(names) if Path(folder) == ROOT else set()


@dataclass(frozen=True)
class Outcome:
    steps: int
    code: str
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    """What came of each recipe: all are carried out in one copy of the checkout, then their checks run side by side."""
    copy = tmp_path_factory.mktemp("checkout") / "perturbdiff"
    shutil.copytree(ROOT, copy, ignore=left_out)
    made = small_store(tmp_path_factory.mktemp("small"))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(copy),
        "NUMBA_DISABLE_JIT": "1",  # what a recipe changes would be compiled anew, for longer than it runs
        "STORE": str(made.store),
        "SPLIT": str(made.split),
    }
    steps, codes = {}, {}
    for name, recipe in RECIPES.items():
        words, _, check = recipe.partition("\nCheck:\n")
        steps[name] = carry_out(words, copy)
        [codes[name]] = re.findall(r"^```bash\n(.*?)^```", check, re.M | re.S)

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euo", "pipefail", "-c", code]
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(run, codes.values()))
    return {name: Outcome(steps[name], codes[name], one) for name, one in zip(RECIPES, done, strict=True)}


def test_there_are_five_recipes():
    assert [name.split()[-1] for name in RECIPES] == ["metric", "baseline", "covariate", "preset", "process"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_works(name, outcomes):
    found = outcomes[name]
    said = len(re.findall(r"(?:In|New file) `[^`]+`[,:]", RECIPES[name]))
    assert found.steps == said > 0, "a step is not written as the others are"
    assert found.done.returncode == 0, f"{found.code}\n{found.done.stdout}\n{found.done.stderr}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.stem)
def test_every_file_named_is_there(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    new = set(re.findall(r"New file `([^`]+)`", text))
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|nf|toml|json|config|lock))`", text)
    assert [name for name in named if name not in {*new, "n/a"} and not (ROOT / name).exists()] == []


def test_the_tree_is_the_import_contract():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [set(line.split(" | ")) for line in reversed(contract["layers"])]
    told = re.findall(r"^\| (\d+) \| `perturbdiff/(\w+)", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    assert [int(n) for n, _ in told] == sorted(int(n) for n, _ in told)
    by_layer = [{name for n, name in told if int(n) == i} for i in range(1, len(layers) + 1)]
    assert by_layer[:-1] == layers[:-1]
    assert layers[-1] == {"__main__"}
