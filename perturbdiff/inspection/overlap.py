"""What a recipe asks of data: the genes of a list and of a prior that files share, and cells for held-out labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.conditions.gene_names import unshared
from perturbdiff.config.settings import Config
from perturbdiff.genes.gene_lists import read_names
from perturbdiff.inspection.findings import Findings
from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.splits.absent_labels import faults_of_rule, faults_of_toml
from perturbdiff.splits.split_rules import Specification, by_rule, by_toml

_FEW = 0.1
"""Share of a list below which the names are probably of another kind."""


def genes_of_model(path: Path) -> list[str]:
    """Return the genes of a bundle, or of a list or vocabulary.

    Raises
    ------
    UserError
        If it is neither.
    """
    if (path / "genes.json").is_file():
        names = untrusted.read(path / "genes.json", "JSON")
        if not isinstance(names, list):
            raise UserError(f"{path / 'genes.json'}: is not a list of genes")
        return [str(name) for name in names]
    return read_names(path)


def check_genes(
    genes: Sequence[str],
    kept: tuple[Path, Sequence[str]] | None,
    prior: tuple[Path, Sequence[str]] | None,
    found: Findings,
) -> None:
    """Tell how a data set's genes fit a list and a prior.

    Parameters
    ----------
    genes
        Genes of the files, or of the store.
    kept
        List of genes to keep, with its path; None: highly variable ones are chosen later, or it is a store.
    prior
        Genes of the model that is finetuned, with its path.
    found
        Receives what was found.
    """
    for path, names in (one for one in (kept, prior) if one):
        shared = set(names) & set(genes)
        share = f"{len(shared):,} of the {len(names):,} genes of {path.name} ({len(shared) / len(names):.1%})"
        if not shared:
            found.problem(
                f"no gene of {path} is in the data: {unshared(list(names), list(genes), path.name, 'the data')}"
            )
        elif len(shared) < _FEW * len(names):
            found.warning(f"the data have only {share}: are names of one kind (data.gene_key)?")
        else:
            found.fact(f"the data have {share}")
    if prior:
        _check_prior(genes, kept, prior, found)


def _check_prior(
    genes: Sequence[str],
    kept: tuple[Path, Sequence[str]] | None,
    prior: tuple[Path, Sequence[str]],
    found: Findings,
) -> None:
    """Tell which genes a finetuned model would not predict, so that its predictions could not be scored on them."""
    known = set(prior[1])
    chosen = [gene for gene in (kept[1] if kept else genes) if gene not in known]
    late = "they would be dropped when sampling, and evaluate would refuse the predictions after the training"
    if not chosen:
        return
    what = f"{len(chosen):,} of the {len(kept[1] if kept else genes):,} genes"
    if kept:
        found.problem(
            f"{what} to keep are not in the prior's list {prior[0]} ({listing(chosen, 5)}): {late}; take a list within "
            "the prior's, or finetune with --transfer new-genes"
        )
    else:
        found.warning(
            f"{what} of the data are not in the prior's list {prior[0]}: if highly variable ones are among them, "
            f"{late}. Give genes within the prior's list (preprocess --genes), or finetune with --transfer new-genes"
        )


def check_split(
    table: pd.DataFrame, config: Config, toml: Specification | None, seed: int, found: Findings
) -> np.ndarray | None:
    """Tell what a split would fail on. Return the part of each condition (object [n]) if it would not.

    Parameters
    ----------
    table
        Conditions, with the column ``context``.
    config
        Its section ``split`` is used where there is no ``toml``.
    toml
        Split in the format of STATE, or None.
    seed
        Seed of the split.
    found
        Receives all that is wrong.
    """
    faults = faults_of_rule(table, config.split) if toml is None else faults_of_toml(table, toml)
    for text in faults.wrong:
        found.problem(text)
    for text in faults.absent:
        if config.split.missing == "warn":
            found.warning(f"{text}; they are left out (split.missing=warn)")
        else:
            found.problem(f"{text}; correct them in a copy of the list, or set split.missing=warn")
    if faults.wrong or (faults.absent and config.split.missing == "error"):
        return None
    if (
        toml is None
        and config.split.num_held_out
        and config.split.choose == "pca"
        and not config.split.held_out
    ):
        found.fact("the contexts to hold out are chosen by PCA when there is a store")
        return None
    try:
        if toml:
            return by_toml(table, toml, config.split.missing)
        return by_rule(table, config.split, seed, _no_profiles)[0]
    except UserError as error:
        found.problem(str(error))
        return None


def _no_profiles(_: object) -> np.ndarray:
    raise UserError("split.choose=pca needs a store")
