"""What the workflow makes of a samplesheet, without computing: stub runs and refusals."""

import json
from pathlib import Path
from urllib.parse import unquote

HEADER = "id,dataset,input,preset,mode,init,transfer,overrides,split,genes,seed"


def sheet(folder: Path, *rows: str, header: str = HEADER) -> str:
    path = folder / "sheet.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    for name in ("kang.h5ad", "a.h5ad", "b.h5ad"):
        if not (folder / name).exists():  # -resume compares times
            (folder / name).touch()
    return str(path)


def check_crate(outdir: Path) -> None:
    """Look whether the results are described as the profile Workflow Run Crate asks."""
    crate = json.loads((outdir / "ro-crate-metadata.json").read_text())
    graph = {entity["@id"]: entity for entity in crate["@graph"]}
    assert len(graph) == len(crate["@graph"]), "each is described once"
    linked = {link["@id"] for entity in graph.values() for value in entity.values()
              for link in (value if isinstance(value, list) else [value])
              if isinstance(link, dict)}  # fmt: skip
    assert [one for one in linked - set(graph) if not one.startswith("http")] == []
    root = graph[graph["ro-crate-metadata.json"]["about"]["@id"]]
    parts = {part["@id"] for part in root["hasPart"]}
    assert {"report.html", "models/tuned/", "pipeline_info/main.nf"} < parts
    assert all((outdir / unquote(part)).exists() for part in parts)
    action = graph[root["mentions"]["@id"]]
    assert action["@type"] == "CreateAction"
    assert action["instrument"] == root["mainEntity"]
    assert graph["#param-baselines"]["value"] == "control,linear"
    assert action["endTime"] > action["startTime"]


def test_runs_share_what_they_have_in_common(nextflow, tmp_path):
    (tmp_path / "zero.toml").write_text("[zeroshot]\n")
    (tmp_path / "mine.yaml").write_text("base: tiny\ndata: {num_hvgs: 64}\nmodel: {depth: 3}\n")
    rows = (
        "prior,kang|atlas,kang.h5ad|a.h5ad;b.h5ad,tiny,pretrain,,,atlas:data.control=PBS,,,1",
        "tuned,kang,kang.h5ad,tiny,finetune,prior,new-genes,,,,1",
        "scratch,kang,kang.h5ad,tiny,train,,,model.depth=1,,,1",
        "again,kang,kang.h5ad,mine.yaml,train,,,,,,2",  # equal data settings by another way
        "zero,kang,kang.h5ad,tiny,train,,,,zero.toml,,1",
        "blind,kang,kang.h5ad,tiny,train,,,data.hvg_cells=train,,,1",
        "lin,kang,kang.h5ad,tiny,linear,,,,,,1",
    )
    ran = nextflow.run("-stub", "--input", sheet(tmp_path, *rows), "--baselines", "control,linear")
    assert ran.code == 0, ran.output
    names = [name.split(" ")[0] for name in ran.ran()]
    count = {name: names.count(name) for name in set(names)}
    assert count["PREPROCESS"] == 3  # kang, kang with genes of training cells, atlas
    assert (count["SPLIT"], count["SPLIT_FIRST"]) == (2, 1)  # rule, TOML; before the store
    assert (count["PRETRAIN"], count["FINETUNE"], count["TRAIN"], count["SAMPLE"]) == (1, 1, 4, 5)
    assert count["BASELINE"] == 6  # two for each store with split; the row's own stands in for 'linear'
    assert count["EVALUATE"] == 5 + 6
    assert count["CEILING"] == count["CALIBRATE"] == 3
    assert count["REPORT"] == 1
    assert {p.name for p in ran.outdir.iterdir()} == {
        *(
            "calibration",
            "logs",
            "metrics",
            "models",
            "pipeline_info",
            "predictions",
            "report.html",
            "report.txt",
        ),
        *("report.html.manifest.json", "ro-crate-metadata.json"),
        *("report_figures", "report_mqc", "report_tables"),
        *("splits", "statistics", "stores"),
    }
    assert {p.name for p in (ran.outdir / "models").iterdir()} == {
        "prior",
        "tuned",
        "scratch",
        "again",
        "zero",
        "blind",
    }
    records = {p.name.split("_")[0] for p in (ran.outdir / "pipeline_info").glob("[!.]*")}
    assert records == {"trace", "timeline", "report", "dag", "run", "design.csv", "versions.yml", "main.nf"}
    check_crate(ran.outdir)
    scores = {p.name for p in (ran.outdir / "metrics").iterdir()}
    predictions = {p.name for p in (ran.outdir / "predictions").iterdir()}
    some = sheet(tmp_path, *(row for row in rows if row.startswith(("scratch", "lin"))))
    spread = ("--baselines", "control,linear", "--evaluation_shards", "3", "--sample_shards", "2", "-resume")
    parts = nextflow.run("-stub", "--input", some, *spread)
    names = [name.split(" ")[0] for name in parts.ran()]
    count = {name: names.count(name) for name in set(names)}
    # the calibration is told the name of its comparison, which is short where a data set has one
    merged = {"MERGE_METRICS": 3 + 1, "MERGE_PREDICTIONS": 1, "CALIBRATE": 1, "REPORT": 1}
    assert count == {"SAMPLE": 2, "EVALUATE": 3 * 3, "CEILING": 3} | merged, parts.output
    assert {p.name for p in (ran.outdir / "metrics").iterdir()} == scores, "parts are not published"
    assert {p.name for p in (ran.outdir / "predictions").iterdir()} == predictions


