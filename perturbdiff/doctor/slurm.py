"""Slurm as seen from where jobs are submitted: partitions, limits, GPUs, own accounts."""

from __future__ import annotations

from perturbdiff.doctor import slurm_job
from perturbdiff.doctor.findings import Check, ask, user_name

_MANY = 25


def describe() -> list[Check]:
    """Version and, outside jobs, each partition with its time limit, nodes and GPUs."""
    version = ask("sbatch", "--version")
    if not version:
        remedy = "-profile slurm needs sbatch; without it tasks run on this machine"
        return [Check("Slurm", "absent", "none", remedy)]
    said = ask("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c|%m|%G")
    if said is None:
        return [Check("Slurm", "problem", version, "sinfo does not answer: is the controller up?")]
    if slurm_job.is_inside():
        return [Check("Slurm", "ok", version)]
    kinds = list(dict.fromkeys(line.strip() for line in said.splitlines() if line.count("|") == 6))
    rows = [_partition(kind.split("|")) for kind in kinds]
    if len(rows) > _MANY:
        rows[_MANY:] = [Check("partition", "ok", f"and {len(rows) - _MANY} more kinds of nodes: sinfo")]
    return [Check("Slurm", "ok", version), *rows]


def _partition(fields: list[str]) -> Check:
    name, state, limit, nodes, cores, megabytes, gpus = (field.strip() for field in fields)
    time = "no time limit" if limit in ("infinite", "n/a") else f"jobs up to {limit}"
    memory = megabytes.rstrip("+")
    size = f"{int(memory) / 1024:.0f} GiB" if memory.isdigit() else "? GiB"
    gres = "no GPU" if gpus in ("(null)", "") else gpus
    found = f"{name}: {time}; {nodes} nodes with {cores} CPUs, {size}, {gres}"
    if state != "up":
        return Check("partition", "note", f"{found}; {state}")
    return Check("partition", "ok", found)


def accounts() -> Check:
    """Accounts that may be charged, where the site keeps accounts."""
    fields = "format=account%60,partition%60,qos%120"
    user = f"user={user_name()}"
    said = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", user, fields, alone=True)
    if said is None:
        return Check(
            "accounts", "absent", "sacctmgr tells none; the site says whether --slurm_account is needed"
        )
    rows = [line.split("|") for line in said.splitlines() if line.count("|") >= 2]
    if not rows:
        return Check("accounts", "note", "none in your name", "ask the site: jobs may need --slurm_account")
    parts = [
        account + (f" (partition {partition})" if partition else "") + (f" (qos {qos})" if qos else "")
        for account, partition, qos, *_ in rows
    ]
    return Check("accounts", "ok", "; ".join(dict.fromkeys(parts)))
