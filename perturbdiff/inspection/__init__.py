"""Data against a recipe before hours are spent: labels, held-out conditions, genes, scale, counts and costs.

`inspected_studies` says what is looked at, `inspection` looks at it and gives `findings`. Labels are read in pieces
and of the values only some, so that memory does not grow with the number of cells.
"""

from perturbdiff.inspection.findings import Finding, Findings, render
from perturbdiff.inspection.inspected_studies import Study, studies_of_sheet, study_of
from perturbdiff.inspection.inspection import inspect_study

__all__ = ["Finding", "Findings", "Study", "inspect_study", "render", "studies_of_sheet", "study_of"]
