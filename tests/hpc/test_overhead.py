"""What the workflow adds to the work of its tasks: the demo through Slurm, in the image, as users start it."""

import importlib
import os

import pytest
from hpc.bed import ROOT


@pytest.mark.slow
@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="beside other tests Nextflow waits for a core: this one runs by itself after them (make test-hpc)",
)
def test_the_demo_takes_less_than_a_minute_beside_its_tasks(bed, workflow, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("workflow")
    ran = workflow.run("--input", bed.site / "assets" / "samplesheet.csv", profile="slurm,test", timeout=1500)
    assert ran.code == 0, ran.output
    tasks = benchmark.read_tasks(benchmark.newest_trace(ran.outdir))
    assert {"SIMULATE", "TRAIN", "REPORT"} <= {task.name.split(" ")[0] for task in tasks}
    log = workflow.heads[-1].log.with_suffix(".nextflow.log")
    found = benchmark.analyse(tasks, 2, *benchmark.log_times(log))
    print(benchmark.show(found))
    assert found["overhead"] < 60, benchmark.show(found)
