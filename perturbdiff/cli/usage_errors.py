"""What a wrong command line gets: one sentence that names the right command, option or key of the recipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import typer

from perturbdiff.cli.hints import EXAMPLES
from perturbdiff.runtime.errors import listing, nearest

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What Typer raises for a wrong command line; it has no public name of its own there."""

_PROGRAM = "perturbdiff"
_COMMANDS = {
    "prepare": "preprocess",
    "process": "preprocess",
    "fit": "train",
    "predict": "sample",
    "infer": "sample",
    "generate": "sample",
    "eval": "evaluate",
    "score": "evaluate",
    "metrics": "evaluate",
    "plot": "report",
    "html": "report",
    "info": "store info",
    "check": "store check",
    "export": "store export",
    "install": "baseline install",
    "presets": "config show",
    "recipes": "config show",
    "hvg": "vocabulary build",
}
_OPTIONS = {
    "accelerator": ("--device cuda",),
    "gpu": ("--device cuda",),
    "gpus": ("--device cuda",),
    "cuda": ("--device cuda",),
    "cpu": ("--device cpu",),
    "devices": ("--device cuda",),
    "epochs": ("train.max_epochs",),
    "num-epochs": ("train.max_epochs",),
    "n-epochs": ("train.max_epochs",),
    "steps": ("train.max_steps", "sample.num_steps"),
    "lr": ("train.learning_rate",),
    "batch-size": ("train.sets_per_step", "sample.sets_per_batch"),
    "batchsize": ("train.sets_per_step", "sample.sets_per_batch"),
    "hidden-dim": ("model.width",),
    "dim": ("model.width",),
    "layers": ("model.depth", "data.layer"),
    "num-layers": ("model.depth",),
    "n-layers": ("model.depth",),
    "dropout": ("train.drop_covariates",),
    "fp16": ("train.precision", "sample.precision"),
    "bf16": ("train.precision", "sample.precision"),
    "amp": ("train.precision", "sample.precision"),
    "early-stopping": ("train.choose",),
    "hvg": ("data.num_hvgs",),
    "hvgs": ("data.num_hvgs",),
    "n-hvg": ("data.num_hvgs",),
    "n-top-genes": ("data.num_hvgs",),
    "normalize": ("data.target_sum",),
    "log1p": ("--scale log1p", "data.input_scale"),
    "counts": ("--scale counts", "data.input_scale"),
    "test-size": ("split.train_fraction",),
    "test-fraction": ("split.train_fraction",),
    "holdout": ("split.held_out",),
    "hold-out": ("split.held_out",),
    "test-contexts": ("split.held_out",),
    "cfg": ("sample.guidance",),
    "perturbation": ("--pert-col",),
    "perturbation-col": ("--pert-col",),
    "perturbation-key": ("--pert-col",),
    "pert-key": ("--pert-col",),
    "control-label": ("--control",),
    "control-name": ("--control",),
    "ctrl": ("--control",),
    "batch": ("--batch-col",),
    "batch-key": ("--batch-col",),
    "donor-col": ("--batch-col",),
    "cell-type": ("--cell-type-col",),
    "celltype": ("--cell-type-col",),
    "celltype-col": ("--cell-type-col",),
    "cell-type-key": ("--cell-type-col",),
    "covariate": ("--context-col",),
    "output": ("--out",),
    "outdir": ("--out",),
    "output-dir": ("--out",),
    "out-dir": ("--out",),
    "outfile": ("--out",),
    "save": ("--out",),
    "preset": ("--config",),
    "recipe": ("--config",),
    "overwrite": ("--force",),
    "override": ("--set",),
    "workers": ("--jobs", "--processes", "train.loader_threads"),
    "num-workers": ("--jobs", "--processes", "train.loader_threads"),
    "n-jobs": ("--jobs", "--threads", "train.loader_threads"),
    "cores": ("--jobs", "--threads"),
    "cpus": ("--jobs", "--threads"),
    "split-file": ("--split",),
    "splits": ("--split",),
    "subset": ("--part",),
    "random-state": ("--seed",),
    "name": ("--method",),
    "title": ("--method",),
}
"""Names that other tools give to our options and keys, the first that a command has being meant."""

_VALUES = {"gpu": "cuda", "val": "valid", "validation": "valid", "testing": "test", "training": "train"}
_TRAINS = ("train", "model", "loss", "schedule", "sample")
_SECTIONS = {
    "preprocess": ("data",),
    "split": ("split", "data"),
    "vocabulary": ("data",),
    "simulate": ("simulate",),
    "sample": ("sample",),
    "evaluate": ("evaluate",),
    "ceiling": ("evaluate",),
    "calibrate": ("evaluate",),
    "baseline": ("baseline",),
    "train": _TRAINS,
    "pretrain": _TRAINS,
    "finetune": _TRAINS,
    "run": ("data", "split", *_TRAINS, "evaluate"),
    "init": ("data", "split", *_TRAINS, "evaluate"),
}
"""Sections of the recipe that a command reads."""


def words_of(context: Any) -> list[str]:
    """Return the words of a command behind the program's name."""
    names = []
    while context.parent is not None:
        names.append(str(context.info_name or ""))
        context = context.parent
    return [name for name in reversed(names) if name]


