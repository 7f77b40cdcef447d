"""Commands, processes, schemas and configuration speak of the same things; no Nextflow is started."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from perturbdiff.baselines import NAMES
from perturbdiff.baselines.external import known_tools
from perturbdiff.baselines.simple import BASELINES
from perturbdiff.cli.main import app
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "modules" / "local").glob("*.nf"))
SCRIPTS = [
    ROOT / "main.nf",
    *sorted(p for f in ("modules", "subworkflows") for p in (ROOT / f).rglob("*.nf")),
]


def options(command: Any) -> set[str]:
    """Options of a command and of its hidden one: `baseline NAME` is a command that has others beside it."""
    hidden = [other for other in getattr(command, "commands", {}).values() if other.hidden]
    return {option for one in (command, *hidden) for p in one.params for option in p.opts}


COMMANDS: dict[str, set[str]] = {
    name: options(command)
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}


for group, command in (("vocabulary", "build"), ("data", "get"), ("data", "check")):
    name = group if group == "vocabulary" else f"{group} {command}"
    COMMANDS[name] = options(typer.main.get_command(app).commands[group].commands[command])  # type: ignore[attr-defined]
STAGE = {
    "external": "baseline",
    "import": "import-checkpoint",
    "fetch": "data get",
    "check": "data check",
}
"""Commands of modules that have other names."""


@pytest.mark.parametrize("module", MODULES, ids=lambda p: p.stem)
def test_each_process_is_one_command_with_known_options(module):
    text = module.read_text()
    calls = re.findall(r"^ *(?:perturbdiff|pd-launch) ([a-z].*)$", text, re.MULTILINE)
    assert len(calls) == 1, "a process script is one command"
    name = STAGE.get(module.stem, module.stem)
    assert calls[0].split()[: len(name.split())] == name.split()
    # options are given in the call or in the definitions above it
    given = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", text)) - {"--version"}
    assert given <= COMMANDS[name]
    for part in ("tag ", "stub:", "versions.yml") if module.stem != "report" else ("stub:", "versions.yml"):
        assert part in text
    assert len(re.findall(r"^    label ", text, re.MULTILINE)) >= 2


def test_every_data_command_has_a_process():
    assert {STAGE.get(m.stem, m.stem) for m in MODULES} <= set(COMMANDS)
    assert {
        "simulate",
        "preprocess",
        "split",
        "stats",
        "pretrain",
        "train",
        "finetune",
        "sample",
        "baseline",
    } <= {m.stem for m in MODULES}


BY_RECIPE = {
    "--set": "overrides", "--config": "overrides", "--pert-col": "data.perturbation_key", "--control": "data.control",
    "--cell-type-col": "data.cell_type_key", "--batch-col": "data.batch_key", "--set-col": "data.set_key",
    "--keep-every": "train.keep_every", "--values": "sample.values", "--definition": "evaluate.definition",
    "--metrics": "evaluate.metrics", "--context-col": "evaluate.context_column", "--missing": "evaluate.missing",
    "--replicate-col": "evaluate.replicate_column", "--predicted-controls": "evaluate.controls",
    "--scale": "evaluate.scale", "--top": "data.num_hvgs", "--cells": "simulate.cells",
}  # fmt: skip
"""Options that set a key of the recipe, which a row's overrides can set as well."""

EXCEPTIONS = {
    "--force": "the workflow decides what is made again (-resume)",
    "--resume": "to start a training afresh, delete its folder in --ckpt_dir",
    "--reference": "the references of a ceiling are compared by CALIBRATE",
    "--cover": "further rows of a table that no other stage reads",
    "--keep": "the working folder of an external method is its task's work folder",
    "--name": "evaluate names each method by its row",
    "--pairs": "of the statistics page alone: perturbdiff stats on the published store",
    "--cells-per-group": "as --pairs",
    "stats --seed": "as --pairs",
    "calibrate --shard": "a calibration is one task",
    "--experiment": "a sheet's data are checked one by one",
    "--prior": "lists of genes are compared when the sheet is read, and by FINETUNE",
    "--unfinished": "PD_UNFINISHED, a folder in --ckpt_dir",
}
"""Options that no row and no parameter reaches, and why."""


