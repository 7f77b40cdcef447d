"""Data against a recipe before hours are spent: labels, held-out conditions, genes, scale, counts and costs.

`planned_studies` says what is looked at, `inspection` looks at it and gives `study_findings`. Labels are read in
pieces and of the values only some, so that memory does not grow with the number of cells.
"""

from perturbdiff.inspection.inspection import inspect_study
from perturbdiff.inspection.planned_studies import Study, studies_of_sheet, study_of
from perturbdiff.inspection.study_findings import Finding, Findings, render

__all__ = ["Finding", "Findings", "Study", "inspect_study", "render", "studies_of_sheet", "study_of"]
