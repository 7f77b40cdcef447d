"""Files of other programs: checkpoints of the authors' released code."""

from perturbdiff.interop.released import load_released

__all__ = ["load_released"]
