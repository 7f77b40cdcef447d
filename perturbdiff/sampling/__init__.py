"""Sampling: conditions and real control cells in, predicted cells out."""

from perturbdiff.sampling.conditions import ConditionSampler
from perturbdiff.sampling.requests import read_requests
from perturbdiff.sampling.run import sample

__all__ = ["ConditionSampler", "read_requests", "sample"]
