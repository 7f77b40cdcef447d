"""The page itself, and the same tables for other programs."""
