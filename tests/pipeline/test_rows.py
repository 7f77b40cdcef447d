"""Rows that make what other rows use, and the columns that name it: what reaches the commands, and what is refused."""

import csv
from pathlib import Path

COLUMNS = [
    "id",
    "dataset",
    "input",
    "preset",
    "mode",
    "init",
    "overrides",
    "genes",
    "model_genes",
    "score_genes",
]
COLUMNS += ["targets", "obs", "embeddings", "add", "options", "conditions"]
FILES = (
    *(
        "kang.h5ad",
        "a.h5ad",
        "b.h5ad",
        "names.csv",
        "old.ckpt",
        "list.pkl",
        "wanted.csv",
        "types.npz",
        "l.csv",
    ),
    "targets.csv",
)


def row(name: str, mode: str, **cells: str) -> dict[str, str]:
    usual = {"id": name, "mode": mode, "dataset": "kang", "input": "kang.h5ad", "preset": "tiny"}
    return usual | cells


def maker(name: str, mode: str, **cells: str) -> dict[str, str]:
    return {"id": name, "mode": mode} | cells


def sheet(folder: Path, *rows: dict[str, str]) -> str:
    for name in FILES:
        (folder / name).touch()
    (folder / "mine.txt").write_text("G1\nG2\n")
    for name in ("old store", "encoder", "hub/data", "names"):
        (folder / name).mkdir(exist_ok=True, parents=True)
    (folder / "hub" / "data" / "train-00000-of-00001.parquet").touch()
    (folder / "names" / "old names.csv").touch()
    for name in ("conditions.parquet", "manifest.json"):
        (folder / "old store" / name).touch()
    with (folder / "sheet.csv").open("w", newline="") as handle:
        writer = csv.DictWriter(handle, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return "sheet.csv"


COUNTS = "evaluate.definition=cell-eval2;sample.values=counts"
ROWS = (
    maker("top", "vocabulary", input="kang.h5ad", preset="tiny", overrides="data.num_hvgs=64"),
    maker("all", "vocabulary", input="a.h5ad;b.h5ad", preset="tiny", add="top;mine.txt",
          options="join=union;assign=l.csv"),
    maker("vectors", "embed", input="names.csv", options="model=esm2-650m;local-only"),
    maker("own", "embed", input="names.csv", options="model=encoder"),
    maker("old", "import", input="old.ckpt", genes="list.pkl", options="weights=raw"),
    row("prior", "pretrain", dataset="kang|atlas", input="kang.h5ad|a.h5ad;b.h5ad", obs="|l.csv", genes="all"),
    # other numbers of highly variable genes: no matter where the genes are given
    row("tuned", "finetune", init="prior", genes="all", score_genes="top", overrides="data.num_hvgs=5",
        targets="targets.csv"),
    row("scratch", "train", genes="all", model_genes="top", score_genes="top", targets="targets.csv",
        embeddings="perturbation=vectors;cell_type=types.npz"),
    row("asked", "sample", init="scratch", embeddings="perturbation=vectors", options="pert-col=a drug",
        conditions="wanted.csv"),
    row("zero", "sample", init="old", genes="all", overrides="sample.guidance=2", score_genes="top",
        targets="targets.csv"),
    row("ready", "train", dataset="other", input="old store"),
    row("fetched", "linear", dataset="published", input="dataset:kang18-ifnb"),
    row("cells", "linear", dataset="tahoe", input="hub", overrides="data.gene_aliases=names/old names.csv"),
    row("narrow", "linear", dataset="two", genes="top"),
    row("broad", "linear", dataset="two", genes="all", score_genes="top"),
    row("counted", "train", dataset="counts", input="b.h5ad", overrides=COUNTS),
    row("again", "sample", dataset="counts", input="b.h5ad", preset="", init="counted", overrides="sample.num_steps=2"),
    row("ridge", "kernel-ridge", dataset="other", input="old store", embeddings="perturbation=vectors"),
)  # fmt: skip


def given(call: list[str], option: str) -> list[str]:
    return [call[i + 1] for i, word in enumerate(call) if word == option]


def test_what_rows_make_reaches_the_rows_that_name_it(program, fake, nextflow, tmp_path):
    nextflow.stand_ins = tmp_path / "nothing"
    fixed = (
        "--fetch_dir",
        "public",
        "--input",
        sheet(tmp_path, *ROWS),
        "--baselines",
        "none",
        "--ceiling",
        "false",
        "--sample_processes",
        "2",
    )
    ran = nextflow.run(*fixed, "--dask_scheduler", "tls://head:8786")
    assert ran.code == 0, ran.output
    calls = {call[call.index("--out") + 1]: call for call in fake() if "--out" in call}
    made = [call for out, call in calls.items() if call[0] == "preprocess" and not out.startswith("two-")]
    ends = next(out for out, call in calls.items() if call[0] == "ceiling")
    by_counts = [
        given(call, "--ends") for call in calls.values() if call[0] == "evaluate" and "--ends" in call
    ]
    assert by_counts == [[ends]] * 2, "the ends of the scale are made once for both"
    assert (ran.outdir / "ends" / ends).is_dir()
    assert not given(next(call for call in made if call[1].endswith("/b.h5ad")), "--genes")
    (parquet,) = (task for task in ran.tasks() if "PREPROCESS (tahoe-" in task["name"])
    work = Path(parquet["workdir"])
    assert (work / "input1" / "hub" / "data" / "train-00000-of-00001.parquet").is_file()
    assert '"gene_aliases":"aliases/old names.csv"' in (work / "recipe.yaml").read_text()
    assert (work / "aliases" / "old names.csv").resolve() == tmp_path / "names" / "old names.csv"
    assert any(call[1] == "input1/hub" for call in made)
    made = [call for call in made if not call[1].endswith(("/b.h5ad", "/hub"))]
    kang, atlas, fetched = sorted(made, key=lambda call: (not call[1].endswith("/kang.h5ad"), call[1]))
    assert fetched[1] == "input1/kang18_ifnb_muscat.h5ad"
    get, check = (call for call in fake() if call[0] == "data")
    assert get == ["data", "get", "kang18-ifnb", "--out", str(tmp_path / "public"), "--yes"]
    assert check[1:3] == ["check", "input1/kang18_ifnb_muscat.h5ad"], (
        "published data alone, before they are read"
    )
    assert len(made) == 3, "the raw files of a data set are read once for its four rows and the prior"
    for call in (kang, atlas):
        assert given(call, "--genes") == ["genes/all"]
        assert given(call, "--dask-scheduler") == ["tls://head:8786"]
        assert given(call, "--memory-limit") == ["2457MiB"], "four fifths of the job's memory"
    assert (given(kang, "--obs"), given(atlas, "--obs")) == ([], ["obs1/l.csv"])
    assert given(calls["all"], "--add") == ["added1/top", "added2/mine.txt"]
    assert (given(calls["all"], "--assign"), given(calls["all"], "--join")) == (["given1/l.csv"], ["union"])
    assert given(calls["vectors.parquet"], "--model") == ["esm2-650m"]
    assert "--local-only" in calls["vectors.parquet"]
    assert given(calls["own.parquet"], "--model") == ["given1/encoder"], (
        "a folder comes along, a name does not"
    )
    assert calls["old"][:2] == ["import-checkpoint", "checkpoint/old.ckpt"]
    assert (given(calls["old"], "--genes"), given(calls["old"], "--weights")) == (["genes/list.pkl"], ["raw"])
    scratch = calls["scratch"]
    assert given(scratch, "--embedding") == [
        "perturbation=tables1/vectors.parquet",
        "cell_type=tables2/types.npz",
    ]
    assert (given(scratch, "--genes"), given(scratch, "--scored-on")) == (["genes/top"], ["scored/top"])
    assert given(calls["tuned"], "--scored-on") == ["scored/top"]
    asked, zero = calls["asked.h5ad"], calls["zero.h5ad"]
    assert given(asked, "--conditions") == ["conditions/wanted.csv"]
    assert (given(asked, "--embedding"), given(asked, "--pert-col")) == (
        ["perturbation=tables1/vectors.parquet"],
        ["a drug"],
    )
    assert not given(asked, "--split")
    assert zero[1] == "bundle/old"
    assert (given(zero, "--set"), given(zero, "--config")) == (["sample.guidance=2"], [])
    assert given(zero, "--processes") == ["2"]
    scored = [call for call in fake() if call[0] == "evaluate"]
    names = {call[call.index("--out") + 1].removesuffix(".metrics") for call in scored}
    assert {name.split(".")[-1] for name in names} == {
        "tuned",
        "scratch",
        "zero",
        "ready",
        "ridge",
        "fetched",
        "cells",
        "narrow",
        "broad",
        "counted",
        "again",
    }
    narrow, broad = (call for call in scored if call[2].startswith("two-"))
    assert narrow[2] == broad[2], "one comparison, with the store of the scored genes"
    assert not given(broad, "--genes")
    assert given(calls[broad[2]], "--genes") == ["genes/top"]
    for call in scored:
        if call in (narrow, broad):
            continue
        ready = call[2] == "old store" or call[2].startswith(("published-", "counts-", "tahoe-"))
        assert given(call, "--genes") == ([] if ready else ["genes/top"])
        assert given(call, "--targets") == ([] if ready else ["targets/targets.csv"])
    assert calls["ready"][1] == "old store", "a ready store is used as it is"
    assert not list((ran.outdir / "stores").glob("other-*"))
    assert {p.name for p in (ran.outdir / "models").iterdir()} == {
        "counted",
        "old",
        "prior",
        "ready",
        "scratch",
        "tuned",
    }
    assert {p.name for p in (ran.outdir / "vocabularies").iterdir()} == {"all", "top"}
    assert all((ran.outdir / "embeddings" / f"{name}.parquet").is_file() for name in ("vectors", "own"))
    assert (ran.outdir / "predictions" / "asked.h5ad").is_file()
    (tmp_path / "types.npz").write_text("changed")
    (ran.outdir / "report.txt").unlink()  # the stand-in's report lists no files
    again = nextflow.run(*fixed, "-resume")
    assert again.code == 0, again.output
    assert [name for name in again.ran() if name.startswith(("TRAIN", "PRETRAIN", "FINETUNE"))] == [
        "TRAIN (scratch)"
    ]


def test_published_data_with_a_problem_are_not_preprocessed(program, fake, nextflow, tmp_path):
    names = ("refused", "sound")
    rows = [row(name, "linear", dataset=name, input="dataset:kang18-ifnb") for name in names]
    ran = nextflow.run("--input", sheet(tmp_path, *rows), "--baselines", "none", "--ceiling", "false")
    assert ran.code != 0
    assert "CHECK (refused-" in ran.output
    made = {name.split("-")[0] for name in ran.ran()}
    assert {"CHECK (sound", "PREPROCESS (sound", "EVALUATE (sound"} <= made
    assert not any("refused" in name for name in made)
    (report,) = (task for task in ran.tasks() if task["name"] == "REPORT")
    lines = (Path(report["workdir"]) / "expected.csv").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("refused,"))
    assert line.split(",")[3].startswith("CHECK.refused-"), "the report looks for the reason there first"