def test_the_old_parser_takes_the_workflow_too(nextflow, tmp_path):
    rows = ("prior,kang,kang.h5ad,tiny,pretrain,,,,,,", "tuned,kang,kang.h5ad,tiny,finetune,prior,,,,,")
    rows += ("drawn,screen,simulate:tiny,tiny,mean-overall,,,,,,",)
    rows += ("other,screen,simulate:tiny,tiny,state,,,baseline.settings=quick,,,",)
    ran = nextflow.run(
        "-stub", "--input", sheet(tmp_path, *rows), "--baselines", "none", "--sample_shards", "2", parser="v1"
    )
    assert ran.code == 0, ran.output
    assert {"FINETUNE (tuned)", "MERGE_PREDICTIONS (tuned.h5ad)", "REPORT"} < set(ran.ran())
    assert sum(name.startswith(("SIMULATE", "BASELINE", "EXTERNAL")) for name in ran.ran()) == 3


def test_every_mistake_in_the_sheet_is_told_at_once(questions, stand_ins, tmp_path):
    rows = [
        "a,kang,nothere.h5ad,tiny,train,,,,,,",
        "a,kang,kang.h5ad,tinny,trian,,,,,,",
        "linear,kang,kang.h5ad,tiny,train,,,train.max_stepz=3,no.toml,,",
        "d,kang,kang.h5ad,tiny,finetune,zz,,steps=4,,,-3",
        "p,kang,kang.h5ad,tiny,train,,,kagn:data.control=PBS;kang:train.max_steps=3,,,",
        "e e,,kang.h5ad|a.h5ad,tiny,train,d,,,,,",
        "s,kang,dataset:kang18-ifn,tiny,train,,,,,,",
        "t,kang,dataset:norman19,tiny,train,,,,,,",  # the only one that is nowhere
        "u,kang,kang.h5ad,tiny,train,,,,,,,perturbation=no.npz",
        "v,kang,kang.h5ad,tiny,train,,,,,,,drug=drugs.parquet",
        "w,kang,kang.h5ad,tiny,linear,,,,,,,perturbation=drugs.parquet;cell_type=types.npz",
        "m,kang,kang.h5ad,tiny,cpa,,,baseline.options.epocs=3,,,,,mine.py",
        "n,kang,kang.h5ad,tiny,script",
        "o,kang,kang.h5ad,tiny,script,,,,,,,,none.py,a'b",
        "state,kang,kang.h5ad,tiny,cpa,,,train.betas.x=1",
        "q,kang,kang.h5ad,tiny,cpa,,,baseline.settingz=quick",
    ]
    for name in ("drugs.parquet", "types.npz"):
        (tmp_path / name).touch()
    header = f"{HEADER},embeddings,script,python"
    rows = [row + "," * (header.count(",") - row.count(",")) for row in rows]
    told = questions.refusal(tmp_path, input=sheet(tmp_path, *rows, header=header))
    for message in (
        "line 2 (a): no such input 'nothere.h5ad'",
        "line 3 (a): unknown mode 'trian'",
        "line 3 (a): no preset or file 'tinny'",
        "line 3 (a): duplicate id 'a'",
        "line 4 (linear): no such split 'no.toml'",
        "line 4 (linear): unknown recipe key 'train.max_stepz', did you mean 'train.max_steps'?",
        "line 4 (linear): id 'linear' is the name of a method",
        "line 5 (d): unknown init 'zz'",
        "line 5 (d): override 'steps=4'",
        "line 5 (d): seed '-3'",
        "line 6 (p): override for the data set 'kagn'; this row's: kang",
        "line 6 (p): override 'kang:train…': train is of the network",
        "line 7 (e e): 'dataset' is empty",
        "line 7 (e e): only a pretrain row can have several data sets",
        "line 8 (s): unknown data set 'kang18-ifn', did you mean 'kang18-ifnb'?; data sets: ",
        f"line 9 (t): data set 'norman19': no NormanWeissman2019_filtered.h5ad in {stand_ins} or ",
        "put it into a folder and name that in PERTURBDIFF_DATA",
        "line 10 (u): no such semantic table 'no.npz'",
        "line 11 (v): embeddings 'drug=drugs.parquet' does not fit",
        "line 12 (w): 'embeddings' is for train, pretrain, finetune, sample, kernel-ridge and import rows",
        "line 13 (m): cpa has no option 'epocs', did you mean 'epochs'?; perturbdiff baseline show cpa",
        "line 13 (m): 'script' is for rows of mode script",
        "line 13 (m): no such script 'mine.py'",
        "line 14 (n): 'script' is empty",
        "line 15 (o): no such script 'none.py'",
        "line 15 (o): python 'a'b' does not fit",
        "line 16 (state): id 'state' is the name of a method",
        "line 16 (state): override 'train.betas.x=1': train.betas has no parts",
        "line 17 (q): unknown recipe key 'baseline.settingz', did you mean 'baseline.settings'?",
    ):
        assert message in told, told


