"""Sampling: predict cells of given conditions from real control cells."""

from perturbdiff.sampling.condition_sampler import ConditionSampler
from perturbdiff.sampling.sampling_stage import sample
from perturbdiff.sampling.wanted_conditions import read_requests

__all__ = ["ConditionSampler", "read_requests", "sample"]
