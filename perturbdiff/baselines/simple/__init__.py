"""The baselines of the package: copied cells, mean profiles, a linear model, the nearest context."""
