"""Runs that belong to a comparison: parts, rows that sample another's model, experiments by name; stub runs."""

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(p.stem for p in (ROOT / "assets" / "experiments").glob("*.yml"))
HEADER = "id,dataset,input,preset,mode,init,step,overrides,part,arm,level,collection,seed"
ROWS = (
    "prior,atlas,a.h5ad,tiny,pretrain,,,train.keep_every=10,,,,,0",
    "scratch,kang,kang.h5ad,tiny,train,,,split.num_held_out=1;train.keep_every=5,valid,from scratch,100,blood,3",
    "tuned,kang,kang.h5ad,tiny,finetune,prior,,split.num_held_out=1,,finetuned,100,,0",
    "early,kang,kang.h5ad,,sample,scratch,5,,,from scratch,50,blood,3",
    "guided,kang,kang.h5ad,,sample,scratch,,sample.guidance=2,valid,w = 2,2,,3",
    "zero-0,kang,kang.h5ad,tiny,sample,prior,0,split.num_held_out=1,,zero-shot,0,,0",
    "zero-10,kang,kang.h5ad,tiny,sample,prior,10,split.num_held_out=1,valid,zero-shot,10,,0",
    "lin,kang,kang.h5ad,tiny,linear,,,split.num_held_out=1,valid,,,,0",
)


def sheet(folder: Path, *rows: str) -> str:
    path = folder / "sheet.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    for name in ("kang.h5ad", "a.h5ad"):
        (folder / name).touch()
    return str(path)


def script(ran, name: str) -> str:
    """The command of a task, by its process and tag."""
    (found,) = (t for t in ran.tasks() if t["name"].split(":")[-1] == name)
    return (Path(found["workdir"]) / ".command.sh").read_text()


@pytest.fixture(scope="module")
def compared(nextflow_in, tmp_path_factory):
    """A finished stub run of rows that share trainings, and the Nextflow that ran it."""
    folder = tmp_path_factory.mktemp("compared")
    nextflow = nextflow_in(folder)
    return nextflow, nextflow.run("-stub", "--input", sheet(folder, *ROWS), "--baselines", "control")


def test_rows_that_sample_share_the_training_and_parts_the_split(compared):
    _, ran = compared
    assert ran.code == 0, ran.output
    names = [name.split(" ")[0] for name in ran.ran()]
    count = {name: names.count(name) for name in set(names)}
    assert (count["PREPROCESS"], count["SPLIT"], count["STATS"]) == (2, 1, 2)
    assert (count["PRETRAIN"], count["TRAIN"], count["FINETUNE"]) == (1, 1, 1)
    assert (count["SAMPLE"], count["BASELINE"], count["CEILING"]) == (6, 3, 2)  # control twice, linear
    (pretrain,) = (t["workdir"] for t in ran.tasks() if t["process"].endswith("PRETRAIN"))
    held = {p.name for p in Path(pretrain).glob("held*/*")}
    assert len(held) == 2, f"one store and one split, told once: {held}"


def test_the_design_tells_what_each_run_is(compared):
    _, ran = compared
    with (ran.outdir / "pipeline_info" / "design.csv").open() as handle:
        lines = {(row["method"], row["part"]): row for row in csv.DictReader(handle)}
    assert len(lines) == 6 + 3
    told = {key: [row[c] for c in ("dataset", "arm", "level", "seed", "init")] for key, row in lines.items()}
    assert told["scratch", "valid"] == ["kang.valid", "from scratch", "100", "3", ""]
    assert told["early", "test"] == ["kang", "from scratch", "50", "3", "scratch"]
    assert told["guided", "valid"] == ["kang.valid", "w = 2", "2", "3", "scratch"]
    assert told["zero-10", "valid"] == ["kang.valid", "zero-shot", "10", "0", "prior"]
    assert told["control", "test"] == ["kang", "control", "", "0", ""]
    assert told["control", "valid"][0] == "kang.valid"
    assert told["lin", "valid"][1] == "linear"
    assert {row["collection"] for row in lines.values()} == {"blood"}, "of all that share a part's unit"


