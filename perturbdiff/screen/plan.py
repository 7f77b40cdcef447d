"""The plan for one screen: a recipe with every decision and its reason, and the samplesheet of the workflow."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.runtime import files, outputs, provenance
from perturbdiff.runtime.errors import UserError, one_line
from perturbdiff.screen.held_out import HeldOut, hold_out
from perturbdiff.screen.screen import Screen, look_at
from perturbdiff.splits.split_rules import by_rule

if TYPE_CHECKING:
    from anndata import AnnData

RECIPE, SHEET = "recipe.yaml", "samplesheet.csv"
MODEL = "perturbdiff"
"""Name of the model in tables and files."""

_COLUMNS = (
    "perturbation_key", "control", "cell_type_key", "batch_key", "dose_key", "layer", "gene_key", "keep",
    "duplicate_genes", "gene_aliases",
)  # fmt: skip
_KNOWN = {"cell_type", "batch"}  # columns of a table of conditions that can be held out
_MEASURED_SIZE = (64, 2)  # width and depth of the default recipe
_SECONDS = 1e-4, 8.5e-8  # of training such a network on one core, for a cell and for each of its genes
_SHEET_COLUMNS = ("id", "dataset", "input", "preset", "mode", "init", "overrides", "split", "obs", "seed")


@dataclass(frozen=True)
class Plan:
    """What is going to be done with one screen.

    Attributes
    ----------
    source
        The file or folder; for an AnnData in memory the name alone.
    obs
        Table of cell labels, or None.
    screen
        What the file holds.
    lines
        What was decided and why, for the log.
    recipe
        Text of the recipe, YAML.
    seed
        The run's seed.
    """

    source: Path
    obs: Path | None
    screen: Screen
    lines: tuple[str, ...]
    recipe: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the data set in tables and in the samplesheet."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.screen.name).strip("-._") or "screen"

    def sheet(self, folder: Path) -> str:
        """Return the samplesheet with one run, for a folder that also holds the recipe."""
        row = {
            "id": MODEL, "dataset": self.name, "input": _cell(self.source, folder), "preset": RECIPE,
            "mode": "train", "obs": _cell(self.obs, folder) if self.obs else "", "seed": str(self.seed),
        }  # fmt: skip
        return f"{','.join(_SHEET_COLUMNS)}\n{','.join(row.get(column, '') for column in _SHEET_COLUMNS)}\n"

    def write(self, folder: Path) -> Path:
        """Write the recipe and the samplesheet into a folder. Return the recipe's path.

        Raises
        ------
        UserError
            If another file is there, or a recipe that was changed since it was written.
        """
        recipe = folder / RECIPE
        check_unedited(recipe)
        with provenance.stage(
            "init",
            recipe,
            config={"recipe": self.recipe, "sheet": hashlib.sha256(self.sheet(folder).encode()).hexdigest()},
            inputs={},
            companions={"sheet": folder / SHEET},
        ) as stage:
            if not stage.skip:
                stage.path.write_text(self.recipe, encoding="utf-8")
                stage.companions["sheet"].write_text(self.sheet(folder), encoding="utf-8")
        return recipe


def _cell(path: Path, folder: Path) -> str:
    """Return a path as a cell of the sheet in ``folder``: in quotes, and relative if it lies inside."""
    inside = path.absolute().is_relative_to(folder.absolute())
    place = path.absolute().relative_to(folder.absolute()) if inside else path.absolute()
    return '"{}"'.format(str(place).replace('"', '""'))


def check_unedited(recipe: Path) -> None:
    """Raise a `UserError` if a recipe or its samplesheet was changed since it was written, so that no edit is lost."""
    written = (outputs.read_manifest(recipe) or {}).get("files", {})
    advice = {".": f"use it with --config {recipe}", "sheet": "give it to the workflow (--input)"}
    for name, path in ((".", recipe), ("sheet", recipe.with_name(SHEET))):
        if path.is_file() and name in written and files.sha256(path) != written[name].get("sha256"):
            raise UserError(
                f"{path}: was edited since it was written, and is not replaced; {advice[name]}, or choose another --out"
            )


def plan_screen(
    source: Path | AnnData,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, str | None] | None = None,
    obs: Path | None = None,
    seed: int | None = None,
    has_split: bool = False,
) -> Plan:
    """Decide everything for one screen.

    Parameters
    ----------
    source
        A file or folder that `perturbdiff.io` reads, or an AnnData in memory.
    recipe, overrides
        Preset or YAML file, and changes to it. What they say of columns and of the split is taken.
    given
        What else the user said, by field of `DataConfig`; see `look_at`.
    obs
        Table of cell labels.
    seed
        Seed of the run; default: the recipe's.
    has_split
        Whether it is settled what is held out, so that nothing is chosen.

    Raises
    ------
    UserError
        If the file cannot be read, or one that lists everything that has to be fixed.
    """
    config, sources = recipes.load_with_sources(recipe, overrides)
    known = {key: getattr(config.data, key) for key in _COLUMNS if f"data.{key}" in sources}
    if sources.get("data.input_scale") == "given":
        known["input_scale"] = config.data.input_scale
    known = {
        key: value
        for key, value in known.items()
        if value is not None or key.endswith(("type_key", "batch_key"))
    }
    screen = look_at(source, {**known, **(given or {})}, obs)
    screen.check()
    settled = HeldOut({}, ("held out: as the split says",))
    held = settled if has_split else _held_out(screen, config, sources)
    settings = {f"data.{key}": value for key, value in screen.data.items()} | held.settings
    if "data.missing_labels" in sources:
        settings["data.missing_labels"] = config.data.missing_labels
    seed = config.seed if seed is None else seed
    lines = (*screen.lines(), *held.why, training_line(screen, config))
    place = source if isinstance(source, Path) else Path(screen.name)
    return Plan(place, obs, screen, lines, _text(recipe, config, screen, held, settings, seed), seed)


def _held_out(screen: Screen, config: Config, sources: Mapping[str, str]) -> HeldOut:
    """Choose what to hold out, unless the recipe says it."""
    by_label = screen.data.get("dose_key") is None
    own = {screen.data["cell_type_key"]: "cell_type", screen.data["batch_key"]: "batch"}
    column = own.get(config.split.context_column, config.split.context_column)
    if "split.held_out" not in sources and "split.num_held_out" not in sources:
        if "split.context_column" in sources and column in _KNOWN:
            return hold_out(screen.conditions, columns=[column], by_label=by_label)
        return hold_out(screen.conditions, by_label=by_label)
    if column in _KNOWN and config.split.choose != "pca" and by_label:
        table = screen.conditions.assign(context=screen.conditions[column])
        try:
            by_rule(table, config.split, config.seed, lambda names: np.zeros((len(names), 1)))
        except UserError as error:
            raise UserError(
                f"{screen.shown}: {error}: change split.* in the recipe, or leave it out"
            ) from None
    scored = {"evaluate.context_column": "batch"}
    settings = scored if column == "batch" and "evaluate.context_column" not in sources else {}
    return HeldOut(settings, ("held out: as the recipe says",))


def training_line(screen: Screen, config: Config) -> str:
    """Say how long training will be: its steps, and minutes where the network has the size of the default recipe."""
    train, model = config.train, config.model
    counts = screen.conditions["n_cells"].to_numpy(np.float64)
    if not train.control_targets:
        counts = counts[~screen.conditions["is_control"].to_numpy(bool)]
    step = train.set_size * train.sets_per_step
    steps = train.max_steps
    if train.max_epochs is not None:
        # every condition fills its last set with repeats, and a twin of a set is drawn anew
        sets = np.ceil(counts / train.set_size).sum() * (2 if config.loss.mmd_statistic == "cross" else 1)
        steps = min(steps, max(train.min_steps, round(train.max_epochs * sets / train.sets_per_step)))
    line = f"training takes up to {steps:,} steps of {step} cells"
    if (model.width, model.depth) > _MEASURED_SIZE:
        return line
    genes = min(config.data.num_hvgs or screen.n_genes, screen.n_genes)
    minutes = steps * step * (_SECONDS[0] + genes * _SECONDS[1]) / 60
    return f"{line}, about {max(1, round(minutes))} min on one free CPU core"


def _text(
    recipe: str | None, config: Config, screen: Screen, held: HeldOut, settings: Mapping[str, Any], seed: int
) -> str:
    """Return the recipe as YAML with a comment for each decision."""
    source = recipe or recipes.DEFAULT
    preset = source in recipes.presets()
    plain = recipes.load(source) if preset else Config()
    every = list(recipes.keys())
    changes = {
        key: _value(config, key)
        for key in every
        if "." in key and _value(config, key) != _value(plain, key) and key not in settings
    }
    reasons = {guess.key: guess.why for guess in screen.guesses}
    reasons["data.missing_labels"] = f"{screen.without_label} cells lack a label"
    if "split.held_out" in held.settings:
        reasons["split.held_out"] = held.why[0].removeprefix("held out: ")
    tree: dict[str, dict[str, Any]] = {}
    for key, value in {**settings, **changes}.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    lines = [
        f"# Made by perturbdiff from {one_line(Path(screen.shown).name)}.",
        "# Change what is wrong, and use it with --config.",
        *([f"base: {source}"] if preset else []),
        f"name: {_yaml(screen.name)}",
        f"seed: {seed}",
    ]
    for section, values in tree.items():
        lines.append(f"{section}:")
        for name, value in values.items():
            reason = reasons.get(f"{section}.{name}")
            lines.append(f"  {name}: {_yaml(value)}{f'  # {one_line(reason)}' if reason else ''}")
    return "\n".join(lines) + "\n"


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...").strip()
