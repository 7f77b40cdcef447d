# %% [markdown]
# # Train on a real screen
#
# This tutorial goes from an AnnData to a trained model, its scores beside simple baselines, and a picture of the cells.
# It ends with what the result shows and what it does not.
#
# The data are blood cells of two patients, with interferon-β and without (Kang et al. 2018). The question: the response
# of B cells was never measured. Can we predict it from the responses of the other cell types?

# %% [markdown]
# ## The data
#
# The file has a name in the registry of [data sets](../reference/datasets.md). It is no part of the package. Your own
# file works the same way: raw counts, and a column that says which cells are perturbed.

# %%
import anndata as ad

from perturbdiff import datasets

adata = ad.read_h5ad(datasets.find("kang18-ifnb"))
adata

# %%
adata.obs.groupby(["cell_type", "perturbation"], observed=True).size().unstack()

# %% [markdown]
# ## Fit
#
# We name the columns and say what is held out: all stimulated B cells. The model sees B cells only as controls. The
# preset `kang18` has the length of training for data of this size.

# %%
import logging

from perturbdiff import PerturbDiff

# without this line you can watch the training
logging.getLogger("perturbdiff").setLevel("WARNING")

model = PerturbDiff(
    adata,
    perturbation="perturbation",
    control="control",
    cell_type="cell_type",
    batch="donor",
    config="kang18",
    settings={"split.held_out": ["B"], "data.num_hvgs": None},
)
model.fit()

# %% [markdown]
# Always look at what is held out before you believe a score. There are two test conditions, the B cells of two donors.

# %%
split = model.split
split.groupby(["cell_type", "part"], observed=True)["n_cells"].sum().unstack(fill_value=0)

# %% [markdown]
# ## Score
#
# `evaluate` predicts the held-out conditions with the model and with baselines, and scores all of them against the same
# real cells. The *ceiling* is the score of one half of the real cells against the other half.

# %%
scores = model.evaluate(baselines=("control", "nearest-context", "linear", "resample"))
KEY = ["energy_distance", "PDCorr", "DEOver", "AUPRC", "R2"]
scores[KEY].round(2)

# %% [markdown]
# - `control` predicts that nothing happens.
# - `nearest-context` adds the mean change seen in the most similar cell type to control cells.
# - `linear` is a linear model of mean changes.
# - `resample` draws stimulated cells of the other cell types.
#
# Energy distance is best at 0. For the others, higher is better. [The catalogue](../reference/metrics.md) defines them.

# %% [markdown]
# *See in the figure:* each dot is a method, and the solid line is the ceiling. A method is good if it is near the line,
# and useful if it is better than the baselines. With several perturbations a dashed line would show chance.

# %%
# alt: Three charts of points: energy distance, PDCorr and AUPRC of the model and
# alt: four baselines, with a line at the ceiling.
scores.plot(["energy_distance", "PDCorr", "AUPRC"])

# %% [markdown]
# ## Look at the cells
#
# Scores are means. Now we look at the predicted cells themselves. `predict` returns an AnnData with your columns and
# units, so that it can be joined with your data.

# %%
predicted = model.predict()
predicted

# %%
import numpy as np
import scanpy as sc

b_cells = adata[adata.obs["cell_type"] == "B", predicted.var_names]
both = ad.concat(
    {"real": b_cells, "predicted": predicted}, label="source", index_unique="-"
)
is_control = both.obs["perturbation"] == "control"
both.obs["kind"] = np.where(is_control, "control", both.obs["source"].astype(str))
sc.pp.normalize_total(both, target_sum=1000)
sc.pp.log1p(both)
sc.pp.pca(both, n_comps=2, svd_solver="arpack")

# %% [markdown]
# *See in the figure:* the predicted cells (purple) should cover the stimulated B cells (green), not the controls
# (grey), and should be as widely spread.

# %%
# alt: Scatter plot of B cells on two principal components: control cells in grey,
# alt: real ones in green, predicted ones in purple.
COLOURS = {"control": "lightgrey", "real": "tab:green", "predicted": "tab:purple"}
sc.pl.pca(both, color="kind", palette=COLOURS, size=40, alpha=0.7, title="B cells")

# %% [markdown]
# ## Look at genes
#
# *See in the figure:* one point per gene. On the diagonal, the predicted change is the measured one. A flat cloud would
# mean that nothing was learnt.

# %%
# alt: Scatter plot of genes: measured against predicted change, with the diagonal
# alt: and the names of the six largest changes.
import matplotlib.pyplot as plt

means = {kind: np.ravel(both[both.obs["kind"] == kind].X.mean(axis=0)) for kind in COLOURS}
truth, guess = means["real"] - means["control"], means["predicted"] - means["control"]
fig, axis = plt.subplots(figsize=(3.8, 3.6))
axis.axline((0, 0), slope=1, color="0.8")
axis.plot(truth, guess, ".", ms=4)
for gene in np.argsort(-np.abs(truth))[:6]:
    axis.annotate(both.var_names[gene], (truth[gene], guess[gene]), fontsize=8)
axis.set(xlabel="measured change (log1p)", ylabel="predicted change (log1p)")
plt.show()

# %% [markdown]
# ## Keep the model
#
# A saved model is a folder, the *bundle*. It predicts on another machine without these data.
# [New conditions](new-conditions.ipynb) shows how.

# %%
model.save("kang18-model").name

# %% [markdown]
# ## What this shows, and what it does not
#
# - **It works.** The model never saw a stimulated B cell, and finds most of the direction of the response: PDCorr is
#   0.86, where half of the real cells reach 0.95.
# - **It is better than simple methods in some respects.** It ranks the genes that change better (AUPRC 0.66;
#   `resample` has 0.57, the others 0.32), and its cells are a little nearer to the real ones (energy
#   distance 0.65 against 0.73).
# - **It is not better in all.** In the mean change (PDCorr) and the overlap of the top genes (DEOver) there is no clear
#   difference from `nearest-context` and `linear`.
# - **It says too little.** In the last figure most strong genes lie below the diagonal. *CXCL10* is nearly missed. In
#   the figure of cells, some predictions stay on the side of the controls.
# - **This is one small test.** There are two test conditions and one perturbation, so the intervals mean little. Both
#   donors were seen in training. Before you claim anything, hold out each cell type in turn and use several seeds.
#   [Results](../results.md) does that for these data.
# - R² is 0.84 even for `control`, which predicts nothing. Never report it alone.
