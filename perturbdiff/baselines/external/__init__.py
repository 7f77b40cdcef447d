"""Methods of others, each run in its own environment as a sub-process through one contract (docs/adapters.md)."""
