"""Baselines that every model has to beat, with the same files in and out."""

from perturbdiff.baselines.baseline_stage import predict
from perturbdiff.baselines.simple import NAMES

__all__ = ["NAMES", "predict"]
