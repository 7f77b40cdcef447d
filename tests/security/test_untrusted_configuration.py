"""Recipes, splits and overrides from anyone: a right result, or one line that names key, value and what is allowed."""

import time

import pytest
from refusals import refused

from perturbdiff.cli import options
from perturbdiff.config import data_settings
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.untrusted import parse


def nested(opening, closing="", times=50_000):
    return opening * times + closing * times


TEXTS = {
    "YAML": {
        "bomb": (
            "a: &a [x, x]\n"
            + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}]\n" for i in range(20)),
            "alias",
        ),
        "twice": ("name: a\nseed: 1\nseed: 2\n", "'seed' is given twice in line 3"),
        "python": ("a: !!python/object/apply:os.system [ls]\n", "constructor"),
        "unknown tag": ("a: !guess 3\n", "!guess"),
        "deep flow": ("a: " + nested("["), "nested"),
        "deep block": ("".join(" " * i + "a:\n" for i in range(500)), "nested"),
        "digits": ("seed: " + "9" * 5000, "digits"),
        "date": ("name: 2020-13-45\n", "not valid YAML"),
        "empty number": ("seed: !!int ''\n", "not valid YAML"),
        "zero byte": ("a: \x00", "not valid YAML"),
        "list as key": ("? [a]\n: 1\n", "not valid YAML"),
        "large": ("a: " + "x" * (1 << 20), "MiB"),
    },
    "TOML": {
        "dotted": (".".join("a" * 50_000) + " = 1", "nested"),
        "quoted": (".".join(['"a"'] * 50_000) + " = 1", "nested"),
        "arrays": ("a = " + nested("[", "]"), "nested"),
        "tables": ("a = " + nested("{a = ", times=5000), "nested"),
        "digits": ("a = " + "9" * 5000, "digits"),
        "long word": ("a" * 4_000_000, "not valid TOML"),
        "twice": ("a = 1\na = 2\n", "not valid TOML"),
    },
    "JSON": {
        "lists": (nested("[", "]"), "nested"),
        "objects": (nested('{"a":'), "nested"),
        "twice": ('{"a": 1, "a": 2}', "'a' is given twice"),
        "digits": ("9" * 5000, "digits"),
    },
}


@pytest.mark.parametrize(("form", "kind"), [(form, kind) for form, kinds in TEXTS.items() for kind in kinds])
def test_a_text_that_asks_for_too_much_is_refused_at_once(form, kind):
    text, words = TEXTS[form][kind]
    before = time.process_time()
    with pytest.raises(UserError, match="the file") as error:
        parse(text, form, "the file")
    assert time.process_time() - before < 10
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_what_people_write_is_read():
    assert parse("a: {b: [1, two], c: .5}\n", "YAML", "x") == {"a": {"b": [1, "two"], "c": 0.5}}
    toml = '# a.b.c [[[[\n[fewshot."data.a.b.c"]\nval = [\'x.y.z\', "[[["]\n'
    assert parse(toml, "TOML", "x") == {"fewshot": {"data.a.b.c": {"val": ["x.y.z", "[[["]}}}
    assert parse('{"a": [1, NaN], "b": {}}', "JSON", "x")["b"] == {}


@pytest.mark.parametrize("kind", TEXTS["YAML"])
def test_a_recipe_is_refused_in_one_line(run_cli, tmp_path, kind):
    text, words = TEXTS["YAML"][kind]
    (recipe := tmp_path / "mine.yaml").write_text(text)
    refused(run_cli("config", "show", recipe), "mine.yaml", words)


def test_all_that_is_wrong_with_a_recipe_is_said_at_once(run_cli, tmp_path):
    (recipe := tmp_path / "mine.yaml").write_text(
        "base: tiny\ntrain: {max_steps: 1000000000000, learning_rate: .inf, drop_covariates: 5}\n"
        "model: {dept: 3}\nsample: {guidance: -1}\nseed: 12345678901234567890\n"
    )
    refused(
        run_cli("config", "show", recipe), "train.max_steps", "10000000000", "1000000000000", "learning_rate",
        "finite", "drop_covariates", "less than or equal to 1, got 5", "model.dept", "guidance", "seed", "4294967295",
    )  # fmt: skip


@pytest.mark.parametrize(
    "override",
    [
        "train.max_steps=-1",
        "train.max_steps=.nan",
        "train.max_steps=1000000000000",
        "train.learning_rate=.inf",
        "train.set_size=1000000000",
        "model.depth=1000000000",
        "model.width=1000000000000000000",
        "schedule.num_steps=1000000000000",
        "simulate.genes=1000000000",
        "seed=12345678901234567890",
        "train.store_weights=[1, .nan]",
        "train.max_steps=*a",
        "train.max_steps=" + "[" * 5000,
        ".".join("a" * 5000) + "=1",
    ],
)
def test_an_override_is_refused_in_one_line(run_cli, override):
    outcome = run_cli("config", "show", "tiny", "--set", override)
    refused(outcome, override.split("=", maxsplit=1)[0][:40])
    assert len(outcome.err) < 500


def test_a_seed_is_what_every_library_takes(run_cli, tmp_path):
    assert options.LARGEST_SEED == data_settings.LARGEST_SEED
    outcome = run_cli("simulate", "--out", tmp_path / "out", "--seed", "12345678901234567890")
    assert outcome.code == 2
    assert "4294967295" in outcome.err
    assert not list(tmp_path.iterdir())


def test_a_message_shows_what_would_hide():
    assert str(UserError("column 'a\nb\u202ec'")) == "column 'a b\\u202ec'"
