"""The generated reference holds every command, setting, metric and data set, as the package itself has it."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
import reference
import yaml
from typer.testing import CliRunner

import perturbdiff
from perturbdiff.cli.main import app
from perturbdiff.config import recipes
from perturbdiff.datasets import registered
from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.metrics.differential import DEFINITIONS

KEYS = list(recipes.keys())
PAGES = reference.generated()
SINGLE, COMMANDS, CONFIGURATION = PAGES[""], PAGES["commands"], PAGES["configuration"]


def _help(*words: str) -> str:
    return CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output


def _listed(text: str) -> list[str]:
    """Return the names below the heading 'Commands' of a help text."""
    _, _, below = text.partition("Commands:\n")
    return re.findall(r"^  (\S+)  ", below, re.M)


NAMES = _listed(_help())


def test_there_is_a_page_for_every_command_in_the_order_of_the_help():
    assert len(NAMES) > 10
    assert [name for name in COMMANDS if name != "index"] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_option_and_sub_command_that_the_help_names(name):
    title, page = COMMANDS[name]
    assert title == name
    texts = {name: _help(name), **{f"{name} {sub}": _help(name, sub) for sub in _listed(_help(name))}}
    for words, text in texts.items():
        assert words == name or f"`perturbdiff {words}`" in page
        options = set(re.findall(r"(?<!\w)--[a-z][\w-]*", text.partition("Options:\n")[2])) - {"--help"}
        assert [option for option in sorted(options) if option not in page] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_examples_of_the_help(name):
    page = COMMANDS[name][1]
    for text in (_help(name), *(_help(name, sub) for sub in _listed(_help(name)))):
        typed = re.findall(r"^ +((?:perturbdiff|nextflow) .*)$", text, re.M)
        assert [line for line in typed if line.strip() not in page] == []


def test_defaults_and_required_options_are_told():
    rows = {
        row.split("|")[1].strip(): row for row in COMMANDS["simulate"][1].splitlines() if row[:3] == "| `"
    }
    assert rows["`-o, --out PATH`"].endswith("| required |")
    shard = next(row for row in COMMANDS["evaluate"][1].splitlines() if "`--shard I/N`" in row)
    assert shard.endswith("| `0/1` |")


def test_examples_of_a_help_become_blocks_of_code():
    import command_pages

    text = "Do it.\n\nExamples:\n\n\b\n  perturbdiff do this\n  $ perturbdiff do --that"
    assert (
        "\n".join(command_pages._text(text)).split("```")[1]
        == "bash\nperturbdiff do this\nperturbdiff do --that\n"
    )


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_has_a_meaning_and_the_default_of_the_default_recipe(key):
    section = key.split(".")[0] if "." in key else "index"
    _, _, block = CONFIGURATION[section][1].partition(f"`{key}` {{ #{key} }}\n")
    meaning, *facts = [line for line in block.partition("\n#")[0].splitlines() if line]
    assert meaning[0].isupper() or not meaning[0].isalpha()
    assert meaning.endswith((".", "?"))
    assert facts[0].startswith("- **Values:** ")
    if key in ("name", "variant", "description"):
        return
    told = facts[1].removeprefix("- **Default:** ").split(";")[0]
    value = recipes.load()
    for name in key.split("."):
        value = getattr(value, name)
    plain = {"none": None, "empty": type(value)()}
    expected = list(value) if isinstance(value, tuple) and told != "empty" else value
    assert (plain[told] if told in plain else yaml.safe_load(told.strip("`"))) == expected


def test_variants_are_compared():
    page = SINGLE["variants"][1]
    assert (
        "| [`model.anchor`](configuration/model.md#model.anchor) | `transferred` | `none` | `none` |" in page
    )
    assert page.count("\n| [`") == sum(block.count("**Variants:**") for _, block in CONFIGURATION.values())


@pytest.mark.parametrize("name", recipes.presets())
def test_every_preset_is_described(name):
    assert f"| [`{name}`](#{name}) | " in SINGLE["presets"][1]
    assert f"\n## `{name}` {{ #{name} }}\n" in SINGLE["presets"][1]


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_described_as_it_is(name):
    metric = METRICS[name]
    page = re.sub(r"\\(?=[\\|*_<>])", "", SINGLE["metrics"][1])
    block = page.partition(f"\n### `{name}` {{ #{name} }}\n")[2].partition("\n#")[0]
    assert metric.formula[1:] in block
    assert metric.undefined[1:] in block
    assert metric.chance[1:] in block
    coupled = [release for release, d in DEFINITIONS.items() if metric.is_coupled(d)]
    said = "always" if len(coupled) == len(DEFINITIONS) else "no"
    if 0 < len(coupled) < len(DEFINITIONS):
        said = f"only in the definitions {' and '.join(coupled)}"
    assert f"- **Coupled:** {said}\n" in block
    assert f"| [`{name}`](#{name}) | {metric.label} |" in page


@pytest.mark.parametrize("name", registered())
def test_every_data_set_is_described(name):
    block = SINGLE["datasets"][1].partition(f"\n## `{name}` {{ #{name} }}\n")[2].partition("\n## ")[0]
    known = registered()[name]
    assert (known.sha256 or known.md5 or "no sum is published") in block
    assert known.source in block
    assert all(f"| `{column}` |" in block for column in registered()[name].columns)


def test_a_folder_in_the_navigation_becomes_its_pages():
    nav = [{"Reference": ["reference/index.md", {"Commands": "reference/commands/"}]}]
    pages = [{"train": "reference/commands/train.md"}]
    assert reference._expanded(nav, {"reference/commands/": pages}) == [
        {"Reference": ["reference/index.md", {"Commands": pages}]}
    ]


def test_the_site_has_the_generated_pages_and_an_anchor_for_every_setting(site):
    folder = site / "reference"
    for name in NAMES:
        assert f"perturbdiff {name}" in _read(folder / "commands" / f"{name}.html")
    for key in KEYS:
        section = key.split(".")[0] if "." in key else "index"
        assert f'id="{key}"' in (folder / "configuration" / f"{section}.html").read_text(), key
    python = (folder / "python.html").read_text()
    public = [name for name in perturbdiff.__all__ if not name.startswith("_")]
    assert [name for name in public if f'id="perturbdiff.{name}"' not in python] == []


def test_choices_are_shown_without_a_backslash(site):
    assert "--resume <auto|never>" in _read(site / "reference" / "commands" / "train.html")


def _read(page: Path) -> str:
    """Return the text that a page shows."""
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text()))
