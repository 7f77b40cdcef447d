"""Chooses one list of genes for many data sets, from the genes that merged groups of studies (composites) select.

This is the paper's merge-then-select (App. HVG Selection). One selection over all cells of a corpus does not fit into
memory, and the union of the selections of all studies is mostly noise. Studies are therefore merged into a few
composites first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_lists import FILE_NAME, GeneSet, read_gene_set, short_paths
from perturbdiff.genes.gene_sums import GeneSums
from perturbdiff.genes.selection import check_flavor, choose_genes, sums_stored_values
from perturbdiff.preprocessing.gene_passes import second_pass
from perturbdiff.preprocessing.passes import VALUES_PER_PIECE, load, save
from perturbdiff.preprocessing.preprocessing_stage import Machine
from perturbdiff.preprocessing.studies import (
    Corpus,
    SecondTask,
    StudyPiece,
    balanced,
    check_unchanged,
    from_table,
    merge,
    name_of,
    pieces_of,
    study_paths,
    sum_again,
    sum_piece,
    survey,
)
from perturbdiff.runtime import files, locks, provenance, tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.task_runner import TaskRunner

logger = logging.getLogger(__name__)

_DIGITS = 6
FORMAT = 1
SETTINGS = (
    "layer",
    "gene_key",
    "input_scale",
    "keep",
    "duplicate_genes",
    "min_counts",
    "min_genes",
    "target_sum",
    "num_hvgs",
    "hvg_flavor",
)
"""Keys of `data` that the vocabulary depends on."""
_STUDIES_PER_JOB = 100
"""Number of small studies for which it is worth to start a worker. Opening a study takes about 50 ms."""
SCORES = ("dispersions_norm", "variances_norm")
"""Columns by which genes are ordered, depending on the flavor."""


@dataclass(frozen=True)
class Composite:
    """A merged data set and its chosen genes.

    Attributes
    ----------
    name
        Label of the composite.
    members
        Positions of its studies in the corpus.
    genes
        Numbers of its genes (the union or the intersection of its studies' genes), in the order of names.
    cells
        Number of cells that passed the filters.
    target_sum
        Depth that its cells were scaled to: their median depth, or ``data.target_sum``. nan for log1p.
    chosen
        One row per chosen gene, best first: ``gene, rank`` (from 1), ``score`` (by which the flavor orders genes) and
        other statistics.
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
    """Write the tables. Return the facts about the vocabulary for its manifest."""
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
    for gene_set in sets:
        genes = gene_set.genes
        if not pd.Index(genes).isin(known).any():
            raise UserError(
                f"{gene_set.path}: none of its {len(genes)} genes is in a study (here {listing(genes, 3)}; studies "
                f"{listing(corpus.names[:3])}); use the same kind of gene names (data.gene_key)"
            )


def _gene_table(corpus: Corpus, merged: Sequence[Composite], added: Sequence[GeneSet]) -> pd.DataFrame:
    """Return the vocabulary, with a row per gene in the order of names."""
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
    """Return a row per study: its composite, and the number of its genes that the composite and any composite chose."""
    known = pd.Index(corpus.names)
    every = np.isin(np.arange(len(known)), known.get_indexer(pd.Index(chosen)))
    rows = []
    for composite in merged:
        of_composite = np.zeros(len(known), bool)
        of_composite[known.get_indexer(pd.Index(composite.chosen["gene"]))] = True
        for member in composite.members:
            study = corpus.studies[member]
            rows.append(
                {
                    "study": study.name,
                    "composite": composite.name,
                    "cells": study.n_cells,
                    "genes": len(study.genes),
                    "chosen_by_composite": int(of_composite[study.genes].sum()),
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
    """Return the share of the vocabulary in each data set, and the share of each data set in the vocabulary."""
    known, vocabulary, of_composites = pd.Index(corpus.names), pd.Index(genes), pd.Index(chosen)
    shared, shared_of_composites = known.isin(vocabulary), known.isin(of_composites)
    sets: list[tuple[str, str, np.ndarray]] = [("study", s.name, s.genes) for s in corpus.studies]
    sets += [("composite", c.name, c.genes) for c in merged]
    rows = [
        (kind, name, len(own), int(shared[own].sum()), int(shared_of_composites[own].sum()))
        for kind, name, own in sets
    ]
    others = [("added", s) for s in added] + [("covered", s) for s in covered]
    for kind, gene_set in others:
        index = pd.Index(gene_set.genes)
        counts = (int(index.isin(vocabulary).sum()), int(index.isin(of_composites).sum()))
        rows.append((kind, gene_set.name, len(index), *counts))
    table = pd.DataFrame(rows, columns=pd.Index(["kind", "data", "genes", "shared", "shared_of_composites"]))
    table["share_of_vocabulary"] = table["shared"] / len(vocabulary)
    table["share_of_data"] = table["shared"] / table["genes"]
    table["share_of_composites"] = table["shared_of_composites"] / len(of_composites)
    columns = ["kind", "data", "genes", "shared", "share_of_vocabulary", "share_of_data"]
    columns += ["shared_of_composites", "share_of_composites"]
    table = pd.DataFrame(table[columns])
    numbers = columns[2:]
    means = pd.DataFrame(table.groupby("kind", sort=False)[numbers].mean().loc[["study", "composite"]])
    means.insert(0, "data", "(mean)")
    return pd.DataFrame(pd.concat([table, means.reset_index()], ignore_index=True)).round(_DIGITS)


def build_vocabulary(
    studies: Sequence[Path],
    out: Path,
    config: DataConfig,
    *,
    composites: int | None = None,
    assign: Path | None = None,
    join: Literal["union", "intersection"] = "union",
    add: Sequence[Path] = (),
    cover: Sequence[Path] = (),
    force: bool = False,
    machine: Machine | None = None,
) -> Path:
    """Choose the genes of a corpus by merge-then-select.

    Writes ``genes.txt`` (sorted by name), ``vocabulary.parquet``, ``hvgs.parquet``, ``composites.csv`` and
    ``coverage.csv`` (see docs/vocabulary.md).

    Parameters
    ----------
    studies
        Files of raw counts, or ``.txt`` files that list them.
    out
        Folder to write.
    config
        The places of counts and gene names, the cell filters, and the settings of gene selection (``num_hvgs`` is for
        each composite).
    composites
        Number of composites, balanced by cells. None for 23, or for the number of studies if that is smaller.
    assign
        CSV ``study, composite``, which replaces ``composites``.
    join
        Genes of a composite: those in any of its studies (with count 0 where a study lacks them), or those in all.
    add
        Stores or gene lists whose genes are added.
    cover
        Files, stores or gene lists that are only counted in ``coverage.csv``.
    force
        Run even if an equal vocabulary exists.
    machine
        Processes and memory to use. The vocabulary does not depend on it.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a file cannot be read or differs from ``config``, or if gene names do not match.
    """
    if composites is not None and assign is not None:
        raise UserError("--composites and --assign exclude each other; give one of them")
    check_flavor(config)
    paths = study_paths(studies)
    roles = {f"study {name}": path for name, path in zip(short_paths(paths), paths, strict=True)}
    roles |= {f"add {name}": path for name, path in zip(short_paths(add), add, strict=True)}
    roles |= {f"cover {name}": path for name, path in zip(short_paths(cover), cover, strict=True)}
    roles |= config.files | ({} if assign is None else {"assign": assign})
    settings = {name: value for name, value in config.recorded().items() if name in SETTINGS} | {
        "composites": composites,
        "join": join,
        "format": FORMAT,
    }
    with provenance.stage("vocabulary", out, config=settings, inputs=roles, folder=True, force=force) as run:
        if run.skip:
            return out
        # next to the output and not in it, so that the sums of finished studies survive if one cannot be read
        where = machine or Machine()
        sums = f".{out.name}.sums"
        scratch = (out.parent if where.unfinished is None else where.unfinished) / sums
        with files.explain_os_errors(out, kept_at=scratch), locks.locked(scratch, "another run"):
            added, covered = _gene_sets(add, config, scratch), _gene_sets(cover, config, scratch, data=True)
            corpus = survey(paths, config, scratch)
            labels = balanced(corpus, composites) if assign is None else from_table(corpus, assign)
            with _crew(corpus, where) as crew:
                plans = _plan(corpus, labels, join, config, scratch)
                merged = _select(corpus, plans, config, scratch, crew)
        run.results |= write_tables(run.path, corpus, merged, added, covered)
    files.remove(scratch)
    return out


def _gene_sets(
    paths: Sequence[Path], config: DataConfig, scratch: Path, *, data: bool = False
) -> list[GeneSet]:
    names = short_paths(paths)
    return [
        read_gene_set(Path(path), name, config if data else None, scratch)
        for path, name in zip(paths, names, strict=True)
    ]


def _crew(corpus: Corpus, where: Machine) -> TaskRunner:
    """Return the task runner for reading the studies, with no more workers than there is work."""
    values = sum(study.num_values for study in corpus.studies)
    most = max(1, values // VALUES_PER_PIECE, len(corpus.studies) // _STUDIES_PER_JOB)
    jobs = len(os.sched_getaffinity(0)) if where.jobs is None else where.jobs
    crew = TaskRunner(min(jobs, most), where.scheduler)
    where.bucket_values(crew.jobs)  # raises an error if the memory is not enough for them
    return crew


def _plan(
    corpus: Corpus, composite_of: Sequence[str], join: str, config: DataConfig, scratch: Path
) -> list[_Plan]:
    """Return the composites in the order of their names. ``composite_of`` has the name for each study."""
    labels = np.array(composite_of, object)
    pieces = [pieces_of(study, config, scratch) for study in corpus.studies]
    names = sorted(set(composite_of))
    return [_Plan(name, np.flatnonzero(labels == name), corpus, pieces, join) for name in names]


def _select(
    corpus: Corpus, plans: Sequence[_Plan], config: DataConfig, scratch: Path, crew: TaskRunner
) -> list[Composite]:
    """Sum the studies and choose the genes of each composite."""
    flat = [piece for plan in plans for piece in plan.pieces]
    if done := sum(piece.result.exists() for piece in flat):
        logger.info("%d of %d pieces of studies are summed already", done, len(flat))
    crew.run(sum_piece, flat, weights=[p.stop - p.start for p in flat], label="summing studies")
    again = [_second(plan, corpus, config, scratch) for plan in plans]
    tasks = [task for of_plan in again for task in of_plan]
    if tasks:
        weights = [task.piece.stop - task.piece.start for task in tasks]
        crew.run(sum_again, tasks, weights=weights, label="reading studies again")
    check_unchanged(flat)
    return [_choose(plan, of_plan, corpus, config) for plan, of_plan in zip(plans, again, strict=True)]


class _Plan:
    """A composite before genes are chosen: its studies, its genes in the order of names, and its pieces."""

    def __init__(
        self,
        name: str,
        members: np.ndarray,
        corpus: Corpus,
        pieces: Sequence[Sequence[StudyPiece]],
        join: str,
    ) -> None:
        self.name, self.members = name, members
        genes, having = np.unique(
            np.concatenate([corpus.studies[m].genes for m in members]), return_counts=True
        )
        if join == "intersection":
            genes = genes[having == len(members)]
            if not len(genes):
                raise UserError(
                    f"{name}: its {len(members)} studies have no gene in common; use --join union, or more composites"
                )
        self.genes = genes[np.argsort(corpus.names[genes])]
        self._place = np.full(len(corpus.names), -1, np.int32)
        self._place[self.genes] = np.arange(len(genes), dtype=np.int32)
        self.pieces = [piece for m in members for piece in pieces[m]]
        self._columns = [corpus.studies[m].genes for m in members for _ in pieces[m]]

    def parts(self) -> Iterator[tuple[StudyPiece, np.ndarray]]:
        """Yield each piece with the positions of its genes among the composite's, or -1 for genes left out."""
        for piece, genes in zip(self.pieces, self._columns, strict=True):
            yield piece, self._place[genes]


def _merge(plan: _Plan, corpus: Corpus, config: DataConfig) -> tuple[GeneSums, float]:
    """Return the sums of a composite and the depth its cells are scaled to (nan for log1p), as scanpy computes them."""
    sums, median = merge(plan.parts(), len(plan.genes))
    if not sums.values.any():
        raise UserError(
            f"{plan.name} ({listing([corpus.studies[m].name for m in plan.members], 3)}): no gene is detected in any "
            f"cell that passes data.min_counts={config.min_counts} and data.min_genes={config.min_genes}; lower them"
        )
    if config.unit == "log1p":
        return sums, float("nan")
    return sums, median if config.target_sum == "median" else float(config.target_sum)


def _second(plan: _Plan, corpus: Corpus, config: DataConfig, scratch: Path) -> list[SecondTask]:
    """Return the tasks of a second pass over a composite's studies, if the flavor needs one."""
    if config.hvg_flavor == "seurat":
        return []
    sums, target = _merge(plan, corpus, config)
    key = name_of([plan.name, config.num_hvgs, target, [piece.result.name for piece in plan.pieces]])
    folder = (scratch / key).absolute()
    folder.mkdir(exist_ok=True)
    work = second_pass(config, sums, np.zeros(1, np.int32), target, folder)
    if work is None:
        return []
    tasks = []
    for number, (piece, place) in enumerate(plan.parts()):
        columns = folder / f"columns-{number:06d}.npy"
        if not columns.exists():
            save(columns, place)
        tasks.append(SecondTask(piece, columns, len(plan.genes), work, folder / f"sums-{number:06d}.npz"))
    return tasks


def _choose(plan: _Plan, again: Sequence[SecondTask], corpus: Corpus, config: DataConfig) -> Composite:
    """Choose a composite's genes from its sums."""
    sums, target = _merge(plan, corpus, config)
    scale = 1.0 if np.isnan(target) or sums_stored_values(config) else target
    table = choose_genes(
        sums, corpus.names[plan.genes].tolist(), scale, config.num_hvgs, by_batch=False,
        flavor=config.hvg_flavor, second=(load(task.result) for task in again) if again else None,
    )  # fmt: skip
    best = pd.DataFrame(table[table["highly_variable"]]).drop(columns="highly_variable")
    score = next((name for name in SCORES if name in best), None)
    best.insert(0, "score", np.nan if score is None else best.pop(score))
    best = best.rename_axis("gene").reset_index()
    best = best.sort_values(["score", "gene"], ascending=[False, True], ignore_index=True)
    best.insert(1, "rank", np.arange(1, len(best) + 1))
    logger.info(
        "%s: %d cells, %d of %d genes chosen", plan.name, int(sums.cells[0]), len(best), len(plan.genes)
    )
    return Composite(plan.name, plan.members, plan.genes, int(sums.cells[0]), target, best)
