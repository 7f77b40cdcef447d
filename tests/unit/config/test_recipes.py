import re
from importlib import resources

import pytest
import yaml

from perturbdiff.config import readings, recipes
from perturbdiff.config.settings import Config
from perturbdiff.runtime.errors import UserError


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
    for file in (resources.files("perturbdiff.config") / "presets").iterdir():
        if file.name.endswith(".yaml"):
            assert re.search(r"^description: \S", file.read_text(), re.M), file.name


def test_overrides_change_one_value_and_keep_the_rest():
    base, changed = recipes.load("tiny"), recipes.load("tiny", ["train.max_steps=7", "data.batch_key=null"])
    assert changed.train.max_steps == 7
    assert changed.data.batch_key is None
    assert changed.model == base.model


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("split.held_out=[3]", ("3",)),
        ("split.held_out=[3.0, 2.5]", ("3", "2.5")),
        ("split.held_out=3", ("3",)),
        ("split.held_out=d2", ("d2",)),
        ("split.held_out=[01, 12:30, 2024-05-01]", ("01", "12:30", "2024-05-01")),
        ("split.perturbations=[1, IFNB]", ("1", "IFNB")),
        ("data.control=0", "0"),
        ("data.control='off'", "off"),
        ("data.batch_key=7", "7"),
        ("data.batch_key=none", None),
        ("data.num_hvgs=none", None),
        ("evaluate.control=0", "0"),
        ("evaluate.metrics=PDCorr", ("PDCorr",)),
        ("train.max_steps=007", 7),
    ],
)
def test_labels_may_be_numbers_and_one_needs_no_list(override, value):
    config = recipes.load("tiny", [override])
    section, key = override.partition("=")[0].split(".")
    assert getattr(getattr(config, section), key) == value


def test_a_label_that_yaml_takes_for_a_truth_value_is_refused():
    with pytest.raises(UserError, match="'data.control': yes, no, on, off.*quotes.*got False"):
        recipes.load("tiny", ["data.control=off"])


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
        ("loss.mmd_statistic=W", "'loss.mmd_statistic'.*'V', 'U', 'cross' or 'set'"),
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


def test_a_base_too_long_for_a_name_is_an_unknown_preset(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"base: {'é' * 300}\n")
    with pytest.raises(UserError, match="no preset or file 'é"):
        recipes.load(tmp_path / "mine.yaml")


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


def flat(name, part):
    tree = yaml.load(
        (resources.files("perturbdiff.config") / "variants" / f"{name}.yaml").read_text(),
        Loader=yaml.BaseLoader,
    )
    return {f"{section}.{key}" for section, keys in tree[part].items() for key in keys}


def test_variants_say_the_same_switches_and_settings():
    known = set(recipes.keys())
    for part in ("switches", "settings"):
        said = {name: flat(name, part) for name in readings.variants()}
        assert said["paper"] == said["released"] == said["recommended"]
        assert said["paper"] <= known
    assert not flat("paper", "switches") & flat("paper", "settings")


@pytest.mark.parametrize("name", ["paper", "released", "recommended"])
def test_a_variant_brings_its_mathematics_and_leaves_the_numbers(name):
    base, changed = recipes.load("kang18"), recipes.load("kang18", [f"variant={name}"])
    plain = recipes.load(name)
    assert changed.variant == name
    assert changed.loss == plain.loss
    assert changed.sample == plain.sample
    assert (changed.model.width, changed.model.heads) == (base.model.width, base.model.heads)
    assert changed.train.max_steps == base.train.max_steps
    assert (changed.data, changed.split) == (base.data, base.split)


def test_a_variant_comes_before_the_other_overrides_wherever_it_stands():
    after = recipes.load("kang18", ["sample.num_steps=7", "loss.mmd_factor=half", "variant=paper"])
    assert (after.sample.num_steps, after.loss.mmd_factor) == (7, "half")
    assert after.model.anchor == "none"


def test_a_variant_in_a_file_comes_after_its_base_and_before_its_values(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: recommended\nvariant: released\nsize: small\nmodel: {depth: 3}\n")
    mine = recipes.load(file)
    assert (mine.variant, mine.model.mlp_branch) == ("released", "parallel")
    assert (mine.model.width, mine.model.heads, mine.model.depth) == (256, 8, 3)
    upper = tmp_path / "upper.yaml"
    upper.write_text(f"base: {file}\nmodel: {{mlp_branch: sequential}}\n")
    assert recipes.load(upper).model.mlp_branch == "sequential"


def test_the_variant_is_what_the_switches_say():
    assert recipes.load("paper").variant == "paper"
    assert recipes.load("paper", ["train.learning_rate=1e-3", "sample.guidance=0"]).variant == "paper"
    off = recipes.load("paper", ["loss.mmd_weight=0"])
    assert off.variant == "own"
    assert off.model_copy(update={"loss": recipes.load("paper").loss}).variant == "paper"
    assert Config.model_validate({"variant": "paper"}).variant == "own", "what is claimed is not believed"
    claimed = Config.model_validate(off.model_dump() | {"variant": "paper"})
    assert claimed.variant == "own"


def test_what_config_show_prints_can_be_loaded(tmp_path):
    file = tmp_path / "shown.yaml"
    for name in ("released-pbmc", "tiny"):
        file.write_text(recipes.describe(name))
        assert recipes.load(file) == recipes.load(name)


@pytest.mark.parametrize(("size", "width"), [("small", 256), ("medium", 512), ("large", 768)])
def test_sizes(size, width):
    model = recipes.load("paper-pbmc", [f"size={size}"]).model
    assert (model.width, model.depth, model.heads) == (width, 8, 8)
    assert recipes.load("paper").model.width == 512


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "variant=releasedd",
            "--set: unknown variant 'releasedd', did you mean 'released'.*paper, recommended",
        ),
        ("size=huge", "--set: unknown size 'huge'.*sizes: large, medium, small"),
        ("variant=[paper]", "unknown variant"),
    ],
)
def test_an_unknown_variant_or_size_names_the_nearest(override, message):
    with pytest.raises(UserError, match=message):
        recipes.load("paper", [override])


def test_values_of_a_variant_keep_their_source():
    _, sources = recipes.load_with_sources("kang18", ["variant=released", "model.leak=0.1"])
    assert sources["loss.mmd_factor"] == "released"
    assert sources["model.leak"] == "given"
