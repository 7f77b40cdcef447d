"""External methods, each run in an environment of its own as a sub-process through one contract (docs/adapters.md)."""
