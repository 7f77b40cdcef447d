"""Files of other programs: checkpoints of the authors' released code."""
