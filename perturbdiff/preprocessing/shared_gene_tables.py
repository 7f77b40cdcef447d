"""What a vocabulary's folder holds: its genes, who chose them, and how much of them each data set has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.genes.gene_lists import FILE_NAME, GeneSet
from perturbdiff.preprocessing.composites import Corpus
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_DIGITS = 6


@dataclass(frozen=True)
class Composite:
    """A merged data set and its choice.

    Attributes
    ----------
    name
        Its label.
    members
        Places of its studies in the corpus.
    genes
        Numbers of its genes, the union or the intersection of its studies', in the order of names.
    cells
        Cells that passed the filters.
    target_sum
        Depth its cells were scaled to: their median depth, unless ``data.target_sum`` says another; nan for log1p.
    chosen
        One row per chosen gene, best first: ``gene, rank`` (from 1), ``score`` (what the flavor orders genes by) and
        its other statistics.
    """

    name: str
    members: np.ndarray
    genes: np.ndarray
    cells: int
    target_sum: float
    chosen: pd.DataFrame


def write_tables(
    folder: Path,
    corpus: Corpus,
    merged: Sequence[Composite],
    added: Sequence[GeneSet],
    covered: Sequence[GeneSet],
) -> dict[str, Any]:
    """Write the tables; return the facts of the vocabulary for its manifest."""
    table = _gene_table(corpus, merged, added)
    genes = table["gene"].tolist()
    chosen = table.loc[table["n_composites"] > 0, "gene"].tolist()
    _check_added(corpus, [*added, *covered])
    (folder / FILE_NAME).write_text("".join(f"{gene}\n" for gene in genes))
    table.to_parquet(folder / "vocabulary.parquet", index=False)
    tables = [c.chosen.assign(composite=c.name) for c in merged]
    hvgs = pd.concat(tables, ignore_index=True)
    hvgs.insert(0, "composite", hvgs.pop("composite"))
    hvgs.to_parquet(folder / "hvgs.parquet", index=False)
    tabular.write_csv(_study_table(corpus, merged, chosen), folder / "composites.csv")
    coverage = _coverage(corpus, merged, added, covered, genes, chosen)
    tabular.write_csv(coverage, folder / "coverage.csv", float_format="%.8g")
    logger.info("%d genes: %d of %d composites, %d only added", len(genes), len(chosen), len(merged),
                len(genes) - len(chosen))  # fmt: skip
    facts = [
        {
            "name": c.name,
            "studies": len(c.members),
            "cells": c.cells,
            "genes": len(c.genes),
            "chosen": len(c.chosen),
            "target_sum": None if np.isnan(c.target_sum) else c.target_sum,
        }
        for c in merged
    ]
    return {
        "n_genes": len(genes),
        "n_genes_of_composites": len(chosen),
        "composites": facts,
        "added": {s.name: len(s.genes) for s in added},
    }


def _check_added(corpus: Corpus, sets: Sequence[GeneSet]) -> None:
    """Raise a `UserError` for a list that has no gene in common with the studies."""
    known = pd.Index(corpus.names)
    for own in sets:
        if not pd.Index(own.genes).isin(known).any():
            raise UserError(
                f"{own.path}: none of its {len(own.genes)} genes is in a study (here {listing(own.genes, 3)}; studies "
                f"{listing(corpus.names[:3])}); use the same kind of gene names (data.gene_key)"
            )


def _gene_table(corpus: Corpus, merged: Sequence[Composite], added: Sequence[GeneSet]) -> pd.DataFrame:
    """Return the vocabulary, one row per gene in the order of names."""
    frames = [c.chosen[["gene", "rank", "score"]].assign(origin=c.name) for c in merged]
    every = pd.concat(frames)
    of_composites = every.groupby("gene").agg(
        n_composites=("rank", "size"), mean_rank=("rank", "mean"), mean_score=("score", "mean")
    )
    rest = [pd.DataFrame({"gene": s.genes, "origin": s.name}) for s in added]
    origins = pd.concat([every[["gene", "origin"]], *rest]).groupby("gene")["origin"].agg(";".join)
    table = pd.DataFrame({"origins": origins}).join(of_composites).sort_index()
    having = np.zeros(len(corpus.names), np.int64)
    for study in corpus.studies:
        having[study.genes] += 1
    number = pd.Index(corpus.names).get_indexer(table.index)
    return pd.DataFrame(
        {
            "gene": table.index.to_numpy(object),
            "n_composites": table["n_composites"].fillna(0).to_numpy(np.int64),
            "mean_rank": table["mean_rank"].to_numpy(),
            "mean_score": table["mean_score"].to_numpy(),
            "n_studies": np.where(number >= 0, having[number], 0),
            "origins": table["origins"].to_numpy(object),
        }
    )


def _study_table(corpus: Corpus, merged: Sequence[Composite], chosen: Sequence[str]) -> pd.DataFrame:
    """Return one row per study: its composite, and how many of its composite's and of all choices it has."""
    known = pd.Index(corpus.names)
    every = np.isin(np.arange(len(known)), known.get_indexer(pd.Index(chosen)))
    rows = []
    for composite in merged:
        own = np.zeros(len(known), bool)
        own[known.get_indexer(pd.Index(composite.chosen["gene"]))] = True
        for member in composite.members:
            study = corpus.studies[member]
            rows.append(
                {
                    "study": study.name,
                    "composite": composite.name,
                    "cells": study.n_cells,
                    "genes": len(study.genes),
                    "chosen_by_composite": int(own[study.genes].sum()),
                    "chosen_by_any": int(every[study.genes].sum()),
                }
            )
    return pd.DataFrame(rows)


def _coverage(
    corpus: Corpus,
    merged: Sequence[Composite],
    added: Sequence[GeneSet],
    covered: Sequence[GeneSet],
    genes: Sequence[str],
    chosen: Sequence[str],
) -> pd.DataFrame:
    """Return for each data set how much of the vocabulary it has, and how much of it the vocabulary has."""
    known, whole, part = pd.Index(corpus.names), pd.Index(genes), pd.Index(chosen)
    in_whole, in_part = known.isin(whole), known.isin(part)
    sets: list[tuple[str, str, np.ndarray]] = [("study", s.name, s.genes) for s in corpus.studies]
    sets += [("composite", c.name, c.genes) for c in merged]
    rows = [
        (kind, name, len(own), int(in_whole[own].sum()), int(in_part[own].sum())) for kind, name, own in sets
    ]
    others = [("added", s) for s in added] + [("covered", s) for s in covered]
    for kind, own in others:
        index = pd.Index(own.genes)
        rows.append((kind, own.name, len(index), int(index.isin(whole).sum()), int(index.isin(part).sum())))
    table = pd.DataFrame(rows, columns=pd.Index(["kind", "data", "genes", "shared", "shared_of_composites"]))
    table["share_of_vocabulary"] = table["shared"] / len(whole)
    table["share_of_data"] = table["shared"] / table["genes"]
    table["share_of_composites"] = table["shared_of_composites"] / len(part)
    columns = ["kind", "data", "genes", "shared", "share_of_vocabulary", "share_of_data"]
    columns += ["shared_of_composites", "share_of_composites"]
    table = pd.DataFrame(table[columns])
    numbers = columns[2:]
    means = pd.DataFrame(table.groupby("kind", sort=False)[numbers].mean().loc[["study", "composite"]])
    means.insert(0, "data", "(mean)")
    return pd.DataFrame(pd.concat([table, means.reset_index()], ignore_index=True)).round(_DIGITS)
