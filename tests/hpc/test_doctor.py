"""The doctor inside a job of the cluster, in the image, against what the job was given."""

import json
import os
import shlex

from hpc.bed import PACKAGE, wait_until


def test_the_doctor_in_a_job_tells_what_the_job_was_given(bed, workflow):
    source = f"--bind {bed.site / 'perturbdiff'}:{PACKAGE}" if os.environ.get("PD_TEST_SOURCE") else ""
    doctor = f"perturbdiff doctor --json --folder {shlex.quote(str(workflow.folder))}"
    script = (
        "export PD_END_TIME=$(( $(date +%s) + 7260 )); "
        f"apptainer exec --no-home --nv {source} {bed.image} {doctor} > told.json 2> said; echo $? > code"
    )
    options = ("--cpus-per-task=2", "--mem=3000", "--gres=gpu:1", "--time=10", "--output=/dev/null")
    job = bed.sbatch(script, workflow.folder, *options)
    wait_until((workflow.folder / "code").exists, 300, "the job does not end")
    told = json.loads((workflow.folder / "told.json").read_text())
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["job"]["found"].startswith(f"{job} in partition cpu on node")
    assert checks["time left"]["found"].startswith(("2 h 00 min", "2 h 01 min"))
    assert checks["job CPUs"]["found"].startswith("2 given by the job")
    assert checks["job memory"]["found"].startswith("2.9 GiB given by the job")
    assert checks["image"]["found"].startswith(str(bed.image))
    assert checks["image"]["status"] == "ok"
    assert checks["home"]["found"].startswith("not visible, not needed")
    assert checks["locks"]["status"] == "ok"
    assert "accounts" not in checks
    # the cluster's GPUs are no devices
    assert checks["GPU"]["found"].startswith("1 given by the job, 0 seen by PyTorch")
    assert told["problems"] == 1
    assert (workflow.folder / "code").read_text().strip() == "1"
