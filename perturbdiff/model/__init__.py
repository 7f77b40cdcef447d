"""The denoiser: MM-DiT over a perturbed and a control set of cells. Needs torch and numpy only."""
