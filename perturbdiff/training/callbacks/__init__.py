"""What happens beside the steps of a training: validation, logs, snapshots, and stopping in time."""
