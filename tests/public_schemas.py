"""Tiny files with the layout of the public ones: names and types of columns, odd labels, sparse and dense matrices.

The labels are those of the published splits (`assets/splits`); values are drawn.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import scipy.sparse as sp
from pyarrow import parquet

from perturbdiff.splits.split_rules import read_toml

SPLITS = Path(__file__).parents[1] / "assets" / "splits"
GENES = 24


def held_out(name: str) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Return the lists of a published split: by context and part."""
    return read_toml(SPLITS / f"{name}.toml", [name]).fewshot


def labels_of(name: str) -> list[str]:
    """Return the perturbations that a published split holds out in its first context."""
    lists = next(iter(held_out(name).values()))
    return [label for labels in lists.values() for label in labels]


def _obs(contexts: list[str], perturbations: list[str], column: str, label: str) -> pd.DataFrame:
    pairs = [(context, one) for context in contexts for one in perturbations]
    return pd.DataFrame(pairs, columns=[column, label], index=[f"cell_{k}" for k in range(len(pairs))])


def _counts(cells: int, seed: int = 0) -> sp.csr_matrix:
    counts = np.random.default_rng(seed).poisson(1.5, (cells, GENES)).astype(np.float32)
    counts[:, 0] += 1
    return sp.csr_matrix(counts)


def _symbols() -> list[str]:
    return ["TSPAN6", "HLA-A", "5S_rRNA", "AC000068.1", *(f"GENE{k}" for k in range(GENES - 4))]


def _normalised(counts: sp.csr_matrix) -> sp.csr_matrix:
    depth = np.asarray(counts.sum(axis=1)).ravel()
    return sp.csr_matrix(counts.multiply(1e4 / depth[:, None]).astype(np.float32))


def parse_pbmc(path: Path) -> Path:
    """Parse Biosciences' PBMC file: categories, and symbols alone, of which one stands twice."""
    donors = [f"Donor{k}" for k in (1, 4, 9, 12, 10)]
    obs = _obs(donors, ["PBS", "IL-2", *labels_of("pbmc")], "donor", "cytokine")
    obs["sample"] = obs["donor"] + "_" + obs["cytokine"]
    obs["treatment"] = np.where(obs["cytokine"] == "PBS", "PBS", "cytokine")
    obs["cell_type"] = np.where(np.arange(len(obs)) % 2, "CD8 Naive", "CD14 Mono")
    obs.loc[obs["cytokine"] == "PBS", "cell_type"] = "CD8 Naive"
    more = obs[obs["cytokine"] == "PBS"].assign(cell_type="CD14 Mono")
    obs = pd.concat([obs, more.set_index(more.index + "b")]).astype("category")
    obs["bc1_well"] = pd.Categorical([f"{'ABCD'[k % 4]}{k % 12 + 1}" for k in range(len(obs))])
    obs["tscp_count"], obs["mread_count"] = np.int64(4000), np.int64(9000)
    symbols = [*_symbols()[:-1], "TSPAN6"]
    var = pd.DataFrame({"n_cells": np.arange(GENES, dtype=np.int64)}, index=pd.Index(symbols, name="_index"))
    ad.AnnData(_counts(len(obs)), obs, var).write_h5ad(path)
    return path


def tahoe_plate(path: Path, *, plate: int = 1, every: bool = True, normalised: bool = False) -> Path:
    """A plate of Tahoe-100M; ``normalised`` as in STATE's filtered files.

    With ``every``, it has all drugs and doses of the published split. Three further cells did not pass.
    """
    lines = [*held_out("tahoe100m"), "CVCL_0023"]
    labels = labels_of("tahoe100m")
    odd = [label for label in labels if label.startswith("[('Erdafitinib '")]
    treated = labels if every else [*odd, *labels[-3:]]
    obs = _obs(lines, ["[('DMSO_TF', 0.0, 'uM')]", "[('Trained on', 0.5, 'uM')]", *treated], "cell_line", "_")
    obs = obs.rename(columns={"_": "drugname_drugconc"})
    obs["drug"] = obs["drugname_drugconc"].str.extract(r"\('(.*)', [0-9]", expand=False)
    obs["cell_name"] = obs["cell_line"].map({name: f"Line {k}" for k, name in enumerate(lines)})
    obs["plate"], obs["sample"], obs["sublibrary"] = f"plate{plate}", f"smp_{1500 + plate}", "lib_841"
    obs["pass_filter"] = "full"
    poor = obs.iloc[:3].assign(pass_filter="minimal")
    obs = pd.concat([obs, poor.set_index(poor.index + "b")]).astype("category")
    obs["gene_count"], obs["pcnt_mito"] = np.int64(1800), np.float64(0.03)
    if normalised:
        obs["cell_type_clean"] = obs["cell_name"]
    counts = _counts(len(obs), plate)
    var = pd.DataFrame(index=pd.Index(_symbols(), name="gene_name"))
    ad.AnnData(_normalised(counts) if normalised else counts, obs, var).write_h5ad(path)
    return path