def test_an_unknown_column_is_told(questions, tmp_path):
    told = questions.refusal(tmp_path, input=sheet(tmp_path, "a,kang,train", header="id,dataset,mood"))
    assert "unknown column 'mood'" in told
    assert "column 'input' is missing" in told


OTHERS = "id,dataset,input,preset,mode,overrides,script,python,seed"


def test_methods_of_others_and_several_seeds_of_a_baseline(nextflow, tmp_path):
    (tmp_path / "mine.py").write_text("1")
    quick = "baseline.settings=quick"
    rows = [
        f"cpa-0,kang,kang.h5ad,tiny,cpa,{quick},,,0",
        f"cpa-1,kang,kang.h5ad,tiny,cpa,{quick},,,1",
        "mine,kang,kang.h5ad,tiny,script,baseline.options.penalty=0.1,mine.py,python3,",
        "lin-0,kang,kang.h5ad,tiny,linear,,,,0",
        "lin-1,kang,kang.h5ad,tiny,linear,,,,1",
        "model,kang,kang.h5ad,tiny,train,,,,0",
    ]
    given = (
        "-stub",
        "--input",
        sheet(tmp_path, *rows, header=OTHERS),
        "--baselines",
        "control,linear,cpa,state",
        "--ceiling",
        "false",
    )
    ran = nextflow.run(*given)
    assert ran.code == 0, ran.output

    def named(process: str, ran=ran) -> list[str]:
        return [name.split(".")[-1].strip(")") for name in ran.ran() if name.startswith(process)]

    assert named("EXTERNAL") == ["cpa-0", "cpa-1", "mine", "state"], "a row stands in for the automatic one"
    assert named("BASELINE") == ["control", "lin-0", "lin-1"]
    assert len(named("EVALUATE")) == 8
    (report,) = (t["workdir"] for t in ran.tasks() if t["process"] == "REPORT")
    assert len(list(Path(report).glob("records/*.h5ad.run.json"))) == 8
    assert (ran.outdir / "predictions").is_dir()
    rows[1] = rows[1].replace(quick, quick + ";baseline.options.n_latent=32")
    (tmp_path / "mine.py").write_text("another")
    (tmp_path / "sheet.csv").write_text("\n".join([OTHERS, *rows]) + "\n")
    again = nextflow.run(*given, "-resume")
    assert named("EXTERNAL", again) == ["cpa-1", "mine"]
    assert not named("BASELINE", again)
    assert not named("TRAIN", again)


def test_a_method_that_is_not_installed_is_told_before_any_task(questions, tmp_path):
    given = sheet(tmp_path, "a,kang,kang.h5ad,tiny,cpa,,,,", header=OTHERS)
    told = questions.refusal(tmp_path, stub=False, input=given)
    assert f"cpa is not installed in {questions.methods}: perturbdiff baseline install cpa" in told
