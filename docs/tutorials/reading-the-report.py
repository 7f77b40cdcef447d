# %% [markdown]
# # Reading the report
#
# The report compares methods on one page. This tutorial makes a report on three invented methods, one good, one bad and
# one that lies, and shows in which part of the page each of them is found out.
#
# The data are simulated, so we know what is true before we look.

# %% [markdown]
# ## A screen and three methods
#
# The screen has two cell types and fourteen perturbations. Half of its cells are the truth. Methods may look at the
# other half.

# %%
import logging
from pathlib import Path

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import scanpy as sc

import perturbdiff

logging.getLogger("perturbdiff").setLevel("WARNING")
SCREEN = {
    "genes": 400,
    "cell_types": 2,
    "batches": 1,
    "drugs": 0,
    "size_spread": 0.2,
    "tiny_fraction": 0,
    "wells": 1,
}
settings = {f"simulate.{name}": value for name, value in SCREEN.items()}
cells = perturbdiff.simulate("screen", cells=8000, settings=settings, seed=3)
sc.pp.normalize_total(cells)
sc.pp.log1p(cells)
half = np.random.default_rng(0).permutation(cells.n_obs) % 2 == 0
real, other = cells[half].copy(), cells[~half].copy()
real.obs = real.obs[["cell_type", "perturbation"]]
effects = pd.read_parquet("screen/effects.parquet").pivot(
    index=["cell_type", "perturbation"],
    columns="gene",
    values="log_fold_change",
)[real.var_names]

# %% [markdown]
# - **good** finds 80 % of every true log fold change and applies it to control cells.
# - **bad** has learnt that something happens and applies the *average* change to every perturbation.
# - **lying** has peeked at the answers' means. It repeats the mean profile in every cell, and so it has perfect means
#   but no cells.


# %%
wanted = real.obs[real.obs["perturbation"] != "control"].astype(str)
conditions = pd.MultiIndex.from_frame(wanted)
controls = other[other.obs["perturbation"] == "control"]
of_type = controls.obs.groupby("cell_type", observed=True).indices
rng = np.random.default_rng(0)
start = controls.X[[rng.choice(of_type[name]) for name in wanted["cell_type"]]]


def changed(by):
    """Return control cells changed by the log fold changes of their conditions."""
    counts = np.expm1(start.toarray()) * np.exp(by.loc[conditions].to_numpy())
    return ad.AnnData(np.log1p(counts), wanted, real.var[[]])


labels = [other.obs[name].astype(str).to_numpy() for name in ("cell_type", "perturbation")]
means = pd.DataFrame(other.X.toarray()).groupby(labels).mean()
predictions = {
    "good": changed(0.8 * effects),
    "bad": changed(effects.groupby("cell_type", observed=True).transform("mean")),
    "lying": ad.AnnData(means.loc[conditions].to_numpy(), wanted, real.var[[]]),
}
METHODS = list(predictions)
predictions["good"]

# %% [markdown]
# ## From files to the report
#
# `evaluate` scores each method, `ceiling` scores real cells against real cells, and the report puts them on one page.
# On the command line these are `perturbdiff evaluate`, `ceiling` and `report`.

# %%
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation import ceiling

for method, cells in predictions.items():
    options = {
        "control": "control",
        "scale": "log1p",
        "method": method,
        "dataset": "screen",
    }
    perturbdiff.evaluate(cells, real, f"scores/{method}", **options)
real.write_h5ad("screen.h5ad")
ceiling(
    Path("screen.h5ad"),
    Path("scores/ceiling"),
    EvaluateConfig(control="control", scale="log1p"),
)
runs = [f"scores/{name}" for name in (*METHODS, "ceiling")]
perturbdiff.report(runs, "report.html", against="bad").name

# %% [markdown]
# The page is one file. It needs no network, so you can send it to anyone. What follows reads the same numbers from the
# tables beside it, so that you see where they come from.

# %% [markdown]
# ## First: energy distance and the ceiling
#
# The *energy distance* compares whole populations of cells. Zero is best. The *ceiling* is what real cells reach
# against real cells, and *chance* is what a prediction reaches against the wrong perturbation.

# %%
tables = {
    name: pd.read_csv(f"scores/{name}/aggregate.csv") for name in (*METHODS, "ceiling")
}


def mean_of(name, metric, column="nanmean"):
    """Return a number of the table of means, over all cells."""
    table = tables[name]
    return table[(table["scope_kind"] == "pooled") & (table["metric"] == metric)][
        column
    ].item()


