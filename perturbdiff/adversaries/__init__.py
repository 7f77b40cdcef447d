"""Known attacks on the metrics, made as predictions, scored and judged beside honest cells."""
