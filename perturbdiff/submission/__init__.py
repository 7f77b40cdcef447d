"""Submissions: predictions in the form that a competition or its scorer takes, checked before anything is written."""

from perturbdiff.submission.requirements import RULES, Rules
from perturbdiff.submission.submission_stage import check, export

__all__ = ["RULES", "Rules", "check", "export"]
