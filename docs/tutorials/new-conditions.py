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
import perturbdiff
from perturbdiff import PerturbDiff

SIMULATION = {"simulate.genes": 300, "simulate.batches": 1, "simulate.tiny_fraction": 0, "simulate.drugs": 0}
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
    batch=False,
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
trained = PerturbDiff.load("bundle", batch=False)
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

table = pd.DataFrame({"perturbation": wanted, "cell_type": "cell_type_3", "n_cells": [200, 100, 50]})
predicted = trained.predict(table, controls=controls)
predicted.obs["perturbation"].value_counts()

# %% [markdown]
# ## What the model cannot do
#
# A perturbation that was not in the training has no meaning for this model. It says so instead of guessing. (Vectors
# that describe perturbations can change that: see [semantic vectors](../embeddings.md).)

# %%
from perturbdiff.runtime.errors import UserError

try:
    trained.predict(["A new drug"], controls=controls)
except UserError as refused:
    print(refused)

# %% [markdown]
# ## Look at the cells
