"""Diffusion over cell distributions: from raw single-cell counts to predicted perturbation responses."""

import os

__version__ = "0.2.0"

# OpenMP reads this once, when torch is loaded. By default threads that wait for each other spin: on a machine with
# other work they use ten times the CPU of the computation. No number depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
