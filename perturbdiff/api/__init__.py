"""The package in Python: `PerturbDiff`, and the stages as functions that take AnnData or paths.

``perturbation_model`` is the model, ``score_frame`` its table of scores. ``data_functions``, ``model_functions`` and
``score_functions`` hold the stages. ``given_inputs`` turns what is given into files, ``own_labels`` gives predictions
the user's own names and units. All names are taken from ``perturbdiff`` itself. docs/api.md says which are stable.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.api.data_functions import preprocess, read_store, simulate, split
    from perturbdiff.api.model_functions import sample, train
    from perturbdiff.api.perturbation_model import PerturbDiff
    from perturbdiff.api.score_frame import Scores
    from perturbdiff.api.score_functions import evaluate, report

__all__ = [
    "PerturbDiff",
    "Scores",
    "evaluate",
    "preprocess",
    "read_store",
    "report",
    "sample",
    "simulate",
    "split",
    "train",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "data_functions": ["preprocess", "read_store", "simulate", "split"],
        "model_functions": ["sample", "train"],
        "perturbation_model": ["PerturbDiff"],
        "score_functions": ["evaluate", "report"],
        "score_frame": ["Scores"],
    },
)
