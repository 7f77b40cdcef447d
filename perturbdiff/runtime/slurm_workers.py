"""Dask workers that are Slurm jobs: ``--dask-scheduler slurm:8`` starts eight, by dask-jobqueue.

What a job asks for is in dask-jobqueue's own settings (``jobqueue.slurm`` in ``~/.config/dask/jobqueue.yaml``, or
variables such as ``DASK_JOBQUEUE__SLURM__CORES``), where a site's users may have them already.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

PREFIX = "slurm:"
_NEEDED = ("cores", "memory", "walltime")
_OTHERS = ("processes", "scheduler-options", "shared-temp-directory")
_SECONDS_TO_ASK = 60


def number_of_jobs(address: str) -> int:
    """Return 8 for ``slurm:8``.

    Raises
    ------
    UserError
        If there is no number of jobs.
    """
    number = re.fullmatch(r"slurm:([1-9]\d{0,3})", address)
    if number is None:
        raise UserError(
            f"--dask-scheduler {address}: write slurm:N, where N is the number of jobs, e.g. slurm:8"
        )
    return int(number[1])


@contextlib.contextmanager
def slurm_workers(address: str) -> Iterator[Any]:
    """Submit the jobs of ``slurm:N`` and yield their cluster, which a dask client takes as its address.

    The scheduler runs in this process. It and its workers know each other by a certificate that is made anew each
    time. When the context ends, the jobs are cancelled.

    Raises
    ------
    UserError
        If dask-jobqueue, sbatch or a setting is missing, or Slurm does not take the job.
    """
    jobs = number_of_jobs(address)
    settings = _settings(address)
    shared = settings["shared-temp-directory"] or Path.cwd()
    with (
        tempfile.TemporaryDirectory(prefix=".workers-", dir=shared) as keys,
        _cluster(settings, Path(keys)) as cluster,
    ):
        _ask_slurm(cluster.job_script(), address)
        cluster.scale(jobs=jobs)
        logger.info("%d jobs are submitted for workers (squeue --me --name %s)", jobs, cluster.job_name)
        yield cluster


def _settings(address: str) -> dict[str, Any]:
    """Return the settings of dask-jobqueue, or say what is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("dask_jobqueue", "cryptography")):
        raise UserError(f"--dask-scheduler {address} needs an extra: pip install 'perturbdiff[jobqueue]'")
    if shutil.which("sbatch") is None:
        raise UserError(
            f"--dask-scheduler {address}: there is no sbatch here; run this where jobs can be submitted, or give the "
            "address of a scheduler that runs"
        )
    import dask.config
    import dask_jobqueue  # noqa: F401  # loads the settings  # pyright: ignore[reportMissingImports]

    # a variable of the environment has _ where a file has -: `get` takes both for one
    given = {name: dask.config.get(f"jobqueue.slurm.{name}", None) for name in (*_NEEDED, *_OTHERS)}
    if missing := [name for name in _NEEDED if not given[name]]:
        names = ", ".join(f"DASK_JOBQUEUE__SLURM__{name.upper()}" for name in missing)
        raise UserError(
            f"--dask-scheduler {address}: the size of a job is not known; set {names}, or jobqueue.slurm in "
            "~/.config/dask/jobqueue.yaml (docs/scale.md)"
        )
    return given


def _cluster(settings: dict[str, Any], keys: Path) -> Any:
    from dask_jobqueue.slurm import SLURMCluster  # pyright: ignore[reportMissingImports]

    options = {"dashboard": False, "dashboard_address": ":0"} | (settings["scheduler-options"] or {})
    return SLURMCluster(
        processes=settings["processes"] or int(settings["cores"]),  # tasks use one thread
        scheduler_options=options,
        protocol="tls://",
        security=_certificate(keys),
    )


def _certificate(folder: Path) -> Any:
    """Write a certificate that scheduler, workers and client of this cluster share, for the user alone to read."""
    from distributed.security import Security

    made = Security.temporary()
    key, cert = folder / "key.pem", folder / "cert.pem"
    key.write_text(made.tls_client_key)
    cert.write_text(made.tls_client_cert)
    roles = ("client", "scheduler", "worker")
    files = {f"tls_{role}_key": str(key) for role in roles} | {
        f"tls_{role}_cert": str(cert) for role in roles
    }
    return Security(require_encryption=True, tls_ca_file=str(cert), **files)


def _ask_slurm(script: str, address: str) -> None:
    """Refuse what Slurm would refuse: dask waits for ever for jobs that were not submitted."""
    asked = subprocess.run(
        ["sbatch", "--test-only"],
        input=script,
        capture_output=True,
        text=True,
        timeout=_SECONDS_TO_ASK,
        check=False,
    )
    if asked.returncode:
        said = asked.stderr.strip().splitlines()
        raise UserError(
            f"--dask-scheduler {address}: Slurm does not take the jobs of the workers "
            f"({said[-1] if said else 'sbatch failed'}); change jobqueue.slurm in dask's settings (docs/scale.md)"
        )
