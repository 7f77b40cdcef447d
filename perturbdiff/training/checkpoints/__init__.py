"""The checkpoints of a training: a folder with one owner at a time and whole files only."""
