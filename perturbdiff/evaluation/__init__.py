"""Metrics, differential expression and the report."""
