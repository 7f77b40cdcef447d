# %% [markdown]
# # From a bundle to new conditions
#
# A trained model is a folder, the *bundle*. Whoever has it can predict cells for conditions that were never measured,
# with nothing but control cells. This tutorial makes a bundle, forgets the data, and asks for new conditions.
#
# The data are simulated, so that we can compare with the truth afterwards.

# %% [markdown]
# ## Somebody trains a model
#
# Skip this part if you have been given a bundle. The screen has three cell types. One of them, `cell_type_3`, is
# measured without perturbations: it has only control cells.

# %%
import logging

import perturbdiff
from perturbdiff import PerturbDiff

logging.getLogger("perturbdiff").setLevel("WARNING")

SIMULATION = {
    "simulate.genes": 300,
    "simulate.batches": 1,
    "simulate.tiny_fraction": 0,
    "simulate.drugs": 0,
}
screen = perturbdiff.simulate(cells=5000, settings=SIMULATION, seed=4)
is_control = screen.obs["perturbation"] == "control"
measured = screen[is_control | (screen.obs["cell_type"] != "cell_type_3")].copy()
measured.obs.groupby("cell_type", observed=True)["perturbation"].nunique()

# %%
model = PerturbDiff(
    measured,
    perturbation="perturbation",
    control="control",
    cell_type="cell_type",
    settings={
        "data.num_hvgs": 300,
        "split.context_column": "cell_type",
        "split.held_out": ["cell_type_2"],
        "split.train_fraction": 0.9,
    },
)
model.fit().save("bundle").name

# %% [markdown]
# ## You receive the bundle
#
# It holds the weights, the genes, the labels and the recipe. Its README says what it was trained on.

# %%
trained = PerturbDiff.load("bundle")
trained

# %% [markdown]
# ## Ask for new conditions
#
# A prediction starts from control cells. Here they are the controls of `cell_type_3`, in which no perturbation was ever
# measured. We ask for three perturbations by name.

# %%
controls = screen[is_control & (screen.obs["cell_type"] == "cell_type_3")].copy()
names = [name for name in trained.bundle.vocabulary.perturbation if name != "control"]
wanted = names[:3]
predicted = trained.predict(wanted, controls=controls)
predicted

# %% [markdown]
# The answer has your column names and your units. As many cells come back as there are control cells, unless a table
# with a column `n_cells` says otherwise:

# %%
import pandas as pd

table = pd.DataFrame(
    {
        "perturbation": wanted,
        "cell_type": "cell_type_3",
        "n_cells": [200, 100, 50],
    }
)
predicted = trained.predict(table, controls=controls)
predicted.obs["perturbation"].value_counts()

# %% [markdown]
# ## What the model cannot do
#
# A perturbation that was not in the training has no meaning for this model. It says so instead of guessing. (Vectors
# that describe perturbations can change that: see [semantic vectors](../embeddings.md).)

# %%
try:
    trained.predict(["A new drug"], controls=controls)
except perturbdiff.UserError as refused:
    print(refused)

# %% [markdown]
# ## Look at the cells
#
# The screen was simulated, so the real cells of `cell_type_3` exist, although the model never saw them.

# %%
import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import scanpy as sc

here = screen.obs["perturbation"].isin([*wanted, "control"])
real = screen[here & (screen.obs["cell_type"] == "cell_type_3"), predicted.var_names].copy()
both = ad.concat({"real": real, "predicted": predicted}, label="source", index_unique="-")
control = both.obs["perturbation"] == "control"
both.obs["kind"] = np.where(control, "control", both.obs["source"].astype(str))
sc.pp.normalize_total(both, target_sum=300)
sc.pp.log1p(both)
sc.pp.pca(both, n_comps=2, svd_solver="arpack")

# %% [markdown]
# *See in the figure:* the predicted cells (purple) should lie where the real ones are (green), away from the controls
# (grey).

# %%
# alt: Three scatter plots of cells on two principal components, one for each
# alt: perturbation: control cells in grey, real ones in green, predicted ones in
# alt: purple.
COLOURS = {"control": "lightgrey", "real": "tab:green", "predicted": "tab:purple"}
fig, axes = plt.subplots(1, 3, figsize=(8, 2.8), sharex=True, sharey=True)
for axis, name in zip(axes, wanted, strict=True):
    shown = both[control | (both.obs["perturbation"] == name)].copy()
    options = {"title": name, "ax": axis, "show": False, "legend_loc": "none"}
    if name == wanted[-1]:
        options["legend_loc"] = "right margin"
    sc.pl.pca(shown, color="kind", palette=COLOURS, size=30, alpha=0.7, **options)
plt.show()

# %% [markdown]
# The direction is right. The cells of the first perturbation do not go far enough: a cell type may respond more
# strongly than those that the model has seen, and nothing in its controls tells that.

# %% [markdown]
# ## How good is it?
#
# With real cells at hand, we score the prediction. Beside it stands what nobody should be worse than: control cells
# that are called perturbed, as if nothing happened.

# %%
draw = np.random.default_rng(0).choice(controls.n_obs, predicted.n_obs)
unchanged = ad.AnnData(
    controls[draw, predicted.var_names].X,
    predicted.obs.copy(),
    predicted.var[[]],
)
scores = {
    "model": perturbdiff.evaluate(predicted, real, control="control", scale="counts"),
    "no change": perturbdiff.evaluate(unchanged, real, control="control", scale="counts"),
}
KEY = ["energy_distance", "PDCorr", "DEOver", "AUPRC"]
pd.concat({name: score[KEY].iloc[0] for name, score in scores.items()}, axis=1).T.round(2)

# %% [markdown]
# Energy distance is best at 0, the others at 1. Three perturbations are too few for a mean, so read these numbers as
# examples.
#
# ## In short
#
# - A bundle predicts any perturbation *it knows* in any cells *you have controls of*.
# - The controls decide the cell type. The farther they are from what the model was trained on, the less you should
#   trust the answer. Hold out a whole cell type while you train, as [the first tutorial](train-on-a-screen.ipynb) does,
#   to see how much is lost.
# - On the command line, the same is `perturbdiff sample bundle controls.h5ad --conditions wanted.csv --out new.h5ad`.
#   [Sampling](../sampling.md) has guidance, GPUs and large tables.