KEY = ["energy_distance", "PDCorr", "PDS_L1", "DEOver_10", "AUPRC"]
table = pd.DataFrame(
    {name: {metric: mean_of(name, metric) for metric in KEY} for name in tables}
)
table.insert(0, "chance", [mean_of("good", metric, "chance") for metric in KEY])
table.round(2)

# %% [markdown]
# Read it column by column:
#
# - *good* is far from chance everywhere. It is not at the ceiling, so there is something left to do.
# - *bad* is near chance in PDS, DE overlap and AUPRC. Its answer belongs to no perturbation in particular.
# - *lying* reaches the ceiling in PDCorr and PDS, and beats *good* in DE overlap. But its energy distance is far worse
#   than chance, and so is its AUPRC: without spread, every gene looks significant. The means are right, and there are
#   no cells.

# %% [markdown]
# *See in the figure:* a fair method is good on both axes. The liar is at the top and far to the right.

# %%
# alt: Scatter plot: energy distance against PDCorr, one point for each method and
# alt: for the ceiling.
fig, axis = plt.subplots(figsize=(5, 3))
for name, colour in zip(
    tables, ["tab:blue", "tab:orange", "tab:red", "black"], strict=True
):
    axis.plot(
        mean_of(name, "energy_distance"),
        mean_of(name, "PDCorr"),
        "o",
        color=colour,
        ms=9,
        label=name,
    )
axis.set_xlabel("energy distance (0 is best)")
axis.set_ylabel("PDCorr (1 is best)")
axis.legend(loc="center")
plt.show()

# %% [markdown]
# ## Then: are the cells real?
#
# Ratios are predicted over real, so 1 is best. A method without spread has 0 in *SD of genes*. A method that averages
# has far too many non-zero values.

# %%
REALISM = [
    "nonzero_ratio",
    "gene_sd_ratio",
    "cell_sd_ratio",
    "correlation_agreement",
]
pd.DataFrame(
    {name: {metric: mean_of(name, metric) for metric in REALISM} for name in tables}
).round(2)

# %% [markdown]
# The last row is a warning. Agreement of gene–gene correlations is low even between two halves of the real cells. With
# so few cells it cannot judge anybody, so do not read it here.

# %% [markdown]
# ## Are different perturbations predicted differently?
#
# The *collapse check* compares how alike the predicted changes are with how alike the real changes are. This is where
# *bad* is found out.

# %%
alike = pd.concat(
    [pd.read_csv(f"scores/{name}/collapse.csv").head(1) for name in tables],
    keys=tables,
)
alike.droplevel(1)[["real", "predicted", "verdict"]].round(2)

# %% [markdown]
# ## What a picture of cells shows
#
# The report draws the cells of some conditions in two principal components of the real cells. *See in the figure:* good
# predictions come near the real cells and are as widely spread. The liar's cells are a single point in their middle.

# %%
# alt: Three scatter plots of cells in the report's embedding: control cells in
# alt: grey, real ones in green, predicted ones in purple.
fig, axes = plt.subplots(1, 3, figsize=(8.5, 2.8), sharex=True, sharey=True)
for axis, name in zip(axes, METHODS, strict=True):
    points = pd.read_parquet(f"scores/{name}/embedding.parquet")
    points = points[points["condition"] == points["condition"].unique()[2]]
    for source, colour in [
        ("control", "0.8"),
        ("real", "tab:green"),
        ("predicted", "tab:purple"),
    ]:
        shown = points[points["source"] == source]
        axis.scatter(
            shown["x"],
            shown["y"],
            s=14 if source == "predicted" else 6,
            color=colour,
            label=source,
            alpha=0.6,
            linewidths=0,
        )
    axis.set_title(name)
axes[-1].legend(markerscale=2, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## What the report warns of
#
# Every evaluation writes what limits its numbers. The report shows these sentences where you cannot miss them.

# %%
import json

for name in METHODS:
    for finding in json.loads(Path(f"scores/{name}/summary.json").read_text())["findings"]:
        print(f"{name}: {finding['text']}")

# %% [markdown]
# *bad* is named. *lying* gets no warning in this list: no rule replaces a look at distances, realism and cells.

# %% [markdown]
# ## In short
#
# 1. Look at the ceiling first. Where it is no better than chance, nobody can be judged.
# 2. Believe no mean without the cells: read energy distance and realism beside PDCorr.
# 3. Ask whether predictions differ between perturbations: PDS and the collapse check.
# 4. Compare with baselines. *No change* and *the same change as elsewhere* are hard to beat.
# 5. Read the warnings and the number of perturbations behind a mean.
#
# [The guide to the report](../report.md) explains every part of the page.
