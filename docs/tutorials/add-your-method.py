# %% [markdown]
# # Add your method
#
# You have an idea for predicting responses. This tutorial puts it beside the baselines of the package: same training
# cells, same held-out conditions, same real controls, same table.
#
# All you write is one script, the *adapter*. It reads a folder with training cells and questions, and writes predicted
# cells. It may be written in any language and run in an environment of its own.

# %% [markdown]
# ## Data and a split
#
# We simulate a small screen, make a store of it, and hold out most perturbations of one cell type. With your own data
# you begin at `preprocess`.

# %% language="bash"
# perturbdiff -q simulate --out screen --cells 5000 --seed 2 --set simulate.genes=400 --set simulate.batches=1
# perturbdiff -q preprocess screen/counts.h5ad --out store --set data.num_hvgs=400
# perturbdiff -q split store --out split.parquet --set split.context_column=cell_type \
#     --set split.num_held_out=1 --set split.valid_fraction=0

# %%
import pandas as pd

split = pd.read_parquet("split.parquet")
split.groupby(["cell_type", "part"], observed=True).size().unstack(fill_value=0)

# %% [markdown]
# The numbers are conditions. The model may learn from `train`, and has to predict `test`.

# %% [markdown]
# ## The adapter
#
# The idea of this example: a perturbation does in a new cell type what it did, on average, in the others, but a little
# less. The script measures the mean change of each perturbation, shrinks it, and adds it to control cells.
#
# `task.train` holds the training cells and all controls as log1p values. `task.queries` has a line for each cell to
# predict, with the number of a matching control cell in `control_row`.

# %%
# %%writefile shrunken.py
import numpy as np
from perturbdiff_adapter import open_task

task = open_task()
labels, types = task.labels("perturbation"), task.labels("cell_type")


def mean(rows):
    return np.asarray(task.train.X[rows].mean(axis=0)).ravel()


changes = {}
for name in sorted(set(labels) - {task.control}):
    found = []
    for cell_type in sorted(set(types[labels == name])):
        here = types == cell_type
        found.append(mean(here & (labels == name)) - mean(here & (labels == task.control)))
    changes[name] = task.settings.get("shrink", 0.8) * np.mean(found, axis=0)

values = task.dense(task.queries["control_row"].to_numpy())
for name, rows in task.queries.groupby("perturbation").indices.items():
    if name not in changes:
        task.refuse(f"{name} was never seen in training")
    values[rows] += changes[name]
task.note(from_control_row=True)
task.write(np.maximum(values, 0))

# %% [markdown]
# ## Run it
#
# The command makes the folder, runs the script, checks what it wrote and adds the real controls.

# %% language="bash"
# perturbdiff -q baseline script store --split split.parquet --script shrunken.py --name shrunken --out shrunken.h5ad

# %% [markdown]
# A setting of your script is passed by `--set baseline.options.NAME=VALUE`. A script that cannot do a task says so by
# `task.refuse`, and the report then shows the method as failed, with your reason.

# %% [markdown]
# ## The others
#
# Baselines run by name. We take three: nothing happens (`control`), the mean change seen in other contexts
# (`nearest-context`), and a linear model.

# %% language="bash"
# for name in control nearest-context linear; do
#     perturbdiff -q baseline $name store --split split.parquet --out $name.h5ad
# done

# %% [markdown]
# ## Score all of them
#
# The store is the truth. The ceiling is one half of the real cells against the other half.

# %% language="bash"
# for name in shrunken control nearest-context linear; do
#     perturbdiff -q evaluate $name.h5ad store --out scores/$name --method $name
# done
# perturbdiff -q ceiling store --split split.parquet --out scores/ceiling

# %%
METRICS = ["energy_distance", "PDCorr", "DEOver_10", "AUPRC", "PDS_L1"]


def means(name):
    """Return the mean of each metric over perturbations, as the report has it."""
    table = pd.read_csv(f"scores/{name}/aggregate.csv")
    return (
        table[table["scope_kind"] == "pooled"].set_index("metric").loc[METRICS, "nanmean"]
    )


names = ["shrunken", "nearest-context", "linear", "control", "ceiling"]
pd.DataFrame({name: means(name) for name in names}).T.round(2)

# %% [markdown]
# ## Is the difference real?
#
# Means hide how often a method is better. All methods predicted the same conditions, so we can compare them one by one.
# *See in the figure:* each point is a condition. Points below the line are conditions in which the script is nearer to
# the real cells than `nearest-context` is.

# %%
# alt: Scatter plot: energy distance of each condition, shrunken method against
# alt: nearest-context, with the diagonal.
import matplotlib.pyplot as plt

pairs = pd.concat(
    {
        name: pd.read_csv(f"scores/{name}/conditions.csv").set_index(
            ["cell_type", "perturbation"]
        )["energy_distance"]
        for name in ("shrunken", "nearest-context")
    },
    axis=1,
)
fig, axis = plt.subplots(figsize=(3.6, 3.4))
axis.plot([0, pairs.max().max()], [0, pairs.max().max()], color="0.8")
axis.plot(pairs["nearest-context"], pairs["shrunken"], "o", ms=5)
axis.set_xlabel("energy distance, nearest-context")
axis.set_ylabel("energy distance, shrunken")
plt.show()
better = (pairs["shrunken"] < pairs["nearest-context"]).sum()
print(f"shrunken is nearer to the real cells in {better} of {len(pairs)} conditions")

# %% [markdown]
# ## The report
#
# One page with all of it, for you and your readers:
#
# ```bash
# perturbdiff report scores/* --against nearest-context --out report.html
# ```
#
# - [Reading the report](reading-the-report.ipynb) explains the page.
# - [The guide to adapters](../adapters.md) has the whole contract, other languages and GPUs.
# - In the workflow, your script is a row of the samplesheet with `mode` `script`.
