"""Publishing replaces what an earlier run of the workflow made, and nothing else that lies in outdir."""

import fcntl
from pathlib import Path

HEADER = "id,dataset,input,preset,mode,init,seed"
FEW = ("-stub", "--baselines", "control", "--ceiling", "false", "--input")


def sheet(folder: Path, *rows: str) -> str:
    (folder / "kang.h5ad").touch()
    path = folder / "sheet.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_what_others_put_into_outdir_stays_as_it_is(nextflow, questions, tmp_path):
    path = sheet(tmp_path, "m,kang,kang.h5ad,tiny,train,,", "other,kang,kang.h5ad,tiny,train,,")
    foreign = {
        "report.html": "mine",
        "report_tables/mine.csv": "mine",
        "models/m/notes.txt": "three years",
        "predictions/other.h5ad": "from elsewhere",
        "logs/TRAIN.m.log": "mine",
        "pipeline_info/design.csv": "mine",
    }
    others = {
        "diary.txt": "nothing that a run writes",
        "models/diary.txt": "nothing that a run writes",
        "models/another/model.safetensors": "nothing that a run writes",
    }
    first = tmp_path / "first"
    put(first, foreign | others)
    told = questions.refusal(tmp_path, input=path, outdir=str(first))
    assert "move them away, or name another --outdir" in told
    for name in foreign | others:
        assert (f"{first / name}" in told) == (name in foreign), f"{name}: {told}"
    found = contents(first)
    assert {name: found[name].decode() for name in foreign | others} == foreign | others

    out = tmp_path / "out"
    put(out, others)
    for _ in range(2):  # without -resume, so that all is published again
        ran = nextflow.run(*FEW, path)
        assert ran.code == 0, ran.output
        assert {name: contents(out)[name].decode() for name in others} == others

    mine = dict.fromkeys(
        ("models/m/notes.txt", "metrics/m.metrics/own.csv", "report_figures/own.svg"), "mine"
    )
    put(out, mine)
    with (out / "pipeline_info" / ".lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        busy = questions.refusal(tmp_path, input=path)
    assert "another run of the workflow writes to --outdir" in busy
    told = questions.refusal(tmp_path, input=path)
    for name in mine:
        assert f"{out / name}" in told
    assert {name: contents(out)[name].decode() for name in mine} == mine


def test_results_do_not_go_where_inputs_lie_nor_onto_each_other(questions, tmp_path):
    (tmp_path / "bundle").mkdir()
    rows = ("m,kang,kang.h5ad,tiny,train,,", "M,kang,kang.h5ad,tiny,train,,", "recipe.yaml,kang,kang.h5ad,tiny,train,,",
            "x.part-0-of-2,kang,kang.h5ad,tiny,train,,")  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kang.h5ad").touch()
    (tmp_path / "data" / "sheet.csv").write_text("\n".join([HEADER, "m,kang,kang.h5ad,tiny,train,,"]) + "\n")
    told = questions.refusal(tmp_path, input=sheet(tmp_path, *rows), outdir=str(tmp_path))
    for message in (
        "is or holds the folder that Nextflow was started in",
        "models/m and models/M would be one result",
        "id 'recipe.yaml': files of tasks are named so",
        "id 'x.part-0-of-2': files of tasks are named so",
    ):
        assert message in told
    told = questions.refusal(
        tmp_path, input=str(tmp_path / "data" / "sheet.csv"), outdir=str(tmp_path / "data")
    )
    assert "data/sheet.csv, which this run reads" in told
