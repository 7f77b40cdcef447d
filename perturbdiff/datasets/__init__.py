"""Published data sets by name: what is known of each, how it is fetched and checked. None is part of this package."""

from perturbdiff.datasets.fetching import find, get
from perturbdiff.datasets.registry import Dataset, cache_folder, lookup, registered

__all__ = ["Dataset", "cache_folder", "find", "get", "lookup", "registered"]