def test_every_option_of_a_stage_is_reachable():
    config = (ROOT / "conf" / "modules.config").read_text()
    rows = json.loads((ROOT / "assets" / "schema_input.json").read_text())["items"]["properties"]["options"]
    keys = {*recipes.keys(), "overrides"}
    assert {key for key in BY_RECIPE.values() if key not in keys} == set()
    said: dict[str, set[str]] = {}
    for module in MODULES:
        text = module.read_text()
        here = set(re.findall(r"--[a-z][a-z-]*", text)) | {
            f"--{name}" for name in rows["x-options"].get(module.stem, {})
        }
        here |= set(re.findall(r"--[a-z-]+", config)) if "task.ext.args" in text else set()
        if module.stem == "report":  # meta.options, and the names in `extra`
            here |= {"--title", "--against", "--figures"} | {
                f"--{name}" for name in re.findall(r"[\[ ](\w+): ", text)
            }
        said.setdefault(STAGE.get(module.stem, module.stem), set()).update(here)
    left = {
        name: {o for o in COMMANDS[name] - here - set(BY_RECIPE) if o.startswith("--")}
        for name, here in said.items()
    }
    beyond = {f"{name} {o}" for name, found in left.items() for o in found if o not in EXCEPTIONS} - set(
        EXCEPTIONS
    )
    assert not beyond, "no row and no parameter reaches them"
    unused = set(EXCEPTIONS) - {
        word for name, found in left.items() for o in found for word in (o, f"{name} {o}")
    }
    assert not unused


def test_parameters_are_those_of_the_schema():
    schema = json.loads((ROOT / "nextflow_schema.json").read_text())
    described = {name for group in schema["$defs"].values() for name in group["properties"]}
    text = (ROOT / "nextflow.config").read_text()
    block = re.search(r"^params \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    defaults = re.findall(r"^    (\w+) +=", block[1], re.MULTILINE) + re.findall(
        r"^params\.(\w+) +=", text, re.MULTILINE
    )
    assert sorted(defaults) == sorted(described)
    assert [ref["$ref"].split("/")[-1] for ref in schema["allOf"]] == list(schema["$defs"])
    scripts = "".join(p.read_text() for p in [*SCRIPTS, *(ROOT / "conf").iterdir()])
    used = re.findall(r"\b(?:params|given)\.(\w+)\b(?! ?[({])", scripts)  # not of methods
    assert {"outdir", "evaluation_seed"} < set(used)
    assert set(used) <= described


def test_the_workflow_fits_a_screen():
    assert len((ROOT / "main.nf").read_text().splitlines()) < 120
    for path in (*SCRIPTS, ROOT / "nextflow.config", *(ROOT / "conf").iterdir()):
        assert max(map(len, path.read_text().splitlines())) <= 120, path


def literal(text: str):
    """A value of a configuration file as JSON has it; None for what is computed."""
    text = re.sub(r"\s*//.*", "", text).removesuffix(",").strip()
    text = text.split(" ?: ", 1)[-1]
    if re.fullmatch(r"'[^']*'", text):
        return text[1:-1]
    return json.loads(text) if re.fullmatch(r"true|false|-?\d+(\.\d+)?", text) else None


