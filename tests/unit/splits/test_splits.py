import logging
import shutil

import numpy as np
import pandas as pd
import pytest
from small_store import small_store
from tiny_data import tiny_counts

from perturbdiff.config import recipes
from perturbdiff.config.settings import SplitConfig
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.split_rules import by_rule, by_toml, read_toml, spread
from perturbdiff.splits.splits import KEYS, check, count, make_split, parts, read_split, weak_validation


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    adata = tiny_counts()
    adata.obs["site"] = np.where(adata.obs["batch"] == "d1", "north", "south")
    adata.obs["well"] = np.arange(adata.n_obs).astype(str)
    return small_store(tmp_path_factory.mktemp("splits"), ["data.extra_obs=[site, well]"], adata)


def screen(contexts=6, perturbations=20, types=("A", "B")) -> pd.DataFrame:
    rows = [
        (t, f"d{c}", p, 10 + c)
        for t in types
        for c in range(contexts)
        for p in ["control", *(f"p{i}" for i in range(perturbations))]
    ]
    table = pd.DataFrame(rows, columns=[*KEYS, "n_cells"])
    return table.assign(context=table["batch"], is_control=table["perturbation"] == "control")


def rule(**kwargs):
    return SplitConfig(**kwargs)


def no_profiles(contexts):
    raise AssertionError("profiles are only for PCA")


def write(path, text):
    path.write_text(text)
    return path


def split_of(table, part):
    return set(table["perturbation"][table["part"] == part])


def test_rule_holds_out_alike_in_all_conditions_of_the_contexts():
    table = screen()
    part, held = by_rule(table, rule(held_out=("d1", "d4")), 0, no_profiles)
    table["part"] = part
    check(table)
    assert held == ["d1", "d4"]
    assert set(table["part"][~table["context"].isin(held)]) == {"train"}
    for _, here in table[table["context"].isin(held)].groupby(["cell_type", "batch"]):
        perturbed = here[~here["is_control"]]
        sizes = perturbed["part"].value_counts()
        assert sizes.to_dict() == {"test": 13, "train": 6, "valid": 1}
        assert split_of(here, "test") == split_of(table, "test")
    assert set(table["part"][table["is_control"]]) == {"train"}


def test_whole_contexts_can_be_validation():
    """What is held out in the held-out contexts is validation there; all else, and the controls, are training."""
    table = screen()
    chosen = rule(held_out=("d1",), valid_contexts=("d3",), train_fraction=0.4, valid_fraction=0)
    table["part"], held = by_rule(table, chosen, 0, no_profiles)
    check(table)
    assert held == ["d1"]
    assert set(table["context"][table["part"] == "valid"]) == {"d3"}
    assert split_of(table, "valid") == split_of(table, "test")
    assert len(split_of(table, "test")) == 12
    alone, _ = by_rule(table, rule(held_out=("d1",), train_fraction=0.4, valid_fraction=0), 0, no_profiles)
    assert ((alone == "test") == (table["part"] == "test")).all()


def test_contexts_of_validation_are_not_drawn_for_the_test():
    chosen = rule(num_held_out=3, valid_contexts=("d0", "d1", "d2"))
    for seed in range(5):
        _, held = by_rule(screen(), chosen, seed, no_profiles)
        assert held == ["d3", "d4", "d5"]


def test_rule_is_a_function_of_the_seed():
    table = screen()
    runs = [by_rule(table, rule(num_held_out=2), seed, no_profiles) for seed in (0, 0, 1)]
    assert (runs[0][0] == runs[1][0]).all()
    assert not (runs[0][0] == runs[2][0]).all()
    shuffled = table.sample(frac=1, random_state=0)
    part, held = by_rule(shuffled, rule(num_held_out=2), 0, no_profiles)
    assert held == runs[0][1]
    assert (pd.Series(part, shuffled.index).sort_index() == runs[0][0]).all()


def test_only_named_perturbations_are_held_out():
    table = screen()
    part, _ = by_rule(
        table, rule(held_out=("d0",), perturbations=("p1", "p2"), train_fraction=0), 0, no_profiles
    )
    table["part"] = part
    assert split_of(table, "test") | split_of(table, "valid") == {"p1", "p2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": ("D1",)}, "no cells of context 'D1'.*did you mean 'd1'"),
        ({"num_held_out": 7}, "only 6 values"),
        ({"held_out": ("d0",), "valid_contexts": ("d11",)}, "valid_contexts: no cells of context 'd11'"),
        ({"held_out": ("d0",), "valid_contexts": ("d0",)}, "d0 in held_out and in valid_contexts"),
        (
            {"held_out": ("d0",), "perturbations": ("q1",)},
            "1 of 1 held-out perturbations have no cells: 'q1'",
        ),
    ],
)
def test_rule_names_what_is_wrong(changes, message):
    with pytest.raises(UserError, match=message):
        by_rule(screen(), rule(**changes), 0, no_profiles)


