"""Looks at a study: opens its files, counts their labels, and compares all of it with what is planned."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.config.settings import Config
from perturbdiff.genes.gene_lists import read_names
from perturbdiff.inspection import costs
from perturbdiff.inspection.counted_cells import LookedAt, count_cells
from perturbdiff.inspection.findings import Findings
from perturbdiff.inspection.inspected_studies import Study
from perturbdiff.inspection.overlap import check_genes, check_split, genes_of_model
from perturbdiff.io.counts import doubts, join_genes
from perturbdiff.io.label_tables import tables_for
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import byte_size, span
from perturbdiff.screen.values import kind_of
from perturbdiff.splits.split_rules import Specification, read_toml
from perturbdiff.statistics import paper_counts
from perturbdiff.store.store import Store

_SCALES = {"counts": ("counts", "zeros and ones"), "log1p": ("log1p",), "normalised": ("normalised", "log1p")}
"""Kinds of values that fit each ``data.input_scale``."""


def inspect_study(study: Study) -> Findings:
    """Look at a study and return what was found. Nothing is written, and of the values only some are read."""
    found = Findings(study.name)
    with contextlib.ExitStack() as stack:
        toml = _read_toml(study, found)
        if len(study.files) == 1 and (study.files[0] / "conditions.parquet").is_file():
            _look_at_store(study, toml, found)
            return found
        opened = list(_opened(study, found, stack))
        if not opened:
            return found
        for file in opened:
            _check_values(file, study, found)
        genes = _genes(opened, study.config, found)
        kept, model = _check_lists(study, genes, found)
        context = _further_column(study.config, toml)
        table = count_cells(opened, study.config.data, context, found)
        if table is None or len(opened) < len(study.files):
            return found
        numbers = _check_conditions(table, study, toml, found)
        if table["n_cells"].sum():
            _tell_costs(opened, table, study, numbers, (len(genes), kept, model), found)
    return found


def _read_toml(study: Study, found: Findings) -> Specification | None:
    if study.toml is None:
        return None
    path = study.files[0]
    try:
        return read_toml(study.toml, [path.stem, path.name, study.config.name, study.name])
    except UserError as error:
        found.problem(str(error))
        return None


def _opened(study: Study, found: Findings, stack: contextlib.ExitStack) -> Iterator[LookedAt]:
    """Yield the files that can be opened, and tell what is wrong with the others."""
    try:
        tables = tables_for(len(study.files), study.obs)
    except UserError as error:
        found.problem(str(error))
        return
    if lost := [path for path in study.files if not files.is_there(path)]:
        known = study.dataset
        remedy = f"; fetch them: perturbdiff data get {known.name} --out {lost[0].parent}" if known else ""
        found.problem(
            f"{len(lost)} of {len(study.files)} files are not there: {listing(map(str, lost), 3)}{remedy}"
        )
    for path, table in zip(study.files, tables, strict=True):
        if path in lost:
            continue
        try:
            file = LookedAt(files.existing(path, "input"), study.config.data, table)
        except UserError as error:
            found.problem(str(error))
            continue
        stack.callback(file.close)
        if file.fault:
            found.problem(file.fault)
        yield file


def _check_values(file: LookedAt, study: Study, found: Findings) -> None:
    """Tell whether some of the values are of the scale that the recipe says."""
    scale = study.config.data.input_scale
    try:
        kind, largest = kind_of(file.some_values())
    except UserError as error:
        found.problem(str(error))
        return
    if kind in _SCALES[scale]:
        if scale == "normalised":
            _check_totals(file, found)
        found.fact(
            f"{file.path}: {file.n_cells:,} cells, {len(file.genes):,} genes, {kind} up to {largest:.4g}"
        )
        return
    better = [place for place in file.places if kind_of(file.some_values(place))[0] in _SCALES[scale]]
    fitting = next((name for name, kinds in _SCALES.items() if kind in kinds), None)
    remedies = [f"data.layer={place.removeprefix('layers/')}, which holds {scale}" for place in better[:1]]
    remedies += [f"data.input_scale={fitting}"] if fitting else []
    found.problem(
        f"{file.path}: {study.config.data.layer} holds {kind} (up to {largest:.4g}), but data.input_scale is {scale}; "
        + (f"set {' or '.join(remedies)}" if remedies else "give raw counts or log1p values")
    )


def _check_totals(file: LookedAt, found: Findings) -> None:
    """Tell whether some cells have one total, as normalised ones have."""
    doubt = doubts(file)
    if doubt.wrong:
        found.problem(f"{file.path}: data.input_scale is normalised, but {doubt.wrong}")
    elif doubt.odd:
        found.warning(f"{file.path}: data.input_scale is normalised, but {doubt.odd}")


def _genes(opened: Sequence[LookedAt], config: Config, found: Findings) -> list[str]:
    """Return the genes of all files together."""
    named = [(file.path.name, list(dict.fromkeys(file.genes))) for file in opened]
    try:
        return join_genes(named, config.data.join_genes)
    except UserError as error:
        found.problem(str(error))
        return named[0][1]


def _check_lists(study: Study, genes: Sequence[str], found: Findings) -> tuple[int | None, int | None]:
    """Compare the genes with the list to keep and the prior's; return the lengths of both lists."""
    kept = prior = None
    for path, what in ((study.genes, "kept"), (study.prior, "prior")):
        if path is None:
            continue
        try:
            names = genes_of_model(path) if what == "prior" else read_names(path)
        except UserError as error:
            found.problem(str(error))
            continue
        kept, prior = ((path, names), prior) if what == "kept" else (kept, (path, names))
    check_genes(genes, kept, prior, found)
    return len(kept[1]) if kept else None, len(prior[1]) if prior else None


