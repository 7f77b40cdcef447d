"""Predictions and truth by condition, wherever their cells lie, and whether they fit together."""