def test_context_without_controls_is_refused():
    table = screen()
    table = table[~(table["is_control"] & (table["context"] == "d2"))]
    with pytest.raises(UserError, match="'d2' has no control cells"):
        by_rule(table, rule(held_out=("d2",)), 0, no_profiles)
    for seed in range(5):
        assert "d2" not in by_rule(table, rule(num_held_out=3), seed, no_profiles)[1]


def test_pca_takes_one_context_of_each_cluster():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 40)) * 5
    profiles = np.concatenate([c + rng.normal(size=(4, 40)) * 0.1 for c in centres])
    chosen = spread([f"{i:02d}" for i in range(12)], profiles, 3, seed=0)
    assert sorted(int(c) // 4 for c in chosen) == [0, 1, 2]


def test_nothing_left_to_train_on_is_an_error():
    table = screen(contexts=1)
    table["part"] = by_rule(table, rule(held_out=("d0",), train_fraction=0), 0, no_profiles)[0]
    with pytest.raises(UserError, match="no perturbed cells are left"):
        check(table)


def test_leaks_are_found(caplog):
    table = screen(contexts=2)
    table["part"] = "train"
    leaky = table.copy()
    leaky.loc[leaky.index[1], "part"] = "test"  # p0 of d0 in one of two cell types
    with pytest.raises(UserError, match="'p0' of context 'd0' is in two parts"):
        check(leaky)
    held = table.copy()
    held.loc[held["is_control"], "part"] = "test"
    with pytest.raises(UserError, match="control cells are held out"):
        check(held)
    unseen = table.copy()
    unseen.loc[unseen["perturbation"] == "p3", "part"] = "test"
    check(unseen)
    assert "1 test perturbations have no training cells in any context: p3" in caplog.text


def test_toml_as_state_writes_it(tmp_path):
    path = write(
        tmp_path / "s.toml",
        """
[datasets]
screen = "/somewhere/else"
[training]
screen = "train"
[zeroshot]
"screen.d1" = "test"
"screen.d2" = "val"
[fewshot]
[fewshot."screen.d3"]
val = ["p0"]
test = ["p1", "p2"]
""",
    )
    table = screen(perturbations=4)
    table["part"] = by_toml(table, read_toml(path, ["anything"]))
    check(table)
    perturbed = table[~table["is_control"]]
    assert set(perturbed["part"][perturbed["context"] == "d1"]) == {"test"}
    assert set(perturbed["part"][perturbed["context"] == "d2"]) == {"valid"}
    assert set(perturbed["part"][perturbed["context"] == "d0"]) == {"train"}
    few = perturbed[perturbed["context"] == "d3"]
    assert [split_of(few, p) for p in ("train", "valid", "test")] == [{"p3"}, {"p0"}, {"p1", "p2"}]
    assert set(table["part"][table["is_control"]]) == {"train"}


def test_contexts_that_no_section_names_are_unused(tmp_path):
    path = write(tmp_path / "s.toml", '[training]\n"a.d0" = "train"\n[zeroshot]\n"a.d1" = "test"\n')
    table = screen()
    part = by_toml(table, read_toml(path, ["x"]))
    assert set(part[(table["context"] == "d5") & ~table["is_control"]]) == {"unused"}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([], ""),
        ([60, 50], ""),
        ([9] * 40, "those with at least 10 cells have 0 cells"),
        ([12, 30, 5], "have 42 cells"),
    ],
)
def test_validation_that_cannot_choose_is_told(sizes, said):
    sentence = weak_validation(np.array(sizes, np.int64))
    assert (said in sentence) if said else not sentence


def test_small_conditions_are_told_when_a_split_is_made(caplog):
    table = screen(contexts=2).assign(n_cells=8, part="train")
    table.loc[table["perturbation"] == "p3", "part"] = "valid"
    table.loc[table["perturbation"] == "p4", "part"] = "test"
    check(table)
    assert "validation cannot choose" in caplog.text
    assert "4 of 4 test conditions have fewer than 10 cells" in caplog.text


def test_labels_of_a_split_may_be_numbers(tmp_path):
    """In a TOML file, and in a table from another program."""
    text = '[training]\na = "train"\n[fewshot."a.d1"]\ntest = [3]'
    assert read_toml(write(tmp_path / "s.toml", text), ["a"]).fewshot == {"d1": {"test": ("3",)}}
    table = pd.DataFrame({"cell_type": ["T"], "batch": [3.0], "perturbation": [7], "part": ["test"]})
    table.to_parquet(tmp_path / "split.parquet")
    assert read_split(tmp_path / "split.parquet")[["batch", "perturbation"]].to_numpy().tolist() == [
        ["3", "7"]
    ]


