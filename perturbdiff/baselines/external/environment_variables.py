"""The environment variables that a method of others runs with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ADAPTERS = Path(__file__).parent / "adapters"
"""Scripts that run the tools, and the module that they share."""

_THREADS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS", "POLARS_MAX_THREADS", "RAYON_NUM_THREADS",
    "NPROC",  # JAX's on CPUs
)  # fmt: skip
_OF_OUR_PYTHON = ("PYTHON", "VIRTUAL_ENV")
_OF_A_JOB = (  # a library that finds these believes to be one of several processes, or that it may requeue the job
    "SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def environment(given: Mapping[str, str], scratch: Path, *, threads: int, device: str) -> dict[str, str]:
    """Return the variables of a method's process.

    Parameters
    ----------
    given
        Our own variables. Those that lead to our packages, or tell of several processes, are left out.
    scratch
        A folder that is removed afterwards, for caches: the home folder may be read-only or have a quota.
    threads
        CPU threads it may use.
    device
        'cpu' hides all GPUs.
    """
    kept = {
        name: value for name, value in given.items() if not name.startswith((*_OF_OUR_PYTHON, *_OF_A_JOB))
    }
    kept |= dict.fromkeys(_THREADS, str(threads))
    kept |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ADAPTERS),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # the order of sets of labels, and with it their numbers, else changes
        "MPLBACKEND": "Agg",
        "WANDB_MODE": "disabled",
        "TQDM_MININTERVAL": "10",
        "MPLCONFIGDIR": str(scratch),
        "NUMBA_CACHE_DIR": str(scratch),
    }
    if device == "cpu":
        kept |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        if threads == 1:
            kept["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    else:
        kept.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    return kept
