"""Commands in the manual exist, with their options, settings, presets, parameters and targets of make."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from perturbdiff.cli.baseline_commands import methods
from perturbdiff.cli.main import app
from perturbdiff.config import recipes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(?:bash|console|sh|text)\n(.*?)^ *```", re.M | re.S)
INLINE = re.compile(r"`(perturbdiff [a-z-]+ [^`\n]+)`")
PROGRAM = typer.main.get_command(app)
KEYS = set(recipes.keys())
FREE = ("baseline.options.", "variant", "size")
PARAMETERS = {
    name
    for group in json.loads((ROOT / "nextflow_schema.json").read_text())["$defs"].values()
    for name in group["properties"]
}


def commands(page: Path, program: str) -> list[list[str]]:
    """Return the words of each call of a program in the blocks of a page, without what is piped or follows."""
    text = page.read_text()
    lines = "\n".join([*FENCE.findall(text), *INLINE.findall(text)]).replace("\\\n", " ").splitlines()
    calls = []
    for line in lines:
        for call in re.findall(
            rf"(?<![\w/.-]){re.escape(program)} (?=[\w-])[^|;&]*", re.sub(r"(^|\s)#.*", "", line)
        ):
            try:
                calls.append(shlex.split(call)[len(program.split()) :])
            except ValueError:
                continue  # a piece of a quoted program
    return calls


def problems(words: list[str]) -> list[str]:
    """Return what perturbdiff would not understand of a call."""
    command, found = PROGRAM, []
    if words[:1] == ["baseline"] and words[1] in methods():
        words = ["baseline", "predict", *words[2:]]  # the hidden command that a method's name stands for
    while (inner := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        if words[0] not in inner:
            return [] if words[0].isupper() or "…" in words[0] else [f"no command '{words[0]}'"]
        command, words = inner[words[0]], words[1:]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    for i, word in enumerate(words):
        if word.startswith("--") and word.partition("=")[0].rstrip("…") not in known | {"--"}:
            found.append(f"no option {word}")
        if word == "--set" and (key := words[i + 1].partition("=")[0]) not in KEYS and "." in key:
            found += (
                [f"no setting {key}"] if key.islower() and not key.startswith(FREE) and "…" not in key else []
            )
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page):
    wrong = {" ".join(words): problems(words) for words in commands(page, "perturbdiff")}
    assert {call: found for call, found in wrong.items() if found} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_parameters_of_the_workflow_exist(page):
    calls = commands(page, "nextflow run main.nf") + commands(page, "$(bin/get-nextflow) run main.nf")
    given = {word.partition("=")[0][2:] for words in calls for word in words if word.startswith("--")}
    assert sorted(given - PARAMETERS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = {words[0] for words in commands(page, "make") if words}
    asked |= set(re.findall(r"`make ([a-z-]+)`", page.read_text()))
    assert sorted(asked - targets) == []


def test_a_mistake_would_be_found():
    assert problems(["trian", "store"]) == ["no command 'trian'"]
    assert problems(["train", "store", "--epochs", "3"]) == ["no option --epochs"]
    assert problems(["train", "store", "--set", "train.max_step=3"]) == ["no setting train.max_step"]
    assert problems(["store", "check", "store", "--quick"]) == []
    assert commands(ROOT / "docs" / "usage.md", "perturbdiff")
