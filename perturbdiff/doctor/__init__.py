"""What this machine, job, container and storage offer, and what to do if something is missing. Never waits long."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from perturbdiff.doctor import job, machine, programs
from perturbdiff.doctor.checks import Check, Look, as_json, gather, render

__all__ = ["Check", "as_json", "diagnose", "render"]


def diagnose(places: Sequence[Path] = ()) -> list[Check]:
    """Look at this machine, at the job and the container that this process is in, and at folders.

    Parameters
    ----------
    places
        Folders that a run will use (work, output, checkpoints); none: the current folder.
    """
    looks: list[Look] = [
        ("Python", machine.python_and_cpus),
        ("memory", machine.memory),
        ("torch", machine.torch_version),
        ("GPU", machine.gpus),
        ("temporary files", machine.temporary_files),
    ]
    if job.in_job():
        looks += [("job", job.describe), ("time left", job.time_left), ("allocation", job.resources)]
    if job.in_container():
        looks += [("image", job.image), ("home", job.home)]
    else:
        looks += [
            ("Java", programs.java),
            ("Nextflow", lambda: programs.nextflow([*places, Path.cwd()])),
            ("Apptainer", programs.apptainer),
            ("Slurm", programs.slurm),
        ]
        if not job.in_job():
            looks += [("accounts", programs.accounts)]
    for place in dict.fromkeys(Path(os.path.abspath(p)) for p in places or [Path.cwd()]):  # noqa: PTH100 - no disk access
        looks.append((str(place), lambda place=place: machine.look_at_folder(place, required=bool(places))))
    return gather(looks)
