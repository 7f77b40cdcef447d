"""Diffusion over sets of cells: schedule, losses, samplers. Knows neither data nor model."""
