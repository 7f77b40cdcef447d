"""Noise schedule, losses and samplers. Knows neither data nor networks: takes a denoise callable."""
