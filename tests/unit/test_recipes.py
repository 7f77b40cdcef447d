import re
from importlib import resources

import pytest

from perturbdiff import recipes
from perturbdiff.errors import UserError


def test_every_preset_resolves_and_every_value_names_its_source():
    assert {"tiny"} <= set(recipes.presets())
    for name in recipes.presets():
        resolved, sources = recipes.load_with_sources(name)
        assert resolved.name == name
        untagged = [
            k for k, s in sources.items() if s not in recipes.SOURCES and k not in ("name", "description")
        ]
        assert not untagged, f"{name}: {untagged}"


def test_presets_are_documented():
    for file in (resources.files("perturbdiff") / "presets").iterdir():
        if file.name.endswith(".yaml"):
            assert re.search(r"^description: \S", file.read_text(), re.M), file.name


def test_overrides_change_one_value_and_keep_the_rest():
    base, changed = recipes.load("tiny"), recipes.load("tiny", ["train.max_steps=7", "data.batch_key=null"])
    assert changed.train.max_steps == 7
    assert changed.data.batch_key is None
    assert changed.model == base.model


def test_file_with_base_gives_only_the_difference(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: tiny\nname: mine\ntrain: {max_steps: 3}\n")
    mine = recipes.load(file)
    assert (mine.name, mine.train.max_steps) == ("mine", 3)
    assert mine.train.set_size == recipes.load("tiny").train.set_size


def test_bases_in_a_circle_are_an_error(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(f"base: {b}\n")
    b.write_text(f"base: {a}\n")
    with pytest.raises(UserError, match="circle"):
        recipes.load(a)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_step=3", "unknown key 'train.max_step', did you mean 'train.max_steps'?"),
        ("train.max_steps=many", "'train.max_steps'.*got 'many'"),
        ("train.max_steps=0", "'train.max_steps'.*greater than or equal to 1"),
        ("loss.mmd_statistic=W", "'loss.mmd_statistic'.*'V', 'U' or 'cross'"),
        ("train.max_steps", "section.key=value"),
        ("seed.x=1", "'seed.x'|'seed'"),
    ],
)
def test_bad_override_names_key_and_remedy(override, message):
    with pytest.raises(UserError, match=message):
        recipes.load("tiny", [override])


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        recipes.load("tinny")


def test_broken_yaml_names_the_file(tmp_path):
    file = tmp_path / "broken.yaml"
    file.write_text("train: [")
    with pytest.raises(UserError, match="broken.yaml is not valid YAML"):
        recipes.load(file)


def test_unknown_tag_is_an_error(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text("seed: !guess 3\n")
    with pytest.raises(UserError, match="unknown tag '!guess'"):
        recipes.load(file)


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        recipes.load("tiny").train.max_steps = 3


def test_describe_shows_each_key_once_with_its_source():
    text = recipes.describe("tiny", ["train.max_steps=7"])
    assert "  max_steps: 7  # given" in text
    assert "  width: 32  # ours" in text
    assert text.count("\n  ") + 4 == len(list(recipes.keys()))
