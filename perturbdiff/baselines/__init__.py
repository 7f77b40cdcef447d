"""Baselines that every model has to beat, with the same files in and out."""

from perturbdiff.baselines.run import NAMES, predict

__all__ = ["NAMES", "predict"]
