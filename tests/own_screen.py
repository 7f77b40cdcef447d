"""A simulated screen as a user may have it: columns, labels and extras of its own."""

import anndata

import perturbdiff

COLUMNS = {"perturbation": "gene", "control": "ntc", "cell_type": "line", "batch": "plate"}
SETTINGS = {
    "split.context_column": "plate",
    "split.held_out": ["2"],
    "split.train_fraction": 0.5,
    "train.max_steps": 6,
    "evaluate.bootstrap": 50,
}


def own_screen() -> anndata.AnnData:
    """1,200 cells of 90 genes: 4 knock-downs and controls (texts), 3 cell types (categories), 2 plates (integers)."""
    changes = {"simulate.genes": 90, "simulate.knockdowns": 4, "simulate.drugs": 0, "simulate.cytokines": 0}
    made = perturbdiff.simulate(cells=1200, settings={**changes, "simulate.tiny_fraction": 0.0}, seed=3)
    adata = anndata.AnnData(made.X.astype("float32"), var=made.var[[]].copy())
    adata.obs_names = [f"AAAC-{i}" for i in range(adata.n_obs)]
    adata.obs["gene"] = made.obs["perturbation"].astype(str).replace("control", "ntc").to_numpy(object)
    adata.obs["line"] = made.obs["cell_type"].to_numpy()
    adata.obs["line"] = adata.obs["line"].astype("category")
    adata.obs["plate"] = made.obs["batch"].astype("category").cat.codes.to_numpy().astype(int) + 1
    adata.var["symbol"] = [f"sym{i}" for i in range(adata.n_vars)]
    adata.obsm["X_pca"] = made.X[:, :2].toarray()
    adata.uns["note"] = {"a": 1}
    return adata
