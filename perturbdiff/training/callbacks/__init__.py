"""Work between the steps of a training: validation, logs, snapshots, and stopping in time."""
