"""The report's chapter on one data set: its first screen, its sections and its verdict."""