def test_every_mistake_in_what_rows_name_is_told_at_once(questions, tmp_path):
    (tmp_path / "bundle").mkdir()
    for name in ("config.json", "manifest.json"):
        (tmp_path / "bundle" / name).write_text("{}")
    (tmp_path / "bundle" / "genes.json").write_text('["G1", "G9"]')
    rows = (
        maker("v", "vocabulary", input="kang.h5ad", add="w", init="x"),
        maker("w", "vocabulary", input="no.h5ad", add="v", options="composites=0;top=3"),
        maker("e", "embed", input="names.csv"),
        row("a", "train", embeddings="perturbation=no.npz", genes="none.txt"),
        row("b", "linear", embeddings="cell_type=types.npz", model_genes="mine.txt"),
        row("c", "train", input="old store", genes="mine.txt"),
        row("d", "train", conditions="wanted.csv", options="pert-col=x"),
        row("f", "finetune", init="bundle", score_genes="mine.txt"),
        maker("g", "train", input="kang.h5ad"),
        row("h", "pretrain", score_genes="mine.txt", obs="l.csv|l.csv"),
        row("i", "train", embeddings="drug=types.npz"),
        row("j", "kernel-ridge"),
        maker("k", "embed", input="names.csv", options="model=./nowhere"),
        row(
            "l",
            "train",
            overrides="data.gene_aliases=no.csv;evaluate.genes=mine.txt;evaluate.targets=targets.csv",
        ),
        row("m", "train", input="dataset:tahoe100m-parquet"),
    )
    told = questions.refusal(tmp_path, input=str(tmp_path / sheet(tmp_path, *rows)))
    for message in (
        "line 2 (v): 'init' is not for rows of mode vocabulary",
        "line 2 (v): add 'w': that row adds to its list itself",
        "line 3 (w): no such input 'no.h5ad'",
        "line 3 (w): option 'composites=0' does not fit",
        "line 3 (w): rows of mode vocabulary have no option 'top'; options: composites, join, assign",
        "line 4 (e): 'options' names no model",
        "line 5 (a): no such semantic table 'no.npz'",
        "line 5 (a): no such gene list 'none.txt'",
        "line 6 (b): 'embeddings' is for train, pretrain, finetune, sample, kernel-ridge and import rows",
        "line 6 (b): 'model_genes' is for train and pretrain rows",
        "line 7 (c): 'genes' is for raw counts, and old store is a store: name the genes of the model in model_genes",
        "line 8 (d): 'conditions' is for sample rows",
        "line 8 (d): rows of mode train have no option 'pert-col'; they have none",
        "line 9 (f): 1 of the 2 genes of score_genes mine.txt are not in bundle, so that predictions could not be "
        "scored: G2",
        "line 10 (g): 'dataset' is empty",
        "line 11 (h): 'score_genes' is for rows that are scored",
        "line 11 (h): 'obs' and 'input' name different numbers of data sets",
        "line 13 (j): 'embeddings' names no vectors of perturbations",
        "line 14 (k): no such model './nowhere'",
        "line 15 (l): no such file of data.gene_aliases 'no.csv'",
        "line 15 (l): evaluate.genes: name 'mine.txt' in the column score_genes",
        "line 15 (l): evaluate.targets: name 'targets.csv' in the column targets",
        "line 16 (m): data set 'tahoe100m-parquet' is a folder of several data sets: name the folder tahoe100m that",
        "line 12 (i): embeddings 'drug=types.npz' does not fit",
    ):
        assert message in told, told


def test_what_predicts_no_counts_is_not_scored_by_the_rules_of_counts(questions, tmp_path):
    rows = (
        row("a", "train", overrides="evaluate.definition=cell-eval2"),
        row("b", "train", overrides=COUNTS),
    )
    told = questions.refusal(
        tmp_path, input=str(tmp_path / sheet(tmp_path, *rows)), baselines="control", ceiling=True
    )
    assert "scores counts, but 'control' predicts log1p values: leave it out (--baselines none)" in told
    assert "scores counts, but 'a' predicts log1p values: set sample.values=counts" in told
    assert "'b'" not in told
