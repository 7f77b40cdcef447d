"""Baselines that every model has to beat, with the same files in and out."""
