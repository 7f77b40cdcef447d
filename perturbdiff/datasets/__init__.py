"""Published data sets by name: what is known of each, and where its file lies. None is part of this package."""

from perturbdiff.datasets.registry import Dataset, cache_folder, find, registered

__all__ = ["Dataset", "cache_folder", "find", "registered"]
