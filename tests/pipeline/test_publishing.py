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


def test_what_others_put_into_outdir_stays_as_it_is(nextflow, tmp_path):
    given = (*FEW, sheet(tmp_path, "m,kang,kang.h5ad,tiny,train,,", "other,kang,kang.h5ad,tiny,train,,"))
    out = tmp_path / "out"
    foreign = {
        "report.html": "mine",
        "report_tables/mine.csv": "mine",
        "models/m/notes.txt": "three years",
        "predictions/other.h5ad": "from elsewhere",
        "logs/TRAIN.m.log": "mine",
        "pipeline_info/design.csv": "mine",
        "diary.txt": "nothing that a run writes",
        "models/diary.txt": "nothing that a run writes",
        "models/another/model.safetensors": "nothing that a run writes",
    }
    for name, text in foreign.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    ran = nextflow.run(*given)
    assert ran.code != 0
    assert "move them away, or name another --outdir" in ran.output
    for name, text in foreign.items():
        assert (f"{out / name}" in ran.output) == (not text.startswith("nothing")), f"{name}: {ran.output}"
    found = contents(out)
    assert {name: found[name].decode() for name in foreign} == foreign
    assert "Submitted" not in ran.output

    for name, text in foreign.items():
        if not text.startswith("nothing"):
            (out / name).unlink()
    ran = nextflow.run(*given)
    assert ran.code == 0, ran.output
    others = {name: text for name, text in foreign.items() if text.startswith("nothing")}
    again = nextflow.run(*given)  # without -resume, so that all is published again
    assert again.code == 0, again.output
    assert {name: contents(out)[name].decode() for name in others} == others

    put = {
        "models/m/notes.txt": "mine",
        "metrics/m.metrics/own.csv": "mine",
        "report_figures/own.svg": "mine",
    }
    for name, text in put.items():
        (out / name).write_text(text)
    with (out / "pipeline_info" / ".lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        busy = nextflow.run(*given)
    assert busy.code != 0
    assert "another run of the workflow writes to --outdir" in busy.output
    ran = nextflow.run(*given)
    assert ran.code != 0
    for name in put:
        assert f"{out / name}" in ran.output
    assert {name: contents(out)[name].decode() for name in put} == put


def test_results_do_not_go_where_inputs_lie_nor_onto_each_other(nextflow, tmp_path):
    (tmp_path / "bundle").mkdir()
    rows = ("m,kang,kang.h5ad,tiny,train,,", "M,kang,kang.h5ad,tiny,train,,", "recipe.yaml,kang,kang.h5ad,tiny,train,,",
            "x.part-0-of-2,kang,kang.h5ad,tiny,train,,")  # fmt: skip
    given = (*FEW, sheet(tmp_path, *rows))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sheet.csv").write_text("\n".join([HEADER, "m,kang,kang.h5ad,tiny,train,,"]) + "\n")
    ran = nextflow.run(*given, "--outdir", ".")
    assert ran.code != 0
    for message in (
        "is or holds the folder that Nextflow was started in",
        "models/m and models/M would be one result",
        "id 'recipe.yaml': files of tasks are named so",
        "id 'x.part-0-of-2': files of tasks are named so",
    ):
        assert message in ran.output
    ran = nextflow.run(*FEW, "data/sheet.csv", "--outdir", "data")
    assert ran.code != 0
    assert "data/sheet.csv, which this run reads" in ran.output
