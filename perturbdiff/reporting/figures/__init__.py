"""The report's figures and tables."""
