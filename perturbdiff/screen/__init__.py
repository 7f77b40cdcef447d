"""From one file to a report: what a screen holds, what to hold out, and the stages one after another.

``screen`` guesses and explains what a file or an AnnData holds (``sources`` reads it and counts the cells,
``values`` finds the counts and ``label_columns`` the columns). ``held_out`` chooses what can be judged.
``plan`` makes a recipe and a samplesheet of it, and ``stages`` carries the plan out in one folder.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.screen.held_out import HeldOut, hold_out
    from perturbdiff.screen.plan import Plan, plan_screen
    from perturbdiff.screen.screen import Guess, Screen, look_at
    from perturbdiff.screen.stages import run_plan

__all__ = ["Guess", "HeldOut", "Plan", "Screen", "hold_out", "look_at", "plan_screen", "run_plan"]
__getattr__, __dir__ = attach(
    __name__,
    {
        "held_out": ["HeldOut", "hold_out"],
        "plan": ["Plan", "plan_screen"],
        "screen": ["Guess", "Screen", "look_at"],
        "stages": ["run_plan"],
    },
)
