"""The pass over the cells of an evaluation, and how its values become means with intervals."""
