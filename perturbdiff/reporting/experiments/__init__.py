"""What an experiment shows: arms over data sets and seeds, its tables and the paper's figures."""
