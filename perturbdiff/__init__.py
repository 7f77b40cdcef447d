"""Diffusion over cell distributions: from raw single-cell counts to predicted perturbation responses.

>>> import perturbdiff
>>> model = perturbdiff.PerturbDiff(adata, perturbation="perturbation", control="control", config="tiny").fit()
>>> scores = model.evaluate()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.api import (
        PerturbDiff,
        Scores,
        evaluate,
        preprocess,
        read_store,
        report,
        sample,
        simulate,
        split,
        train,
    )
    from perturbdiff.runtime.errors import StoppedEarly, UserError

__version__ = "0.2.0"

__all__ = [
    "PerturbDiff",
    "Scores",
    "StoppedEarly",
    "UserError",
    "__version__",
    "evaluate",
    "preprocess",
    "read_store",
    "report",
    "sample",
    "simulate",
    "split",
    "train",
]

# OpenMP reads this once, when torch is loaded. By default threads that wait for each other spin: on a machine with
# other work they use ten times the CPU of the computation. No number depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_OURS = {"api": [n for n in __all__ if n not in ("StoppedEarly", "UserError", "__version__")]}
__getattr__, _ = attach(__name__, {**_OURS, "runtime.errors": ["StoppedEarly", "UserError"]})


def __dir__() -> list[str]:
    return sorted(__all__)
