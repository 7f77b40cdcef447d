"""What this machine, job, container and storage offer, and what to do if something is missing. Never waits long."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from perturbdiff.doctor import container, folders, machine, programs, slurm_job
from perturbdiff.doctor.findings import Check, Look, as_json, gather, render

__all__ = ["Check", "as_json", "diagnose", "render"]


def diagnose(places: Sequence[Path] = ()) -> list[Check]:
    """Look at this machine, at the job and the container that this process is in, and at folders.

    Parameters
    ----------
    places
        Folders that a run will use (work, output, checkpoints); none: the current folder.
    """
    inside, in_job = container.is_inside(), slurm_job.is_inside()
    looks: list[Look] = [
        ("Python", machine.python),
        ("perturbdiff", machine.version),
        ("CPU", machine.cpus),
        ("memory", machine.memory),
        ("torch", machine.torch_version),
        ("GPU", machine.gpus),
        ("temporary files", machine.temporary_files),
    ]
    if in_job:
        looks += [
            ("job", slurm_job.describe),
            ("time left", slurm_job.time_left),
            ("allocation", slurm_job.resources),
        ]
    if inside:
        looks += [("image", container.describe), ("home", container.home)]
    else:
        looks += [
            ("Java", programs.java),
            ("Nextflow", lambda: programs.nextflow([*places, Path.cwd()])),
            ("Apptainer", programs.apptainer),
            ("Slurm", programs.slurm),
        ]
        if not in_job:
            looks += [("accounts", programs.accounts)]
    for place in dict.fromkeys(Path(os.path.abspath(p)) for p in places or [Path.cwd()]):  # noqa: PTH100 - no disk access
        looks.append((str(place), lambda place=place: folders.look(place, asked_for=bool(places))))
    return gather(looks)