def test_more_rows_that_sample_and_another_part_train_nothing(compared):
    nextflow, _ = compared
    rows = [row.replace(",valid,from scratch", ",test,from scratch") for row in ROWS]
    rows.append("wider,kang,kang.h5ad,,sample,scratch,,sample.num_steps=2,,w = 2,2,,3")
    path = nextflow.folder / "sheet.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    ran = nextflow.run("-stub", "--input", str(path), "--baselines", "control", "-resume")
    assert ran.code == 0, ran.output
    assert {name.split(" ")[0] for name in ran.ran()} == {"SAMPLE", "EVALUATE", "REPORT"}
    assert {name for name in ran.ran() if name.startswith("SAMPLE")} == {"SAMPLE (scratch)", "SAMPLE (wider)"}


def test_every_mistake_about_comparisons_is_told_at_once(questions, tmp_path):
    rows = (
        *ROWS[:2],
        "a,kang,kang.h5ad,,sample,,,,,,,,",
        "b,kang,kang.h5ad,,sample,nothing,,,,,,,",
        "c,kang,kang.h5ad,,sample,scratch,7,,,,,,",
        "d,kang,kang.h5ad,,sample,scratch,25,,,,,,",
        "e,kang,kang.h5ad,,sample,scratch,,train.max_steps=3;variant=paper,,,,,",
        "f,kang2,kang.h5ad,demo,sample,scratch,,data.scale=1,,,,,",
        "g,kang,kang.h5ad,tiny,train,,10,,,,,,",
        "h,kang,kang.h5ad,tiny,train,,,,train,a'b,high,,",
        "i,kang,kang.h5ad,tiny,pretrain,,,,valid,x,,,",
        "j,kang,kang.h5ad,tiny,sample,g,3,,,,,,",
    )
    told = questions.refusal(tmp_path, input=sheet(tmp_path, *rows))
    for message in (
        "line 4 (a): 'init' is empty: name a train, finetune or pretrain row, or a bundle folder",
        "line 5 (b): unknown init: 'nothing' is neither a row nor a bundle folder; rows with a model: prior,",
        "line 6 (c): 'scratch' does not keep step 7: its train.keep_every is 5",
        "line 7 (d): 'scratch' has no step 25: its train.max_steps is 20",
        "line 8 (e): a sample row cannot change 'train'; its overrides may touch sample, evaluate",
        "line 8 (e): a sample row cannot change 'variant'",
        "line 9 (f): dataset 'kang2' is not that of 'scratch', 'kang'",
        "line 9 (f): 'preset' is that of 'scratch': leave it empty",
        "line 9 (f): a sample row cannot change 'data'",
        "line 10 (g): 'step' is for sample rows",
        "line 11 (h): unknown part 'train'; one of test, valid",
        "line 11 (h): arm 'a'b' does not fit",
        "line 11 (h): level 'high' does not fit",
        "line 12 (i): 'part' is for rows that are scored, which a pretrain row is not",
        "line 12 (i): 'arm' is for rows",
        "line 13 (j): 'g' keeps no steps: set train.keep_every there",
    ):
        assert message in told, told


def test_a_bundle_folder_is_sampled_as_it_says_and_files_of_one_name_are_joined(
    nextflow, questions, tmp_path
):
    own = tmp_path / "bundle" / "steps" / "0000300"
    own.mkdir(parents=True)
    recipe = {"config": {"sample": {"num_steps": 7, "guidance": 0.5}}}
    for folder in (own, own.parents[1]):
        (folder / "config.json").write_text(json.dumps(recipe))
    row = "x,kang,kang.h5ad,tiny,sample,bundle,300,sample.guidance=2;split.num_held_out=1,,,,,"
    for sample in ("s1", "s2"):
        (tmp_path / sample).mkdir()
        (tmp_path / sample / "counts.h5").touch()
    joined = "y,joined,s1/counts.h5;s2/counts.h5,tiny,mean-overall,,,,,,,,"
    ran = nextflow.run(
        "-stub", "--baselines", "none", "--ceiling", "false", "--input", sheet(tmp_path, row, joined)
    )
    assert ran.code == 0, ran.output
    names = [name.split(" ")[0] for name in ran.ran()]
    assert {name: names.count(name) for name in names} == {
        "PREPROCESS": 2, "SPLIT": 2, "STATS": 2, "SAMPLE": 1, "BASELINE": 1, "EVALUATE": 2, "REPORT": 1,
    }  # fmt: skip
    (task,) = (t for t in ran.tasks() if "PREPROCESS (joined" in t["name"])
    staged = [p.relative_to(task["workdir"]) for p in Path(task["workdir"]).rglob("counts.h5")]
    assert sorted(map(str, staged)) == ["input1/counts.h5", "input2/counts.h5"]
    told = questions.refusal(tmp_path, input=sheet(tmp_path, row.replace(",300,", ",400,")))
    assert "line 2 (x): unknown init: 'bundle' has no step 400" in told


