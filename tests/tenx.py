"""An h5 file as 10x Genomics' Cell Ranger writes it."""

import h5py
import numpy as np
import scipy.sparse as sp


def write_tenx(path, adata, *, types=None, version=3, genome="GRCh38", mode="w"):
    """Write counts as Cell Ranger does: int32, features x barcodes by columns."""
    matrix = sp.csr_matrix(adata.X)
    ids = [f"ENSG{i:011d}" for i in range(adata.n_vars)]
    with h5py.File(path, mode) as file:
        group = file.create_group("matrix" if version == 3 else genome)
        group["barcodes"] = np.array(adata.obs_names, "S20")
        group["data"] = matrix.data.astype(np.int32)
        group["indices"] = matrix.indices.astype(np.int64)
        group["indptr"] = matrix.indptr.astype(np.int64)
        group["shape"] = np.array(adata.shape[::-1], np.int32)
        if version == 3:
            features = group.create_group("features")
            features["_all_tag_keys"] = np.array([b"genome"])
            features["id"] = np.array(ids, "S20")
            features["name"] = np.array(adata.var_names, "S20")
            features["feature_type"] = np.array(types or ["Gene Expression"] * adata.n_vars, "S20")
            features["genome"] = np.array([genome] * adata.n_vars, "S20")
        else:
            group["genes"] = np.array(ids, "S20")
            group["gene_names"] = np.array(adata.var_names, "S20")
    return path
