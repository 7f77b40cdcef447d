"""Simulated screens whose true effects are known, of any size in bounded memory."""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.simulation.simulation_stage import simulate
    from perturbdiff.simulation.true_effects import Truth, draw_truth

__all__ = ["Truth", "draw_truth", "simulate"]
__getattr__, __dir__ = attach(
    __name__, {"simulation_stage": ["simulate"], "true_effects": ["Truth", "draw_truth"]}
)