def test_an_experiment_is_known_by_its_name(questions, tmp_path):
    wrong = questions.refusal(tmp_path, experiment="zeroshot-smal", input=None)
    assert "unknown 'zeroshot-smal', did you mean zeroshot-small?; experiments: " in wrong
    assert ", ".join(EXPERIMENTS) in wrong
    both = questions.refusal(tmp_path, experiment="zeroshot-small", input="x.csv")
    assert "--input and --experiment: give one of them" in both


def test_an_experiment_brings_its_own_parameters_and_what_is_given_has_the_last_word(questions, tmp_path):
    facts = yaml.safe_load((ROOT / "assets" / "experiments" / "scaling-small.yml").read_text())
    said = questions.plan(tmp_path, experiment="scaling-small", input=None, title="Mine", ceiling=False)
    assert f"experiment scaling-small: {facts['title']}; about {facts['cpu_hours']} CPU hours" in said
    (record,) = (tmp_path / "out" / "pipeline_info").glob("run_*.json")
    used = json.loads(record.read_text())["parameters"]
    assert (used["title"], used["ceiling"], used["baselines"]) == ("Mine", False, facts["baselines"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_is_known_of_an_experiment_fits(name):
    facts = yaml.safe_load((ROOT / "assets" / "experiments" / f"{name}.yml").read_text())
    assert facts.keys() <= {"title", "figures", "cpu_hours", "gpu_hours", "baselines", "ceiling", "against"}
    assert facts["title"]
    assert len({"cpu_hours", "gpu_hours"} & facts.keys()) == 1
    assert "cpu_hours" in facts or not name.endswith("-small")
    assert facts.get("cpu_hours", 0) <= 4
    schema = json.loads((ROOT / "nextflow_schema.json").read_text())
    known = schema["$defs"]["runs"]["properties"]["baselines"]["x-choices"]
    assert set(facts.get("baselines", "none").split(",")) <= {*known, "none"}
    assert isinstance(facts.get("ceiling", True), bool)
    shown = (ROOT / "docs" / "experiments.md").read_text()
    row = re.search(rf"^\| `{name}` \|.*$", shown, re.MULTILINE)
    assert row, f"{name} is not in the table of docs/experiments.md"
    hours = facts.get("cpu_hours", facts.get("gpu_hours"))
    assert re.search(rf"\| {re.escape(f'{hours:,}')} (CPU|GPU) \|$", row[0]), f"{hours} hours: {row[0]}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_sheet_of_an_experiment_fits_the_schema(name):
    """Nextflow would say so, too, but only of the sheet that is run."""
    columns = json.loads((ROOT / "assets" / "schema_input.json").read_text())["items"]
    with (ROOT / "assets" / "experiments" / f"{name}.csv").open(newline="") as file:
        rows = [{column: value for column, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows
    for row in rows:
        assert set(columns["required"]) <= row.keys() <= columns["properties"].keys(), row
        for column, value in row.items():
            rules = columns["properties"][column]
            assert re.search(rules.get("pattern", ""), value), f"{row['id']}: {column} {value!r}"
            assert value in rules.get("enum", [value]), f"{row['id']}: {column} {value!r}"
