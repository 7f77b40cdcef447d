"""The genes of files against the list to keep and the list of a prior."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perturbdiff.conditions.gene_names import unshared
from perturbdiff.genes.gene_lists import read_names
from perturbdiff.inspection.findings import Findings
from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, listing

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