@pytest.mark.parametrize("name", ["nextflow", "conf/test", "conf/gpu", "conf/slurm"])
def test_values_in_the_configuration_fit_the_schema(name):
    schema = json.loads((ROOT / "nextflow_schema.json").read_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    described = {key: spec for group in schema["$defs"].values() for key, spec in group["properties"].items()}
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
    text = (ROOT / f"{name}.config").read_text()
    block = re.search(r"^params \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    given = re.findall(r"^    (\w+) += (.*)$", block[1], re.M) + re.findall(
        r"^params\.(\w+) += (.*)$", text, re.M
    )
    assert given
    for key, value in given:
        spec, found = described[key], literal(value)
        assert set(spec) <= {
            "type", "description", "format", "exists", "enum", "x-choices", "minimum", "exclusiveMinimum",
            "exclusiveMaximum", "maximum", "pattern", "x-allowed", "hidden",
        }, key  # fmt: skip
        assert spec["description"], key
        if found is None:
            continue
        assert type(found) is kinds[spec["type"]], f"{key} = {found}"
        assert found in spec.get("enum", [found]), f"{key} = {found}"
        assert found >= spec.get("minimum", found), f"{key} = {found}"
        assert found <= spec.get("maximum", found), f"{key} = {found}"
        assert re.search(spec.get("pattern", ""), str(found)), f"{key} = {found}"


def test_modes_and_baselines_are_the_packages():
    modes = json.loads((ROOT / "assets" / "schema_input.json").read_text())["items"]["properties"]["mode"][
        "enum"
    ]
    makers = ("vocabulary", "embed", "import")
    assert modes == [
        "train",
        "pretrain",
        "finetune",
        "sample",
        *BASELINES,
        *known_tools.names(),
        "script",
        *makers,
    ]
    page = (ROOT / "docs" / "workflow-sheet.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `mode` |"))
    assert [mode for mode in modes if f"`{mode}`" not in row] == []
    schema = json.loads((ROOT / "nextflow_schema.json").read_text())
    assert schema["$defs"]["runs"]["properties"]["baselines"]["x-choices"] == [*NAMES, *known_tools.names()]


def test_recipe_keys_are_those_of_the_configuration():
    listed = (ROOT / "assets" / "recipe_keys.txt").read_text().splitlines()
    assert listed == sorted(recipes.keys()), (
        "write sorted(perturbdiff.config.recipes.keys()) into assets/recipe_keys.txt"
    )
    sections = re.search(
        r"def sections\(\) \{\n    return \[(.*)\]", (ROOT / "modules" / "plan" / "recipes.nf").read_text()
    )
    assert sections is not None
    assert {s.strip(" '") for s in sections[1].split(",")} == {k.split(".")[0] for k in listed if "." in k}


def test_each_setting_that_names_a_file_is_brought_to_the_tasks_or_has_a_column():
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    named = {f"{name}.{key}" for name, section in sections.items() for key, field in
             getattr(section, "model_fields", {}).items() if "file" in field.metadata}  # fmt: skip
    text = (ROOT / "modules" / "plan" / "recipes.nf").read_text()
    listed = dict(
        re.findall(r"'(\w+\.\w+)': '(\w*)'", text.partition("def fileSettings")[2].partition("}")[0])
    )
    assert set(listed) == named
    columns = json.loads((ROOT / "assets" / "schema_input.json").read_text())["items"]["properties"]
    assert {column for column in listed.values() if column} <= set(columns)
    staged = text.partition("def withStagedFiles")[2]
    assert [name for name, column in listed.items() if not column and f"'{name}'" not in staged] == []


SHEETS = [ROOT / "assets" / "samplesheet.csv", *sorted((ROOT / "assets" / "experiments").glob("*.csv"))]


@pytest.mark.parametrize("path", SHEETS, ids=lambda p: p.stem)
def test_the_sheets_that_come_along_name_what_exists(path):
    schema = json.loads((ROOT / "assets" / "schema_input.json").read_text())["items"]
    with path.open() as handle:
        rows = list(csv.DictReader(handle))
    assert rows
    for row in rows:
        assert set(row) <= set(schema["properties"])
        assert all(row[name] for name in schema["required"])
        assert row["mode"] in schema["properties"]["mode"]["enum"]
        overrides = [part.split(":")[-1] for part in (row.get("overrides") or "").split(";") if part]
        recipes.load(row.get("preset") or "recommended", overrides)  # knows the preset and takes the values
    assert len({row["id"] for row in rows}) == len(rows)


def test_the_jars_are_locked():
    rows = [line.split() for line in (ROOT / "containers" / "nextflow.lock").read_text().splitlines()[1:]]
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest, _, _ in rows)
    assert all(jar == "{1}-{2}.jar".format(*coordinate.split(":")) for _, jar, coordinate in rows)
    assert "io.nextflow:nextflow:25.04.4" in {coordinate for _, _, coordinate in rows}