def test_a_split_of_other_data_is_named(small, tmp_path):
    split = read_split(small.split)
    other = split.assign(batch="e1").drop_duplicates(["cell_type", "batch", "perturbation"])
    other.to_parquet(tmp_path / "other.parquet")
    with pytest.raises(
        UserError, match=r"other\.parquet: none of the conditions of .*store is in it.*other data"
    ):
        parts(small.opened.conditions, read_split(tmp_path / "other.parquet"), small.store)
    split.iloc[1:].to_parquet(tmp_path / "less.parquet")
    with pytest.raises(UserError, match=r"less\.parquet: 1 of 16 conditions of .*store are not in it"):
        parts(small.opened.conditions, read_split(tmp_path / "less.parquet"), small.store)


def test_the_right_data_set_of_several_is_taken(tmp_path):
    text = '[datasets]\na = "1"\n"b.c" = "2"\n[training]\na = "train"\n"b.c" = "train"\n[zeroshot]\n"b.c.d1" = "test"\n'
    path = write(tmp_path / "s.toml", text)
    assert dict(read_toml(path, ["b.c"]).zeroshot) == {"d1": "test"}
    assert dict(read_toml(path, ["a"]).zeroshot) == {}
    with pytest.raises(UserError, match="data sets a, b.c, none of them called 'z'"):
        read_toml(path, ["z"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training", "not valid TOML"),
        ('[trainning]\na = "train"', "unknown section 'trainning', did you mean 'training'"),
        ('[training]\na = "yes"', "only value there is"),
        ('[training]\na = "train"\n[zeroshot]\n"a.d1" = "Test"', 'write "test" or "val"'),
        ('[fewshot."a.d1"]\ntest = "p1"', "must be a list"),
        ('[fewshot."a.d1"]\ntest = ["p1"]\nval = ["p1", "p2"]', "p1 in both val and test"),
        ('[zeroshot]\n"a.d1" = "test"\n[fewshot."a.d1"]\ntest = ["p1"]', "in .zeroshot. and in .fewshot."),
        ('[zeroshot]\n"a.D1" = "test"', "no cells of context 'D1'.*did you mean 'd1'"),
        ('[zeroshot]\n"a.A" = "test"', "value of another column: set split.context_column"),
        (
            '[fewshot."a.d1"]\ntest = ["p01"]',
            "context 'd1': 1 of 1 held-out perturbations have no cells: 'p01'",
        ),
        ('[fewshot."a.d1"]\ntest = ["control"]', "'control' is the control"),
        ("", "names no data set"),
    ],
)
def test_mistakes_in_a_toml_are_named(tmp_path, text, message):
    path = write(tmp_path / "s.toml", text)
    with pytest.raises(UserError, match=message):
        by_toml(screen(), read_toml(path, ["a"]))


def test_all_labels_without_cells_come_in_one_message(tmp_path):
    text = (
        '[training]\na = "train"\n[zeroshot]\n"a.D1" = "test"\n[fewshot."a.d2"]\ntest = ["P1", "q7", "p2"]\n'
        'val = ["p 3"]\n[fewshot."a.d3"]\ntest = ["lost", "control"]'
    )
    spec = read_toml(write(tmp_path / "s.toml", text), ["a"])
    with pytest.raises(UserError) as caught:
        by_toml(screen(), spec)
    said = str(caught.value)
    for part in (
        "no cells of context 'D1', did you mean 'd1'?",
        "context 'd2': 3 of 4 held-out perturbations have no cells: 'P1' (did you mean 'p1'), 'q7'",
        "'p 3' (did you mean 'p3')",
        "context 'd3': 1 of 2 held-out perturbations have no cells: 'lost'",
        "'control' is the control",
        "split.missing=warn",
    ):
        assert part in said
    with pytest.raises(UserError, match="split.perturbations: 1 of 2 .*'q1'") as caught:
        by_rule(screen(), rule(held_out=("d0", "d77"), perturbations=("p1", "q1")), 0, no_profiles)
    assert "'d77'" in str(caught.value)


def test_labels_without_cells_can_be_left_out(tmp_path, caplog):
    text = '[training]\na = "train"\n[zeroshot]\n"a.D1" = "test"\n[fewshot."a.d2"]\ntest = ["q7", "p2"]'
    spec, table = read_toml(write(tmp_path / "s.toml", text), ["a"]), screen()
    table["part"] = by_toml(table, spec, "warn")
    assert split_of(table, "test") == {"p2"}
    assert "'q7'" in caplog.text
    assert "'D1'" in caplog.text
    few = rule(held_out=("d0", "x"), perturbations=("p1", "p2", "q"), train_fraction=0, missing="warn")
    table["part"], held = by_rule(table, few, 0, no_profiles)
    assert held == ["d0"]
    assert split_of(table, "test") | split_of(table, "valid") == {"p1", "p2"}
    for nothing in ({"held_out": ("x",)}, {"held_out": ("d0",), "perturbations": ("q",)}):
        with pytest.raises(UserError, match="nothing would be left"):
            by_rule(screen(), rule(**nothing, missing="warn"), 0, no_profiles)
    nothing = read_toml(write(tmp_path / "n.toml", '[fewshot."a.d2"]\ntest = ["q7"]'), ["a"])
    with pytest.raises(UserError, match="nothing of what it holds out has cells"):
        by_toml(screen(), nothing, "warn")


