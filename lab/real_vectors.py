"""Do vectors of genes from co-expression in control cells tell what a knock-out of the gene does? On Papalexi's screen.

    python lab/real_vectors.py --data FOLDER --out FOLDER

Vectors come from the screen's own control cells, from the control cells of Kang's PBMC, and from both beside each other
with a mask of what is missing. Each knock-out is predicted from the others, and the correlation of the changes is
compared with that of the mean of the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.config import recipes
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.embeddings.kernel_ridge import fit
from perturbdiff.genes.co_expression import co_expression
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.store.pseudobulk import condition_changes
from perturbdiff.store.store import Store

KANG = ("data.perturbation_key=perturbation", "data.control=control", "data.cell_type_key=cell_type",
        "data.batch_key=donor", "data.num_hvgs=null")  # fmt: skip
DRAWS = 10_000


def changes_of(store: Store) -> dict[str, np.ndarray]:
    """Return the mean change of each perturbation over its replicates [G]."""
    table = store.conditions
    perturbed = np.flatnonzero(~table["is_control"].to_numpy(bool))
    pools, found = ControlPools(table, Rows(table), perturbed), {}
    for condition, change in condition_changes(store, perturbed, pools):
        found.setdefault(str(table["perturbation"].iloc[condition]), []).append(change)
    return {label: np.mean(values, axis=0) for label, values in found.items()}


def correlations(changes: dict[str, np.ndarray], table: EmbeddingTable) -> np.ndarray:
    """Return the correlation of predicted and true changes [n, 2]: by the regression, and by the mean of the others."""
    labels = [label for label in sorted(changes) if label in table]
    vectors = np.array([table.vectors[table.row(label)] for label in labels])
    values, found = np.array([changes[label] for label in labels]), []
    for i in range(len(labels)):
        rest = np.arange(len(labels)) != i
        predicted = fit(vectors[rest], values[rest])(vectors[i : i + 1])[0]
        found.append([np.corrcoef(one, values[i])[0, 1] for one in (predicted, values[rest].mean(axis=0))])
    return np.array(found)


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    screen = preprocess(
        [given.data / "papalexi21_thp1_ko.h5ad"], given.out / "papalexi", recipes.load("papalexi21").data
    )
    blood = preprocess(
        [given.data / "kang18_control_only.h5ad"],
        given.out / "kang",
        recipes.load("recommended", list(KANG)).data,
    )
    own, other = (co_expression(Store(path)) for path in (screen, blood))
    changes = changes_of(Store(screen))
    for name, table in (
        ("the screen's controls", own),
        ("Kang's controls", other),
        ("both", own.beside(other)),
    ):
        found = correlations(changes, table)
        step = found[:, 0] - found[:, 1]
        draws = np.random.default_rng(0).integers(0, len(step), (DRAWS, len(step)))
        low, high = np.quantile(step[draws].mean(axis=1), [0.025, 0.975])
        ours, mean = found.mean(axis=0)
        print(f"{name}: {len(found)} knock-outs, {ours:.3f}, mean {mean:.3f}, {low:+.3f} to {high:+.3f}")


if __name__ == "__main__":
    main()