def explain(error: Any) -> str:
    """Return one sentence on what is wrong with a command line and what to write instead.

    Parameters
    ----------
    error
        What Typer raised.
    """
    context = error.ctx
    if context is None:
        return _plain(error.format_message())
    words, kind = words_of(context), type(error).__name__
    where = " ".join([_PROGRAM, *words])
    if kind == "NoSuchOption":
        return f"{where}: there is no option {error.option_name}{_meant(error.option_name, context, words)}"
    if kind == "MissingParameter":
        return f"{where}: {_name(error.param)} is missing ({_help(error.param)}){_example(words)}"
    if kind == "BadParameter" and error.param is not None:
        return f"{where}: {_name(error.param)}{_given(error.param)}: {_value(error.message)}"
    if found := re.match(r"No such command '(.*?)'", error.message):
        return f"{where}: there is no command '{found[1]}'{_command(found[1], context)}"
    if found := re.match(r"Got unexpected extra arguments? \((.*)\)", error.message):
        return f"{where}: does not take the argument '{found[1]}'; a file for an option needs its name{_example(words)}"
    return f"{where}: {_plain(error.format_message())}{_example(words)}"


def _meant(option: str, context: Any, words: list[str]) -> str:
    """Return what to write instead of an option that a command does not have, with the punctuation before it."""
    name = option.lstrip("-").lower().replace("_", "-")
    have = _options(context.command)
    if f"--{name}" in have:
        return f"; write --{name}"
    if words and option in _options(context.find_root().command):
        return f"; it stands before the command: {_PROGRAM} {option} {' '.join(words)} …"
    for meant in (*_OPTIONS.get(name, ()), *_keys_called(option, name, words)):
        if meant.startswith("--") and meant.split()[0] in have:
            return f"; use {meant}"
        if not meant.startswith("--") and "--set" in have and meant.split(".")[0] in _sections(words):
            return f"; use --set {meant}=…"
    long = [option.removeprefix("--") for option in have if option.startswith("--")]
    if near := nearest(name, long):
        return near.replace("'", "'--", 1)
    others = [
        path for path, command in _leaves(context.find_root().command) if f"--{name}" in _options(command)
    ]
    has = f"; it is an option of {listing(others, 4)}" if others else ""
    meant = [one for one in _OPTIONS.get(name, ()) if not one.startswith("--")]
    key = next(iter([*meant, *_keys_called(option, name, words)]), None)
    reads = [command for command, sections in _SECTIONS.items() if key and key.split(".")[0] in sections]
    sets = f"; {key} is a setting of {listing(reads, 4)}" if reads and not others else ""
    return f"{has}{sets}; {' '.join([_PROGRAM, *words])} --help lists the options"


def _keys_called(option: str, name: str, words: list[str]) -> list[str]:
    """Return the keys of the recipe that an option names, those that the command reads first."""
    from perturbdiff.config.recipes import keys

    wanted = name.replace("-", "_")
    found = [key for key in keys() if wanted in (key.rpartition(".")[2], key) or option.lstrip("-") == key]
    return sorted(found, key=lambda key: key.split(".")[0] not in _sections(words))


def _sections(words: list[str]) -> tuple[str, ...]:
    return _SECTIONS.get(words[0] if words else "", ())


def _options(command: Any) -> list[str]:
    """Return the long names and the letters of a command's options."""
    options = [p for p in command.params if p.param_type_name == "option"]
    return [name for p in options for name in (*p.opts, *p.secondary_opts)]


def _leaves(command: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    for name, one in command.commands.items():
        below = path if one.hidden else f"{path} {name}".strip()
        if hasattr(one, "commands"):
            yield from _leaves(one, below)
        else:
            yield below, one


def _name(parameter: Any) -> str:
    """Return how a user writes a parameter: its longest option, or the name of an argument."""
    if parameter.param_type_name == "option":
        return max(parameter.opts, key=len)
    return str(parameter.metavar or parameter.name).upper().strip("[]{}")


def _given(parameter: Any) -> str:
    """Return what the command line gives for an option, with a space before it."""
    for place, word in enumerate(sys.argv):
        name, equals, value = word.partition("=")
        if name in parameter.opts:
            return f" {value if equals else ''.join(sys.argv[place + 1 : place + 2])}"
    return ""


def _help(parameter: Any) -> str:
    return (getattr(parameter, "help", None) or "required").rstrip(".")


def _value(message: str) -> str:
    """Return why a value is wrong, with the choice that was meant."""
    message = message.removeprefix("Value error, ").strip()
    found = re.match(r"'?(?P<value>.*?)'? is not one of (?P<choices>.+)", message)
    if found is None:
        return _plain(message)
    value, choices = found["value"], re.findall(r"'([^']*)'", found["choices"])
    known = _VALUES.get(value.lower())
    hint = f", did you mean '{known}'?" if known in choices else nearest(value, choices)
    return f"'{value}' is not one of {listing(choices, 20)}{hint}"


def _command(name: str, context: Any) -> str:
    """Return which command was meant."""
    have = [name for name, command in context.command.commands.items() if not command.hidden]
    known = _COMMANDS.get(name.lower())
    if known and context.parent is None:
        return f", did you mean '{known}'?"
    return f"{nearest(name, have) or ';'} commands: {listing(have, 40)}"


def _example(words: list[str]) -> str:
    """Return an example of a command, with the punctuation before it."""
    lines = EXAMPLES.get(" ".join(words)) or (EXAMPLES.get(words[0]) if words else None)
    return f"; for example: {lines[0]}" if lines else ""


def _plain(text: str) -> str:
    text = text.strip().rstrip(".")
    return text[:1].lower() + text[1:]