def test_store_and_raw_file_give_the_same_split(small, tmp_path):
    make_split(small.counts, tmp_path / "raw.parquet", small.recipe)
    table = read_split(small.split)
    pd.testing.assert_frame_equal(table, read_split(tmp_path / "raw.parquet"))
    assert list(parts(small.opened.conditions, table)) == list(table["part"])
    counts = pd.read_csv(small.split.with_name("split.parquet.counts.csv")).set_index("part")
    assert counts["cells"].sum() == small.opened.n_cells
    assert counts.loc["control", "cells"] == 96
    assert counts.loc["test", "perturbations"] == len(split_of(table, "test"))


def test_equal_runs_have_equal_bytes_and_are_skipped(small, tmp_path, caplog):
    out = make_split(small.store, tmp_path / "split.parquet", small.recipe)
    assert out.read_bytes() == small.split.read_bytes()
    caplog.set_level(logging.INFO, "perturbdiff")
    make_split(small.store, out, small.recipe)
    assert "up to date" in caplog.text


@pytest.mark.parametrize("source", ["store", "counts"])
def test_any_constant_obs_column_can_be_held_out(small, tmp_path, source):
    recipe = recipes.load(
        "tiny", ["split.context_column=site", "split.held_out=[south]", "data.extra_obs=[site]"]
    )
    out = make_split(getattr(small, source), tmp_path / "s.parquet", recipe)
    table = read_split(out)
    assert set(table["batch"][table["part"] == "test"]) == {"d2"}
    several = recipes.load("tiny", ["split.context_column=well", "split.num_held_out=1"])
    with pytest.raises(UserError, match="'well' has several values within one condition"):
        make_split(getattr(small, source), tmp_path / "t.parquet", several)
    with pytest.raises(UserError, match="no obs column 'sites'.*'site'"):
        unknown = recipes.load("tiny", ["split.context_column=sites", "split.num_held_out=1"])
        make_split(getattr(small, source), tmp_path / "t.parquet", unknown)
    assert not (tmp_path / "t.parquet").exists()


def test_pca_needs_a_store(small, tmp_path):
    recipe = recipes.load(
        "tiny", ["split.context_column=cell_type", "split.choose=pca", "split.num_held_out=1"]
    )
    table = read_split(make_split(small.store, tmp_path / "s.parquet", recipe))
    assert len(set(table["cell_type"][table["part"] == "test"])) == 1
    with pytest.raises(UserError, match="make the split from a store"):
        make_split(small.counts, tmp_path / "t.parquet", recipe)


def test_a_split_that_was_changed_is_refused_unless_it_is_ones_own(small, tmp_path):
    path = tmp_path / "split.parquet"
    for record in ("", ".manifest.json", ".run.json"):
        shutil.copy(f"{small.split}{record}", f"{path}{record}")
    table = read_split(path)
    table.assign(part="train").to_parquet(path)
    with pytest.raises(UserError, match="was changed since it was made.*your own another name"):
        read_split(path)
    mine = path.rename(tmp_path / "mine.parquet")
    assert set(read_split(mine)["part"]) == {"train"}


def test_damaged_splits_are_refused(small, tmp_path):
    table = read_split(small.split)
    path = tmp_path / "s.parquet"
    path.write_text("no")
    with pytest.raises(UserError, match="is not a table, or damaged"):
        read_split(path)
    table.drop(columns="part").to_parquet(path)
    with pytest.raises(UserError, match="missing part"):
        read_split(path)
    table.assign(part="training").to_parquet(path)
    with pytest.raises(UserError, match="unknown part 'training'"):
        read_split(path)
    pd.concat([table, table[3:4].assign(part="test")]).to_parquet(path)
    with pytest.raises(UserError, match="occurs twice"):
        read_split(path)
    with pytest.raises(UserError, match="1 of 16 conditions of the store are not in it .first: B / d1 / p1"):
        parts(small.opened.conditions, table.drop(index=1))
    with pytest.raises(UserError, match="has no rows"):
        parts(small.opened.conditions, table[:0])


def test_counts_have_all_parts():
    table = screen(contexts=2).assign(part="train")
    assert count(table)["part"].tolist() == ["train", "valid", "test", "unused", "control"]
