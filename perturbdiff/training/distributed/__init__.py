"""Training with several processes: how they start, connect and end."""
