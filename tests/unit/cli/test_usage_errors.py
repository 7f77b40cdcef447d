"""A wrong command line is answered with the right command, option or key of the recipe."""

import shlex

import pytest
from refusals import refused
from typer.main import get_command

from perturbdiff.cli import main
from perturbdiff.cli.hints import EXAMPLES
from perturbdiff.config import recipes

TRAIN = "train store --split split.parquet --out out"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            f"{TRAIN} --accelerator gpu",
            ["perturbdiff train: there is no option --accelerator; use --device cuda"],
        ),
        (f"{TRAIN} --gpu", ["use --device cuda"]),
        (f"{TRAIN} --epochs 3", ["use --set train.max_epochs=…"]),
        (f"{TRAIN} --lr 1e-3", ["use --set train.learning_rate=…"]),
        (f"{TRAIN} --learning-rate 1e-3", ["use --set train.learning_rate=…"]),
        (f"{TRAIN} --learning_rate=1e-3", ["use --set train.learning_rate=…"]),
        (f"{TRAIN} --batch-size 8", ["use --set train.sets_per_step=…"]),
        (f"{TRAIN} --max-steps 8", ["use --set train.max_steps=…"]),
        (f"{TRAIN} --train.max_steps 8", ["use --set train.max_steps=…"]),
        (f"{TRAIN} --keep_every 8", ["write --keep-every"]),
        (f"{TRAIN} --overwrite", ["use --force"]),
        (f"{TRAIN} --quiet", ["it stands before the command: perturbdiff --quiet train …"]),
        (f"{TRAIN} --pert-col gene", ["it is an option of", "preprocess, split"]),
        (f"{TRAIN} --nonsense", ["perturbdiff train --help lists the options"]),
        ("preprocess a.h5ad --out out --layer counts", ["use --set data.layer=…"]),
        ("preprocess a.h5ad --out out --batch-key donor", ["use --batch-col"]),
        ("preprocess a.h5ad --out out --perturbation gene", ["use --pert-col"]),
        ("preprocess a.h5ad --out out --epochs 3", ["train.max_epochs", "is a setting of train"]),
        ("preprocess a.h5ad --output out", ["use --out"]),
        ("sample bundle store --out out.h5ad --guidance 2", ["use --set sample.guidance=…"]),
        ("sample bundle store --out out.h5ad --batch-size 2", ["use --set sample.sets_per_batch=…"]),
        ("split store --out out --holdout T", ["use --set split.held_out=…"]),
        ("evaluate a b --out out --covariate batch", ["use --context-col"]),
        (
            "baseline linear store --split s --out out.h5ad --lr 1",
            ["perturbdiff baseline: there is no option --lr"],
        ),
        ("store info store --josn", ["did you mean '--json'"]),
        ("store inof store", ["no command 'inof', did you mean 'info'"]),
        ("fit store", ["did you mean 'train'"]),
        ("reportt", ["did you mean 'report'"]),
        ("xyzzy", ["commands: ", "preprocess"]),
        ("train store --out out", ["--split is missing", EXAMPLES["train"][0]]),
        ("train --split s --out out", ["STORE is missing", EXAMPLES["train"][0]]),
        ("train store split.parquet --out out", ["--split is missing", EXAMPLES["train"][0]]),
        (f"{TRAIN} --seed many", ["--seed many: ", "integer"]),
        (f"{TRAIN} --device gpu", ["'gpu' is not one of auto, cpu, cuda, did you mean 'cuda'"]),
        ("sample bundle store --out o.h5ad --part val", ["did you mean 'valid'"]),
        (f"{TRAIN} --config", ["--config"]),
    ],
)
def test_the_right_way_is_named(run_cli, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    refused(run_cli(*shlex.split(line)), *words)


def leaves(command, words=()):
    """Yield the words and the object of every command and group."""
    yield " ".join(words), command
    for name, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from leaves(one, (*words, name))


def test_each_help_shows_examples(run_cli):
    everything = dict(leaves(get_command(main.app)))
    assert set(EXAMPLES) == set(everything)
    for words, lines in EXAMPLES.items():
        shown = run_cli(*words.split(), "--help").out
        assert "\nExamples:\n" in shown, words
        for line in lines:
            assert f"  {line}\n" in shown


def test_the_examples_are_accepted(monkeypatch, tmp_path):
    """Each line is parsed as the command line parses it, and its keys and presets exist."""
    monkeypatch.chdir(tmp_path)
    program = get_command(main.app)
    for lines in EXAMPLES.values():
        for line in lines:
            name, *words = shlex.split(line)
            with program.make_context(name, words) as context:
                command, at = program, context
                rest = [*at._protected_args, *at.args]
                while hasattr(command, "commands"):
                    word, command, rest = command.resolve_command(at, rest)
                    at = command.make_context(word, rest, parent=at)
                    rest = [*getattr(at, "_protected_args", ()), *at.args]
            recipes.load(at.params.get("recipe"), at.params.get("overrides") or ())
