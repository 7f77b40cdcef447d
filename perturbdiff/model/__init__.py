"""The denoiser: MM-DiT over a perturbed and a control set of cells. Needs torch and numpy only."""

from perturbdiff.model.covariates import Covariates
from perturbdiff.model.denoiser import Denoiser
from perturbdiff.model.estimates import Estimates

__all__ = ["Covariates", "Denoiser", "Estimates"]
