"""The definition `cell-eval2`: metrics of raw counts, scaled between a mean-response baseline and a replicate."""
