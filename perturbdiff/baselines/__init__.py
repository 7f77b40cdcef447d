"""Baselines that every model has to beat, with the same files in and out."""

from perturbdiff.baselines.baseline_stage import NAMES, predict

__all__ = ["NAMES", "predict"]
