"""Workers that are Slurm jobs: with programs in place of Slurm's, which run a job as a process of this machine."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner

SBATCH = """#!/bin/bash
if [ "$1" = --test-only ]; then cat > asked.sh; exit 0; fi
cp "$1" job.$$.sh  # as Slurm does: the file is gone when sbatch has ended
bash job.$$.sh > job.log 2>&1 &
echo $! >> started
echo "Submitted batch job $!"
"""
SCANCEL = """#!/bin/bash
echo "$1" >> cancelled
pkill -P "$1"; kill "$1"
"""


def worker_of(number: int) -> tuple[int, str]:
    return 2 * number, os.environ.get("JOB_OF", "")


def too_long(*_):
    raise TimeoutError("no worker came: see job.log")  # dask waits for ever


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder to start from, with Slurm's programs on the path and a site's settings."""
    if importlib.util.find_spec("dask_jobqueue") is None:
        pytest.skip("the extra 'jobqueue' is not installed")
    import dask.config
    import dask_jobqueue  # noqa: F401  # its defaults come first  # pyright: ignore[reportMissingImports]

    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    given = {"cores": 1, "memory": "1GB", "walltime": "00:10:00", "queue": "short"}
    given |= {
        "job-script-prologue": [
            "export JOB_OF=mine",
            f"export PYTHONPATH={Path(__file__).parent}:$PYTHONPATH",
        ]
    }
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(240)
    with dask.config.set({f"jobqueue.slurm.{name}": value for name, value in given.items()}):
        yield tmp_path
    signal.alarm(0)


def test_the_jobs_do_the_tasks_and_are_cancelled_in_the_end(site, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with TaskRunner(scheduler="slurm:1") as crew:
        import test_slurm_workers as there  # as the worker imports it

        assert crew.run(there.worker_of, [1, 2]) == [(2, "mine"), (4, "mine")]
    script = (site / "asked.sh").read_text()
    assert "#SBATCH -p short" in script
    assert "tls://" in script
    assert (site / "cancelled").read_text() == (site / "started").read_text()
    assert not list(site.glob(".workers-*")), "no certificate stays"


def test_what_slurm_would_refuse_is_told_before(site):
    (site / "bin/sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition specified' >&2; exit 1\n"
    )
    with (
        TaskRunner(scheduler="slurm:2") as crew,
        pytest.raises(UserError, match="invalid partition specified"),
    ):
        crew.run(worker_of, [1, 2])


def test_the_size_of_a_job_has_to_be_known(site):
    import dask.config

    with (
        dask.config.set({"jobqueue.slurm.memory": None}),
        TaskRunner(scheduler="slurm:2") as crew,
        pytest.raises(UserError, match="DASK_JOBQUEUE__SLURM__MEMORY"),
    ):
        crew.run(worker_of, [1, 2])


@pytest.mark.parametrize("address", ["slurm:", "slurm:0", "slurm:many"])
def test_a_number_of_jobs_is_needed(address):
    with TaskRunner(scheduler=address) as crew, pytest.raises(UserError, match="slurm:N"):
        crew.run(worker_of, [1, 2])
