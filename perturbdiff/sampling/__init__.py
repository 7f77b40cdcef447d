"""Sampling: conditions and real control cells in, predicted cells out."""

from perturbdiff.sampling.condition_sampler import ConditionSampler
from perturbdiff.sampling.sampling_stage import read_requests, sample

__all__ = ["ConditionSampler", "read_requests", "sample"]
