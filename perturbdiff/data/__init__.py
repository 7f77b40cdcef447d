"""Data: raw counts, store, splits, cell sets."""
