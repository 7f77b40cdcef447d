"""What the report reads: runs of `evaluate`, their logs, and the columns and comparisons made of their scores."""
