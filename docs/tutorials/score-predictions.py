# %% [markdown]
# # Score anyone's predictions
#
# You have two AnnData objects: cells that were measured, and cells that some method predicted. This tutorial scores the
# prediction, puts the score between the worst and the best that is possible, and shows four ways to fool oneself.
#
# It needs no model and no GPU. The data are simulated, so that the true effects are known.

# %% [markdown]
# ## Real cells
#
# We simulate a screen of twelve knock-downs and two cytokines in one cell type.

# %%
import logging

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import scanpy as sc

import perturbdiff

logging.getLogger("perturbdiff").setLevel("WARNING")
SCREEN = {
    "genes": 400,
    "cell_types": 1,
    "batches": 1,
    "drugs": 0,
    "size_spread": 0.2,
    "tiny_fraction": 0,
    "wells": 1,
}
settings = {f"simulate.{name}": value for name, value in SCREEN.items()}
cells = perturbdiff.simulate("screen", cells=6000, settings=settings, seed=1)
cells.obs["perturbation"].value_counts().head(4)

# %% [markdown]
# Scores are computed on log1p values of normalised counts, the usual units of scanpy.

# %%
sc.pp.normalize_total(cells)
sc.pp.log1p(cells)

# %% [markdown]
# Half of the cells are the truth. The other half stays aside. It will tell us how good a prediction can be.

# %%
half = np.random.default_rng(0).permutation(cells.n_obs) % 2 == 0
real, other = cells[half].copy(), cells[~half].copy()
real.n_obs, other.n_obs

# %% [markdown]
# ## Predicted cells
#
# We know the true log fold changes. A decent method could find 80 % of each. We apply that to control cells and call
# the result *decent*. In your own work this is the file of a method.

# %%
effects = pd.read_parquet("screen/effects.parquet")
effects = effects.pivot(index="perturbation", columns="gene", values="log_fold_change")
effects = effects[real.var_names]
controls = other[other.obs["perturbation"] == "control"]
names = real.obs.loc[real.obs["perturbation"] != "control", "perturbation"].astype(str)


def predict(changes):
    """Return control cells changed by log fold changes, one for each real perturbed cell."""
    rows = np.random.default_rng(0).choice(controls.n_obs, len(names))
    counts = np.expm1(controls.X[rows].toarray()) * np.exp(changes.loc[names].to_numpy())
    return ad.AnnData(np.log1p(counts), names.to_frame(), real.var[[]])


decent = predict(0.8 * effects)
decent

# %% [markdown]
# ## Scores
#
# `compare` tests every gene of every perturbation against the controls, on both sides. `tabulate` turns the result into
# a table. Both sides use the *real* controls, so that a method cannot gain by moving its own.

# %%
from perturbdiff.evaluation import compare, tabulate

METRICS = ["PDCorr", "DEOver", "AUPRC", "PDS_L1"]


def scores(predicted):
    """Return a row of scores for each perturbation."""
    comparison = compare(
        real.X,
        predicted.X,
        real.obs["perturbation"],
        predicted.obs["perturbation"],
        control="control",
        genes=real.var_names,
    )
    return tabulate(comparison, [*METRICS, "R2", "n_DE_real"])


of_decent = scores(decent)
of_decent.round(2)

# %% [markdown]
# What the columns say:
#
# - **PDCorr**: do the mean changes of all genes go the right way?
# - **DEOver**: are the genes that change most found?
# - **AUPRC**: are genes that really change ranked above the others?
# - **PDS_L1**: is the prediction nearer to its own perturbation than to others?
#
# [The catalogue](../reference/metrics.md) has the formula of each.

# %% [markdown]
# Look at single rows, too. `cytokine_1` switches on genes that control cells do not express. Multiplying a zero gives a
# zero, so our method misses them. The direction of its change is right (PDCorr), but it looks like another perturbation
# (PDS_L1). A mean over perturbations hides that.

# %% [markdown]
# ## How sure is the mean?
#
# There are only fourteen perturbations. A bootstrap over perturbations says how much the mean would move with others.

# %%
from perturbdiff.evaluation import bootstrap_mean

for metric in METRICS:
    values = of_decent[metric].to_numpy()
    low, high = bootstrap_mean(values, draws=2000, seed=0)
    print(f"{metric:8} {np.nanmean(values):.2f}   95 % interval {low:.2f} to {high:.2f}")

# %% [markdown]
# ## Between chance and ceiling
#
# A number alone says little. Two others give it a place:
#
# - **chance**: the same predictions, each given to a *wrong* perturbation;
# - **ceiling**: the other half of the real cells, used as if it were a prediction. No method can be expected to be
#   clearly better than that.

# %%
from perturbdiff.evaluation import chance

perturbed = other[other.obs["perturbation"] != "control"]
unchanged = predict(0 * effects)


