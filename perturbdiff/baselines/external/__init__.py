"""External methods. Each runs in its own environment as a sub-process, through one contract (docs/adapters.md)."""