def _further_column(config: Config, toml: Specification | None) -> str | None:
    """Return the obs column to hold out by, if it is neither that of cell types nor that of batches."""
    column = (toml.context_column if toml else None) or config.split.context_column
    known = ("cell_type", "batch", config.data.cell_type_key, config.data.batch_key)
    return None if column in known else column


def _with_context(table: pd.DataFrame, config: Config, toml: Specification | None) -> pd.DataFrame:
    column = (toml.context_column if toml else None) or config.split.context_column
    if "context" in table:
        return table
    name = "batch" if column in ("batch", config.data.batch_key) else "cell_type"
    return table.assign(context=table[name])


def _check_conditions(
    table: pd.DataFrame, study: Study, toml: Specification | None, found: Findings
) -> dict[str, int]:
    """Compare the labels with control, split and the paper's table; return how many cells there are."""
    config, table = study.config, _with_context(table, study.config, toml)
    labels = sorted(set(table["perturbation"]))
    if not table["is_control"].to_numpy().any():
        near = [label for label in labels if label.strip() == config.data.control.strip()]
        hint = f", did you mean '{near[0]}'?" if near else f"; labels are {listing(labels)}"
        found.problem(f"no control cells: '{config.data.control}' (data.control) is no label of obs column "
                      f"'{config.data.perturbation_key}'{hint}")  # fmt: skip
    odd = [label for name in ("perturbation", "cell_type", "batch") for label in sorted(set(table[name])) if
           label != label.strip()]  # fmt: skip
    if odd:
        found.warning(
            f"{len(odd)} labels begin or end with a blank, which lists must have too: {listing(map(repr, odd))}"
        )
    part = None
    if config.data.perturbation_key is not None and not (toml is None and study.toml):
        part = check_split(table, config, toml, config.seed, found)
    numbers = paper_counts.count(table, part)
    found.fact(", ".join(f"{paper_counts.WORDS[name]} {number:,}" for name, number in numbers.items()))
    if study.dataset and study.dataset.paper:
        _compare(paper_counts.beside(numbers, study.dataset.paper), found)
    return numbers


def _compare(table: pd.DataFrame, found: Findings) -> None:
    """Tell where a data set differs from the paper's table."""
    unlike = [
        f"{row['here']:,} {row['number']} instead of {row['paper']:,} ({row['difference']:+.1%})"
        for row in pd.DataFrame(table[~table["agrees"]]).to_dict("records")
    ]
    if unlike:
        found.warning(f"the paper's table counts otherwise: {'; '.join(unlike)}")
    else:
        found.fact(f"cells and labels are those of the paper's table ({', '.join(table['number'])})")


def _tell_costs(
    opened: Sequence[LookedAt],
    table: pd.DataFrame,
    study: Study,
    numbers: dict[str, int],
    genes: tuple[int, int | None, int | None],
    found: Findings,
) -> None:
    """Tell what preprocessing, training and sampling will need; ``genes`` are those of data, list and prior."""
    cells = int(table["n_cells"].sum())
    stored = sum(file.matrix.num_values * float(np.mean(file.some_values() != 0)) for file in opened)
    of_cell = stored / sum(file.n_cells for file in opened)
    count = genes[1] or min(study.config.data.num_hvgs or genes[0], genes[0])
    weight = sum(files.signature(file.path)[0] for file in opened)
    size = costs.preprocessing(weight, cells, of_cell, genes[0], count)
    found.fact(
        f"preprocess: input {byte_size(weight)} ({of_cell:,.0f} non-zeros a cell), store of {count:,} genes up "
        f"to {byte_size(size.store)}, {byte_size(size.scratch)} beside it meanwhile, {byte_size(size.worker)} of "
        f"memory a process and {byte_size(size.labels)} for labels, {span(size.reading)} of reading at 1 GB/s"
    )
    free = shutil.disk_usage(Path.cwd()).free
    if free < size.store + size.scratch:
        found.warning(
            f"the disk of the working folder has {byte_size(free)} free, and preprocess may need "
            f"{byte_size(size.store + size.scratch)}"
        )
    if numbers.get("train"):
        _tell_hours(table, study, numbers, genes[2] or count, found)


def _tell_hours(
    table: pd.DataFrame, study: Study, numbers: dict[str, int], genes: int, found: Findings
) -> None:
    perturbations, types, batches = (len(set(table[name])) for name in ("perturbation", "cell_type", "batch"))
    tested = numbers.get("test", 0)
    hours = costs.on_gpu(study.config, genes, (perturbations, types, batches), numbers["train"], tested)
    found.fact(
        f"one A100 ({study.config.train.precision}): training {hours.steps:,} steps {span(hours.training * 3600)}, "
        f"predicting {tested:,} cells {span(hours.sampling * 3600)} (estimates, of the network's products alone); "
        f"methods of others hold up to {byte_size(4 * numbers['train'] * genes)} of memory, if densely"
    )


def _look_at_store(study: Study, toml: Specification | None, found: Findings) -> None:
    """Look at a finished store: its labels and genes, as far as they are kept."""
    store = Store(study.files[0])
    found.fact(f"{store.path}: a store of {store.n_cells:,} cells and {store.n_genes:,} genes")
    prior = None
    if study.prior is not None:
        try:
            prior = (study.prior, genes_of_model(study.prior))
        except UserError as error:
            found.problem(str(error))
    check_genes(store.genes, (store.path, store.genes) if prior else None, prior, found)
    if _further_column(study.config, toml):
        found.fact("the context column is kept in obs alone; split looks at it")
        return
    columns = ["cell_type", "batch", "perturbation", "n_cells", "is_control"]
    _check_conditions(pd.DataFrame(store.conditions[columns]).reset_index(drop=True), study, toml, found)
