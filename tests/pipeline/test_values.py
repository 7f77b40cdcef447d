"""What people write in sheets, parameters and names of folders: it is refused, or arrives as it was; it never runs."""

import json
import os
from pathlib import Path

COLUMNS = "id,dataset,input,preset,mode,init,overrides,split,genes,obs,embeddings,script,python,arm,seed"
ATTACKS = ("a${A=$(touch canary)}${A@P}.x", "$(touch canary).x", "a{b,c}.x", "*.x", "[a].x", "a?.x")


def row(**cells: str) -> str:
    """One line of a sheet with all columns, every cell in quotes."""
    usual = {"dataset": "kang", "input": "kang.h5ad", "preset": "tiny", "mode": "train"} | cells
    return ",".join('"{}"'.format(usual.get(name, "").replace('"', '""')) for name in COLUMNS.split(","))


def canaries(folder: Path) -> list[Path]:
    return list(folder.rglob("*canary"))


def test_a_sheet_cannot_run_commands(questions, tmp_path):
    # a file of each name is there: it is the name that is refused
    for name in (*ATTACKS, "kang.h5ad"):
        (tmp_path / name).touch()
    for name in ATTACKS:
        (tmp_path / f"{name}.bundle").mkdir()
        (tmp_path / f"{name}.bundle" / "manifest.json").touch()
    rows, expected = [], []
    for i, name in enumerate(ATTACKS):
        columns = {
            "input": {"input": name},
            "split": {"split": name},
            "genes": {"genes": name},
            "obs": {"obs": name},
            "embeddings": {"embeddings": f"perturbation={name}"},
            "init": {"init": f"{name}.bundle", "mode": "finetune"},
            "script": {"script": name, "mode": "script"},
        }
        for column, cells in columns.items():
            rows.append(row(id=f"{column}-{i}", **cells))
            expected.append(f"line {len(rows) + 1} ({column}-{i}): {column} '{name}")
    others = {
        "id": "$(touch canary)",
        "dataset": "$(touch canary)",
        "python": "$(touch canary)",
        "arm": "'; touch canary; '",
        "seed": "12345678901234567890",
        "preset": "$(touch canary)",
        "overrides": "$(touch canary)",
    }
    rows += [row(**({"id": f"other-{column}"} | {column: value})) for column, value in others.items()]
    (tmp_path / "sheet.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    told = questions.refusal(tmp_path, stub=False, input=str(tmp_path / "sheet.csv"))
    for message in expected:
        assert message in told
    for column in others:
        assert f"{column} '" in told or "seed 12345678901234567890 is too large" in told
    assert told.count("a path must not hold $ * ? [ ] { }") == len(expected)
    assert not canaries(tmp_path)
    assert not (tmp_path / "out").exists()


def test_parameters_cannot_run_commands_and_every_mistake_in_them_is_told_at_once(
    nextflow, questions, tmp_path
):
    (tmp_path / "kang.h5ad").touch()
    (tmp_path / "sheet.csv").write_text("\n".join([COLUMNS, row(id="a")]) + "\n")
    command = "x\ntouch canary\n"
    given = dict.fromkeys(
        ("ckpt_dir", "bind", "container", "baseline_images", "slurm_account", "cpu_queue", "gpu_queue",
         "cpu_options", "gpu_options", "gpu_container_options", "scratch", "title", "against"), command,
    )  # fmt: skip
    (tmp_path / "given.json").write_text(json.dumps(given))
    wrong = ("--alhpa", "0.1", "--alpha", "3", "--num-gpus", "2", "--train_time", "soon", "--device", "tpu",
        "--data_seed", "-1")  # fmt: skip
    ran = nextflow.run("--input", "nowhere.csv", *wrong, "-params-file", "given.json")
    assert ran.code != 0
    for message in (
        "unknown parameter --alhpa, did you mean --alpha?",
        "--alpha: must be below 1, got 3",
        "did you mean --num_gpus?",
        "--train_time: 'soon'",
        "--device: must be one of auto, cpu, cuda, got 'tpu'",
        "--data_seed: must be at least 0",
        "--input: no such file 'nowhere.csv'",
    ):
        assert message in ran.output
    assert "Submitted" not in ran.output
    for name in given:
        assert f"--{name} 'x\\u000atouch canary\\u000a'" in ran.output.replace(f"--{name}:", f"--{name}"), (
            name
        )
    options = {"slurm_account": "a b", "gpu_queue": "$(touch canary)", "cpu_options": "`touch canary`"}
    options |= {"gpu_container_options": "--nv; touch canary", "scratch": "${A@P}", "report_stamp": "../../x"}
    options |= {
        "container": "docker://x$(touch canary)",
        "bind": "'; touch canary; '",
        "data_seed": 5_000_000_000,
        "ckpt_dir": "a{b,c}",
        "num_gpus": "four",
        "check_slurm": "no",
        "alpha": "1.5",
    }
    told = questions.refusal(tmp_path, stub=False, input=str(tmp_path / "sheet.csv"), **options)
    for name in options:
        assert f"--{name}" in told, told
    assert not canaries(tmp_path)


def test_odd_names_arrive_as_they_are(program, nextflow_in, tmp_path, fake):
    odd = "it's odd & (so) |<>`touch canary`; é 中 \\ !#%~"
    folder = tmp_path / f'{odd} "quoted"'
    folder.mkdir()
    plain = odd.replace(";", "").replace("|", "")  # which separate inputs
    for name in (
        f"{plain}.h5ad",
        f"{odd} split.toml",
        f"-{odd}.txt",
        f"{plain}.npz",
        f"~{odd}.py",
        "recipe.yaml",
    ):
        (folder / name).write_text("mine")
    rows = [
        row(id="model", input=f"{plain}.h5ad", split=f"{odd} split.toml", genes=f"-{odd}.txt",
            embeddings=f"perturbation={plain}.npz"),
        row(id="own", input=f"{plain}.h5ad", mode="script", script=f"~{odd}.py", python="my python é"),
        row(id="same", input=f"{plain}.h5ad", mode="script", script="recipe.yaml", genes="recipe.yaml"),
    ]  # fmt: skip
    (folder / "sheet.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    title = 'It\'s $(touch canary) "so" `touch canary` \\ {a,b} * é'
    nextflow = nextflow_in(folder)
    out = "o'; touch canary; '"
    # numbers and switches as text, which the strict parser makes of the command line from Nextflow 25.10 on
    texts = {"ceiling": "false", "data_seed": "7", "alpha": "0.2", "evaluation_shards": "1", "sample_shards": "2",
        "preprocess_cpus": "1", "train_cpus": "1", "train_retries": "3", "job_arrays": "false",
        "num_nodes": "1"}  # fmt: skip
    (folder / "given.json").write_text(json.dumps(texts))
    given = ("--input", "sheet.csv", "--baselines", "none", "-params-file", "given.json", f"--title={title}")
    ran = nextflow.run(*given, "--outdir", out, "--ckpt_dir", "c'; touch canary; '")
    assert ran.code == 0, ran.output
    calls = {call[0]: call for call in fake() if call[0] not in ("baseline", "preprocess")}
    assert calls["report"][calls["report"].index("--title=" + title)]
    (logs,) = (calls["report"][i + 1] for i, word in enumerate(calls["report"]) if word == "--logs")
    assert Path(logs) == folder / out / "logs"
    assert f"perturbation=tables1/{plain}.npz" in calls["train"]
    (kept,) = (calls["train"][i + 1] for i, word in enumerate(calls["train"]) if word == "--checkpoints")
    assert kept.startswith(str(folder / "c'; touch canary; '" / "model-"))
    assert any(f"toml/{odd} split.toml" in call for call in fake() if call[0] == "split")
    made = [call for call in fake() if call[0] == "preprocess"]
    assert {call[call.index("--genes") + 1] for call in made if "--genes" in call} == {
        f"genes/-{odd}.txt", "genes/recipe.yaml",
    }  # fmt: skip
    assert {call[1] for call in made} == {f"input1/{plain}.h5ad"}
    scripts = [call for call in fake() if call[0] == "baseline"]
    assert {call[call.index("--script") + 1] for call in scripts} == {
        f"script/~{odd}.py",
        "script/recipe.yaml",
    }
    assert [call[call.index("--python") + 1] for call in scripts if "--python" in call] == ["my python é"]
    assert not canaries(tmp_path)
    assert (folder / "recipe.yaml").read_text() == "mine"
    assert (folder / out / "report.html").is_file()
    assert os.listdir(folder / out / "models") == ["model"]  # noqa: PTH208
