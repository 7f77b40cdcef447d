"""The workflow for real on a tiny simulated screen: everything once, nothing twice, and on after a kill."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import anndata
import pytest

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.evaluation_stage import evaluate

ROOT = Path(__file__).parents[2]

SCREEN = "split.num_held_out=1;split.train_fraction=0.3;simulate.cells=900;simulate.genes=120"
SCREEN += ";simulate.knockdowns=4;simulate.drugs=1;simulate.cytokines=1"
"""8 perturbations: what costs is the comparison of all with all."""
FEW = ("--baselines", "control", "--input")


def sheet(folder, name: str, more: str = "") -> str:
    path = folder / f"{name}.csv"
    row = f"model,screen,simulate:tiny,tiny,train,{SCREEN}{more}"
    path.write_text(f"id,dataset,input,preset,mode,overrides\n{row}\n")
    return str(path)


@pytest.fixture(scope="module")
def first(nextflow_in, tmp_path_factory, quick_program):
    """A run, and the Nextflow that ran it. Tasks start at once; the program as it is installed: test_single_file.py."""
    folder = tmp_path_factory.mktemp("run")
    nextflow = nextflow_in(folder)
    nextflow.path.insert(0, quick_program)
    return nextflow, nextflow.run(*FEW, sheet(folder, "tiny"))


@pytest.mark.slow
def test_raw_counts_become_a_report(first):
    _, ran = first
    assert ran.code == 0, ran.output
    assert "<html" in (ran.outdir / "report.html").read_text()[:500]
    table = (ran.outdir / "report.txt").read_text()
    assert all(name in table for name in ("model", "control", "ceiling"))
    assert (ran.outdir / "models" / "model" / "model.safetensors").is_file()
    assert "perturbdiff" in (ran.outdir / "pipeline_info" / "versions.yml").read_text()


@pytest.mark.slow
def test_a_new_alpha_scores_again_and_repeats_nothing_else(first):
    nextflow, _ = first
    changed = ("--alpha", "0.1", "--evaluation_shards", "2")
    other = nextflow.run(*FEW, str(nextflow.folder / "tiny.csv"), "-resume", *changed)
    assert other.code == 0, other.output
    assert {name.split(" ")[0] for name in other.ran()} == {
        *("CALIBRATE", "CEILING", "EVALUATE", "MERGE_METRICS", "REPORT")
    }
    merged = other.outdir / "metrics" / "model.metrics"
    made = json.loads((merged / "manifest.json").read_text())
    assert made["config"]["alpha"] == 0.1
    names = {key: made["config"][key] for key in ("method", "dataset")}
    config = EvaluateConfig(**{k: v for k, v in made["config"].items() if k in EvaluateConfig.model_fields})
    (store,) = (other.outdir / "stores").iterdir()
    predictions = other.outdir / "predictions" / "model.h5ad"
    (calibration,) = (other.outdir / "calibration").iterdir()
    told = {**names, "seed": made["seed"], "calibration": calibration}
    one = evaluate(predictions, store, nextflow.folder / "one", config, **told)
    assert {p.name for p in one.iterdir()} == {p.name for p in merged.iterdir()}
    for path in one.iterdir():
        assert path.name == "run.json" or path.read_bytes() == (merged / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_more_tasks_for_a_sampling_repeat_nothing_else(first):
    nextflow, ran = first
    path = ran.outdir / "predictions" / "model.h5ad"
    whole = path.read_bytes(), path.with_name("model.h5ad.manifest.json").read_bytes()
    spread = nextflow.run(*FEW, str(nextflow.folder / "tiny.csv"), "-resume", "--sample_shards", "2")
    assert spread.code == 0, spread.output
    assert spread.ran() == [
        "MERGE_PREDICTIONS (model.h5ad)",
        "REPORT",  # tells how long it took
        *(f"SAMPLE (model.part-{i}-of-2)" for i in range(2)),
    ]
    assert (path.read_bytes(), path.with_name("model.h5ad.manifest.json").read_bytes()) == whole


@pytest.mark.slow
def test_one_training_is_sampled_as_it_was_and_on_both_parts(first):
    nextflow, _ = first
    own = f"{SCREEN};split.valid_fraction=0.5;train.keep_every=10"
    rows = [
        f"grown,screen,simulate:tiny,tiny,train,,,{own},valid,trained,20",
        "early,screen,simulate:tiny,,sample,grown,10,,valid,trained,10",
        "untrained,screen,simulate:tiny,,sample,grown,0,,valid,trained,0",
        "guided,screen,simulate:tiny,,sample,grown,,sample.guidance=2;sample.values=counts,test,w = 2,2",
    ]
    sheet = nextflow.folder / "sampled.csv"
    header = "id,dataset,input,preset,mode,init,step,overrides,part,arm,level"
    sheet.write_text("\n".join([header, *rows]) + "\n")
    ran = nextflow.run(*FEW, str(sheet), "-resume", "--ceiling", "false")
    assert ran.code == 0, ran.output
    names = [name.split(" ")[0] for name in ran.ran()]
    assert [names.count(name) for name in ("TRAIN", "SAMPLE", "EVALUATE")] == [1, 4, 6]
    cells = {
        name: anndata.read_h5ad(ran.outdir / "predictions" / f"{name}.h5ad")
        for name in ("grown", "early", "untrained", "guided")
    }
    made = {name: found.uns["perturbdiff"] for name, found in cells.items()}
    assert {name: bool(facts["random_init"]) for name, facts in made.items()} == {
        "grown": False, "early": False, "untrained": True, "guided": False,
    }  # fmt: skip
    assert [float(made[name]["guidance"]) for name in ("early", "guided")] == [made["grown"]["guidance"], 2]
    conditions = {name: set(found.obs["perturbation"]) - {"control"} for name, found in cells.items()}
    assert conditions["grown"] == conditions["early"] == conditions["untrained"]
    assert not conditions["grown"] & conditions["guided"]
    assert (cells["grown"].X != cells["early"].X).nnz > 0  # pyright: ignore[reportAttributeAccessIssue]
    counts = cells["guided"].X.data  # pyright: ignore[reportAttributeAccessIssue]
    assert made["guided"]["scale"] == "counts"
    assert counts.max() > 10
    assert (counts == counts.round()).all()
    table = (ran.outdir / "report.txt").read_text()
    assert "screen.valid" in table


@pytest.mark.slow
def test_a_killed_training_goes_on_and_a_failing_run_stops_no_other(first):
    nextflow, _ = first
    path = sheet(nextflow.folder, "long", ";train.max_steps=400;train.valid_every=100")
    with Path(path).open("a") as handle:
        handle.write(f"broken,screen,simulate:tiny,tiny,train,{SCREEN};train.precision=64-odd\n")
    command = [
        nextflow.program,
        "run",
        str(ROOT / "main.nf"),
        "-profile",
        "test",
        "--outdir",
        "out",
        *FEW,
        path,
        "-resume",
    ]
    head = subprocess.Popen(
        command,
        cwd=nextflow.folder,
        env=nextflow.environment("v2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    known = set((nextflow.folder / "checkpoints").glob("*/last.ckpt"))
    deadline = time.monotonic() + 300
    while not set((nextflow.folder / "checkpoints").glob("*/last.ckpt")) - known:
        assert head.poll() is None
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.2)
    head.send_signal(signal.SIGTERM)
    head.communicate(timeout=120)

    ran = nextflow.run(*FEW, path, "-resume")
    tasks = {t["name"].split(":")[-1]: t for t in ran.tasks()}
    work = next((nextflow.folder / "work").glob(f"{tasks['TRAIN (model)']['hash']}*"))
    steps = re.findall(r"continuing at step (\d+) of 400", (work / ".command.err").read_text())
    assert int(steps[0]) >= 5
    assert tasks["REPORT"]["status"] == "COMPLETED"
    assert tasks["TRAIN (broken)"]["status"] == "FAILED"
    assert ran.code != 0, "a missing run shows in the exit code"
    told = re.search(
        r"TRAIN \(broken\) \(exit 2\): .*train.precision.*\n +log (\S+), work folder", ran.output
    )
    assert told, ran.output
    assert "train.precision" in Path(nextflow.folder / told[1]).read_text()
    report = (ran.outdir / "report.txt").read_text()
    assert re.search(r"^broken failed: .*train\.precision", report, re.MULTILINE), report


@pytest.mark.slow
def test_a_script_of_ones_own_is_scored_and_one_that_fails_is_shown(first):
    nextflow, _ = first
    ridge = ROOT / "docs" / "examples" / "ridge_adapter.py"
    broken = nextflow.folder / "broken.py"
    broken.write_text("import sys\nsys.exit('no such gene: X')\n")
    rows = [
        f"{name},screen,simulate:tiny,tiny,script,{SCREEN},{path},1"
        for name, path in (("ridge", ridge), ("broken", broken))
    ]
    sheet = nextflow.folder / "scripts.csv"
    sheet.write_text("\n".join(["id,dataset,input,preset,mode,overrides,script,seed", *rows]) + "\n")
    ran = nextflow.run(*FEW, str(sheet), "-resume")
    tasks = {re.sub(r"screen-\w+\.", "", t["name"].split(":")[-1]): t["status"] for t in ran.tasks()}
    assert tasks["EXTERNAL (ridge)"] == tasks["REPORT"] == "COMPLETED", ran.output
    assert tasks["EXTERNAL (broken)"] == "FAILED"
    assert "EVALUATE (broken.metrics)" not in tasks
    assert ran.code != 0, "a missing method shows in the exit code"
    assert re.search(r"EXTERNAL \(\S+broken\) \(exit 2\): .*no such gene: X", ran.output), ran.output
    page = (ran.outdir / "report.html").read_text()
    assert "no such gene: X" in page
    assert re.search(r"logs/EXTERNAL\.screen-\w+\.broken\.log", page)
    assert "ridge" in (ran.outdir / "report.txt").read_text()
    broken.write_text(ridge.read_text())
    mended = nextflow.run(*FEW, str(sheet), "-resume")
    assert mended.code == 0, mended.output
    names = [re.sub(r"screen-\w+\.", "", name) for name in mended.ran()]
    assert names == ["EVALUATE (broken.metrics)", "EXTERNAL (broken)", "REPORT"]
    assert "no such gene: X" not in (mended.outdir / "report.html").read_text()
