"""Small screens as people have them: each is a function from a folder to the options of ``perturbdiff run``."""

import gzip
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.io
import scipy.sparse as sp
from tiny_data import tiny_counts


def _columns(adata: ad.AnnData) -> ad.AnnData:
    """Give the labels as plain texts, so that a test can change them."""
    adata.obs = adata.obs.astype(str)
    return adata


def _saved(adata: ad.AnnData, folder: Path, *options: str) -> list[str]:
    adata.write_h5ad(folder / "my.h5ad")
    return [str(folder / "my.h5ad"), *options]


def _logged(adata: ad.AnnData) -> sp.csr_matrix:
    counts = np.asarray(adata.X.todense())
    return sp.csr_matrix(np.log1p(counts / counts.sum(axis=1, keepdims=True) * 1e4).astype(np.float32))


def counts_in_a_layer(folder, adata=None):
    adata = tiny_counts() if adata is None else adata
    adata.layers["umi counts"] = adata.X.copy()
    adata.X = _logged(adata)
    return _saved(adata, folder)


def only_logarithms(folder):
    adata = tiny_counts()
    adata.X = _logged(adata)
    return _saved(adata, folder)


def scaled_with_logarithms_in_raw(folder):
    adata = tiny_counts()
    adata.X = _logged(adata)
    adata.raw = adata.copy()
    values = np.asarray(adata.X.todense())
    adata = adata[:, :40].copy()
    adata.X = ((values - values.mean(axis=0)) / (values.std(axis=0) + 1e-6)).astype(np.float32)[:, :40]
    return _saved(adata, folder)


def odd_column_names(folder):
    adata = _columns(tiny_counts())
    adata.obs = adata.obs.rename(
        columns={"perturbation": "Stim.Condition", "cell_type": "Cell Type", "batch": "Donor ID"}
    )
    adata.obs["Stim.Condition"] = adata.obs["Stim.Condition"].replace("control", "Un-stim")
    adata.obs["n_counts"] = np.random.default_rng(0).random(adata.n_obs)
    adata.obs["barcode"] = adata.obs_names
    adata.X = sp.csc_matrix(adata.X)
    return _saved(adata, folder)


def integer_labels(folder):
    adata = _columns(tiny_counts())
    adata.obs["batch"] = adata.obs["batch"].map({"d1": 1, "d2": 2})
    adata.obs["perturbation"] = adata.obs["perturbation"].map({"control": 0, "p1": 1, "p2": 2, "p3": 3})
    return _saved(adata, folder, "--control", "0")


def _identified(adata: ad.AnnData) -> ad.AnnData:
    """Name the genes by Ensembl IDs, beside symbols that are not unique."""
    adata.var["gene_name"] = [f"SYMBOL{i // 2}" for i in range(adata.n_vars)]
    adata.var_names = [f"ENSG{i:011d}" for i in range(adata.n_vars)]
    return adata


def ensembl_ids_with_duplicate_symbols(folder):
    return _saved(_identified(tiny_counts()), folder)


def duplicate_symbols_with_ids(folder):
    adata = tiny_counts()
    adata.var["gene_ids"] = [f"ENSG{i:011d}" for i in range(adata.n_vars)]
    adata.var_names = [f"SYMBOL{i // 2}" for i in range(adata.n_vars)]
    return _saved(adata, folder)


def missing_labels(folder):
    adata = _columns(tiny_counts())
    adata.obs.loc[adata.obs_names[:9], "perturbation"] = np.nan
    adata.obs.loc[adata.obs_names[5:12], "cell_type"] = np.nan
    return _saved(adata, folder)


def _of_the_world(adata: ad.AnnData) -> ad.AnnData:
    """Give labels with spaces, commas, Greek, Cyrillic and Chinese letters."""
    adata = _columns(adata)
    adata.obs["perturbation"] = adata.obs["perturbation"].replace(
        {"control": "ctrl", "p1": "IFN-β", "p2": "TGF-β 1", "p3": "шок, 42 °C"}
    )
    adata.obs["cell_type"] = adata.obs["cell_type"].replace({"B": "Zelle Ä", "T": "細胞"})
    return adata


def unicode_labels(folder):
    adata = _of_the_world(tiny_counts())
    adata.X = np.asarray(adata.X.todense())
    adata.write_zarr(folder / "my.zarr")
    return [str(folder / "my.zarr")]


def one_perturbation(folder):
    adata = tiny_counts()
    adata = adata[adata.obs["perturbation"].isin(["control", "p1"])].copy()
    return _saved(adata, folder)  # the categories p2 and p3 stay, without cells


def no_batch_and_no_cell_type(folder):
    adata = tiny_counts()
    adata.obs = adata.obs[["perturbation"]]
    return _saved(adata, folder)


def ids_and_unicode_labels_in_a_layer(folder):
    return counts_in_a_layer(folder, _identified(_of_the_world(tiny_counts())))


def one_perturbation_without_batch_and_cell_type(folder):
    adata = tiny_counts()
    adata = adata[adata.obs["perturbation"].isin(["control", "p1"])].copy()
    adata.obs = adata.obs[["perturbation"]]
    return _saved(adata, folder)


def tenx_folder(folder):
    """Cell Ranger's text files, with the labels in a table beside them."""
    adata = tiny_counts()
    place = folder / "filtered_feature_bc_matrix"
    place.mkdir()
    with gzip.open(place / "matrix.mtx.gz", "wb") as handle:
        scipy.io.mmwrite(handle, sp.coo_matrix(adata.X.T.astype(np.int32)))
    lines = {
        "barcodes": adata.obs_names,
        "features": [f"ENSG{i:011d}\tSYMBOL{i // 2}\tGene Expression" for i in range(adata.n_vars)],
    }
    for name, texts in lines.items():
        with gzip.open(place / f"{name}.tsv.gz", "wt") as handle:
            handle.writelines(f"{text}\n" for text in texts)
    adata.obs.rename_axis("barcode").to_csv(folder / "labels.csv")
    return [str(place), "--obs", str(folder / "labels.csv")]


def hopeless(folder):
    adata = _columns(tiny_counts())
    adata.X = np.asarray(adata.X.todense()) - 1.5
    adata.obs = adata.obs[["perturbation"]].replace("control", "first")
    adata.var_names = ["same", *adata.var_names[1:-1], "same"]
    return _saved(adata, folder, "--batch-col", "plate")


def nothing_known(folder):
    adata = tiny_counts()
    adata.obs = pd.DataFrame(index=adata.obs_names)
    return _saved(adata, folder)


RUN = (
    counts_in_a_layer, only_logarithms, odd_column_names, integer_labels, ensembl_ids_with_duplicate_symbols,
    missing_labels, unicode_labels, one_perturbation, no_batch_and_no_cell_type, tenx_folder,
)  # fmt: skip
"""These end in a report."""
UNDERSTOOD = (*RUN, scaled_with_logarithms_in_raw, duplicate_symbols_with_ids)
"""These have no problems."""
REFUSED = (hopeless, nothing_known)
"""These end in one message."""