def means(predicted):
    """Return the mean score over perturbations."""
    return scores(predicted)[METRICS].mean()


comparison = compare(
    real.X,
    decent.X,
    real.obs["perturbation"],
    decent.obs["perturbation"],
    control="control",
    genes=real.var_names,
)
table = pd.DataFrame(
    {
        "chance": pd.Series(chance(comparison, METRICS)),
        "no change": means(unchanged),
        "decent": of_decent[METRICS].mean(),
        "ceiling": means(perturbed),
    }
)
table.round(2)

# %% [markdown]
# *See in the figure:* the blue dot is the decent method. Grey is chance, black is the ceiling. A method is good where
# its dot is near the black mark. Where grey and black are close together, the metric cannot judge anybody here.

# %%
# alt: For each metric, a line from chance to the ceiling, with a dot for the decent
# alt: prediction and a cross for no change.
fig, axis = plt.subplots(figsize=(6, 2.6))
place = np.arange(len(METRICS))[::-1]
axis.hlines(place, table["chance"], table["ceiling"], color="0.85", lw=6)
axis.plot(table["chance"], place, "|", color="0.5", ms=16, mew=3, label="chance")
axis.plot(table["ceiling"], place, "|", color="black", ms=16, mew=3, label="ceiling")
axis.plot(table["decent"], place, "o", color="tab:blue", ms=9, label="decent")
axis.plot(table["no change"], place, "x", color="tab:red", ms=8, label="no change")
axis.set_yticks(place, METRICS)
axis.set_xlabel("mean over perturbations")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## Pitfall 1: R² of mean profiles
#
# R² compares profiles, not changes. Most of a profile is the same with and without a perturbation, so even "nothing
# happens" gets a high R². Never report it alone.

# %%
print(
    f"R² of the decent method {of_decent['R2'].mean():.3f}, of no change {scores(unchanged)['R2'].mean():.3f}"
)

# %% [markdown]
# ## Pitfall 2: means without cells
#
# This "method" repeats the mean profile of each perturbation in every cell. Its mean changes are perfect. Its cells are
# not cells: they have no zeros and no spread. The energy distance compares whole populations and notices.

# %%
from scipy.sparse import csr_matrix

from perturbdiff.evaluation import energy_distance

means_of = (
    pd.DataFrame(other.X.toarray()).groupby(other.obs["perturbation"].to_numpy()).mean()
)
averages = ad.AnnData(means_of.loc[names].to_numpy(), names.to_frame(), real.var[[]])


def distance(predicted):
    """Return the mean energy distance over perturbations; 0 is best."""
    found = []
    for name in effects.index:
        sides = [
            csr_matrix(side[side.obs["perturbation"] == name].X)
            for side in (predicted, real)
        ]
        found.append(energy_distance(*sides))
    return np.mean(found)


candidates = {
    "means without cells": averages,
    "decent": decent,
    "real cells (ceiling)": perturbed,
}
pd.DataFrame(
    {
        "PDCorr": {name: means(cells)["PDCorr"] for name, cells in candidates.items()},
        "energy distance": {name: distance(cells) for name, cells in candidates.items()},
        "share of zeros": {
            name: 1 - csr_matrix(cells.X).nnz / np.prod(cells.shape)
            for name, cells in candidates.items()
        },
    }
).round(2)

# %% [markdown]
# ## Pitfall 3: one answer for all
#
# Perturbations often change the same genes. A method that predicts the *average* change for each of them can have a
# respectable PDCorr. PDS asks whether the prediction belongs to its own perturbation. Its chance level is near 0.5.

# %%
one_answer = means(predict(0 * effects + effects.mean()))
one_answer[["PDCorr", "PDS_L1"]].round(2)

# %% [markdown]
# ## Pitfall 4: other units
#
# If one side is not log1p of the same depth, all changes move together and every score is wrong. `compare` cannot know
# your units. `perturbdiff.evaluate` looks at the values and refuses what is clearly on the wrong scale:

# %%
counts = ad.read_h5ad("screen/counts.h5ad")[half].copy()
counts.obs = counts.obs[["perturbation"]]
try:
    perturbdiff.evaluate(decent, counts, control="control", scale="log1p")
except perturbdiff.UserError as refused:
    print(refused)

# %% [markdown]
# ## The same by one command
#
# `evaluate` computes all metrics, with intervals and chance levels. `ceiling` scores real cells against real cells.
# `report` puts any number of methods on one page.
#
# ```bash
# perturbdiff evaluate decent.h5ad real.h5ad --out scores/decent --pert-col perturbation --control control --scale log1p
# perturbdiff ceiling real.h5ad --out scores/ceiling --pert-col perturbation --control control --scale log1p
# perturbdiff report scores/decent scores/ceiling --out report.html
# ```
#
# Next: [Reading the report](reading-the-report.ipynb), or [Add your method](add-your-method.ipynb).
