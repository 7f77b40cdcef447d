"""What log1p values of normalised counts can be."""

HIGHEST = 15.0
"""No log1p of normalised counts is as large: it would be 3 million of a cell's counts in one gene.

Predictions with such a value, or one that is not finite, are refused where they are made and where they are scored.
"""
