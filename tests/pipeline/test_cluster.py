"""The Slurm profile where a cluster is: jobs are submitted for real, with stubs in place of work."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def cluster_is_up() -> bool:
    if shutil.which("sinfo") is None:
        return False
    asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=30, check=False)
    return asked.returncode == 0 and "idle" in asked.stdout


@pytest.mark.slow
@pytest.mark.skipif(not cluster_is_up(), reason="no Slurm here: jobs are not submitted")
def test_jobs_are_submitted_with_their_settings(nextflow, tmp_path):
    (tmp_path / "kang.h5ad").touch()
    (tmp_path / "sheet.csv").write_text("id,dataset,input,preset,mode\nmodel,kang,kang.h5ad,tiny,train\n")
    (tmp_path / "site.config").write_text(
        "executor { pollInterval = '2 sec'; queueStatInterval = '5 sec' }\n"
    )
    fixed = ("run", str(ROOT / "main.nf"), "-stub", "-profile", "test,slurm,site", "--outdir", "out")
    site = (
        "--site_config",
        "site.config",
        "--gpu_options",
        "--gres=gpu:1 --comment=mine",
        "--train_time",
        "7m",
    )
    sheet = ("--input", "sheet.csv", "--baselines", "none", "--ceiling", "false")
    ran = nextflow(*fixed, *site, *sheet)
    assert ran.code == 0, ran.output
    train = next(t for t in ran.tasks() if "TRAIN" in t["name"])
    assert train["native_id"].isdigit()
    job = (Path(train["workdir"]) / ".command.run").read_text()
    assert re.search(r"^#SBATCH --gres=gpu:1 --comment=mine$", job, re.MULTILINE)
    assert re.search(r"^#SBATCH -t 00:07:00$", job, re.MULTILINE)
    assert "export PD_END_TIME=$(( $(date +%s) + 420 ))" in job
