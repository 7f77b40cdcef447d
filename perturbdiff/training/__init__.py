"""Training: the Lightning module, transfer between gene spaces, bundles."""