def state_replogle(path: Path) -> Path:
    """STATE's file of the Replogle screen: dense log1p values, and the variable genes again in obsm."""
    lines = ["hepg2", "jurkat", "k562", "rpe1"]
    obs = _obs(lines, ["non-targeting", "AARS", *labels_of("replogle")], "cell_line", "gene")
    obs["gem_group"] = [f"{line}{k % 2 + 1}" for k, line in enumerate(obs["cell_line"])]
    control = obs[obs["gene"] == "non-targeting"]
    other = control.assign(gem_group=control["cell_line"] + "2").set_index(control.index + "b")
    obs = pd.concat([obs, other]).astype("category")
    logs = np.log1p(_normalised(_counts(len(obs))).toarray())
    variable = np.arange(GENES) % 2 == 1
    var = pd.DataFrame({"highly_variable": variable}, index=pd.Index(_symbols(), name="gene_name"))
    cells = ad.AnnData(logs, obs, var)
    cells.obsm["X_hvg"] = logs[:, variable]
    cells.write_h5ad(path)
    return path


def tahoe_parquet(folder: Path, plates: list[Path], *, row_group_size: int = 1000) -> Path:
    """Tahoe-100M on the Hugging Face hub: the cells of ``plates`` that passed, a shard for each, and its tables.

    A cell's first entry is a marker (token 1, value -2). A sample is a drug at a dose on a plate.
    """
    (folder / "data").mkdir(parents=True)
    (folder / "metadata").mkdir()
    samples: dict[tuple[str, str], str] = {}
    for number, plate in enumerate(plates):
        cells = ad.read_h5ad(plate)
        cells = cells[cells.obs["pass_filter"] == "full"]
        obs, counts = cells.obs.astype(str), sp.csr_matrix(cells.X)
        pairs = list(zip(obs["plate"], obs["drugname_drugconc"], strict=True))
        table = {
            "genes": [[1, *(counts.indices[a:b] + 3)] for a, b in pairwise(counts.indptr)],
            "expressions": [np.float32([-2, *counts.data[a:b]]) for a, b in pairwise(counts.indptr)],
            "drug": obs["drug"],
            "sample": [samples.setdefault(pair, f"smp_{1500 + len(samples)}") for pair in pairs],
            "BARCODE_SUB_LIB_ID": obs.index,
            "cell_line_id": obs["cell_line"],
            "moa-fine": "unclear",
            "canonical_smiles": None,
            "pubchem_cid": "1923.0",
            "plate": obs["plate"],
        }
        texts = [name for name in table if name not in ("genes", "expressions")]
        schema = pa.schema(
            [("genes", pa.list_(pa.int64())), ("expressions", pa.list_(pa.float32()))]
            + [(name, pa.string()) for name in texts]
        )
        made = pa.Table.from_pandas(pd.DataFrame(table), schema, preserve_index=False)
        shard = folder / "data" / f"train-{number:05d}-of-{len(plates):05d}.parquet"
        parquet.write_table(made, shard, row_group_size=row_group_size)
    genes = pd.DataFrame(
        {
            "gene_symbol": _symbols(),
            "ensembl_id": [f"ENSG{k:011d}" for k in range(GENES)],
            "token_id": np.arange(GENES) + 3,
        }
    )
    genes.iloc[::-1].to_parquet(folder / "metadata" / "gene_metadata.parquet", index=False)
    wells = pd.DataFrame([*samples], columns=["plate", "drugname_drugconc"]).assign(
        sample=[*samples.values()]
    )
    wells.to_parquet(folder / "metadata" / "sample_metadata.parquet", index=False)
    return folder
