"""Semantic tables of a model: frozen vectors of labels, known doses, and labels that are added after training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.change_regression import extend
from perturbdiff.conditions.condition import agents, dose_values, dose_weights
from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.config.settings import ModelConfig
from perturbdiff.embeddings.embedding_tables import (
    SEMANTIC_KINDS,
    EmbeddingTable,
    SemanticKind,
    find,
    semantic_rows,
)
from perturbdiff.model import Denoiser
from perturbdiff.model.covariates import SemanticTable
from perturbdiff.model.expected_changes import PredictedChanges
from perturbdiff.runtime.errors import UserError, listing, nearest

logger = logging.getLogger(__name__)

Tables = Mapping[SemanticKind, EmbeddingTable]
LabelKind = Literal["perturbation", "cell_type"]
_LABELS: tuple[LabelKind, ...] = ("perturbation", "cell_type")


@dataclass(frozen=True)
class Semantics:
    """The content of a model's frozen buffers.

    Attributes
    ----------
    vectors
        float32 [labels, e] for each covariate with frozen vectors, in the vocabulary's order, and for the genes.
    doses
        Distinct doses, ascending. Empty if the dose is part of the label.
    weights
        float32 [perturbations, doses] (see `dose_weights`).
    """

    vectors: dict[SemanticKind, np.ndarray] = field(default_factory=dict)
    doses: tuple[float, ...] = ()
    weights: np.ndarray | None = None

    @property
    def widths(self) -> dict[str, int]:
        """Length of each kind's vectors, as `build_model` takes it."""
        return {kind: rows.shape[1] for kind, rows in self.vectors.items()}

    @torch.no_grad()
    def put_into(self, model: Denoiser) -> None:
        """Fill the buffers of a model that was built with `widths` and the number of `doses`."""
        for kind, rows in self.vectors.items():
            values = torch.from_numpy(rows)
            if kind == "gene":
                if model.gene_table is not None:
                    model.gene_table.vectors.copy_(values)
            else:  # row 0 belongs to the reserved id
                table = _frozen(model, kind)
                if table is not None:
                    table.vectors[1:].copy_(values)
        dose = model.covariate_encoder.dose
        if dose is not None and self.weights is not None:
            dose.weights[1:].copy_(torch.from_numpy(self.weights))


def read_tables(paths: Mapping[SemanticKind, Path]) -> dict[SemanticKind, EmbeddingTable]:
    """Read the files of ``--embedding``."""
    return {kind: EmbeddingTable.read(path) for kind, path in paths.items()}


def check_tables(settings: ModelConfig, tables: Tables) -> None:
    """Check that the model uses every table, and has the tables of genes and perturbations that it needs.

    ``settings.dose`` needs no check. Without a table of perturbations, the dose is always part of the label.

    Raises
    ------
    UserError
        If a table is not used or is missing.
    """
    for kind in tables:
        if kind == "gene" and settings.gene_embedding != "table":
            raise UserError(
                f"--embedding gene: model.gene_embedding is '{settings.gene_embedding}'; the model would not look at "
                "the table: set it to table, or leave the table out"
            )
        if kind != "gene" and kind not in settings.covariates:
            covariates = ",".join((*settings.covariates, kind))
            raise UserError(
                f"--embedding {kind}: the model is not told the {kind}; "
                f"say --set 'model.covariates=[{covariates}]', or leave the table out"
            )
    if settings.anchor == "predicted" and "perturbation" not in tables:
        raise UserError(
            "model.anchor is 'predicted': give vectors of the perturbations with --embedding perturbation=FILE"
        )
    if settings.gene_embedding == "table" and "gene" not in tables:
        raise UserError("model.gene_embedding is 'table': give one with --embedding gene=FILE")


def semantics(
    settings: ModelConfig,
    genes: list[str],
    vocabulary: Vocabulary,
    tables: Tables,
    *,
    control_by_name: bool = False,
) -> Semantics:
    """Find the vectors of a vocabulary and a gene list in tables, and log how many were found.

    Parameters
    ----------
    settings
        Settings of the model (see `semantic_rows`).
    genes, vocabulary
        Genes and labels of the model.
    tables
        Tables by kind. A covariate without a table has learned vectors.
    control_by_name
        Take the vector of the control from the table, by its label, instead of the table's mean.

    Raises
    ------
    UserError
        If labels are missing and ``missing_embedding`` is ``error``, or if tables and settings do not fit together
        (see `check_tables`).
    """
    check_tables(settings, tables)
    vectors: dict[SemanticKind, np.ndarray] = {}
    for kind, table in tables.items():
        labels = genes if kind == "gene" else getattr(vocabulary, kind)
        control = vocabulary.control if kind == "perturbation" else None
        rows = semantic_rows(
            labels, table, settings, kind=kind, control=control, control_by_name=control_by_name
        )
        logger.log(logging.WARNING if rows.missing else logging.INFO, "semantic table, %s", rows.report(kind))
        _warn_of_doses(settings, rows.agent)
        vectors[kind] = rows.vectors
    if settings.dose == "label" or "perturbation" not in tables:
        return Semantics(vectors)
    doses = known_doses(settings, vocabulary, tables["perturbation"])
    if not doses:
        logger.warning(
            "model.dose is '%s', but no perturbation tells a dose ('drug@dose', data.dose_key)", settings.dose
        )
    return Semantics(vectors, doses, weights_of(settings, vocabulary, doses, tables["perturbation"]))


def known_doses(settings: ModelConfig, vocabulary: Vocabulary, table: EmbeddingTable) -> tuple[float, ...]:
    """Return the distinct doses of a vocabulary's perturbations, ascending."""
    return dose_values(vocabulary.perturbation, settings.combination_separator, names=table)


def weights_of(
    settings: ModelConfig,
    vocabulary: Vocabulary,
    doses: tuple[float, ...],
    table: EmbeddingTable,
    labels: Iterable[str] | None = None,
) -> np.ndarray:
    """Return the dose weights of a vocabulary's perturbations, or of other ``labels`` (see `dose_weights`)."""
    return dose_weights(
        list(vocabulary.perturbation if labels is None else labels), doses,
        combination=settings.combination, separator=settings.combination_separator, names=table,
        control=vocabulary.control,
    )  # fmt: skip


def validation_labels(
    settings: ModelConfig, vocabulary: Vocabulary, conditions: Iterable[pd.DataFrame], tables: Tables
) -> Vocabulary:
    """Add the labels of validation conditions that occur in no training cell but have frozen vectors.

    Validation then predicts these conditions as the conditions of a later experiment are predicted. Perturbations at
    a dose that is not in training are left out.
    """
    for table in conditions:
        treated = pd.DataFrame(table[~table["is_control"].to_numpy(bool)])
        if "perturbation" in tables:
            labels = treated["perturbation"].astype(str).unique()
            if settings.dose != "label":
                separator, known = settings.combination_separator, tables["perturbation"]
                doses = {None, *known_doses(settings, vocabulary, known)}
                labels = [
                    label
                    for label in labels
                    if all(d in doses for _, d in agents(label, separator, names=known))
                ]
            vocabulary = vocabulary.with_labels("perturbation", labels)
        if "cell_type" in tables:
            vocabulary = vocabulary.with_labels("cell_type", table["cell_type"].astype(str).unique())
    return vocabulary


def tables_of(bundle: Bundle) -> dict[SemanticKind, EmbeddingTable]:
    """Return the tables of a bundle's frozen vectors: those in its folder, or else the content of its buffers.

    The buffers hold the vectors of the labels that the model knows. With them, a single agent is also found without
    its dose.
    """
    tables: dict[SemanticKind, EmbeddingTable] = {}
    for kind in SEMANTIC_KINDS:
        if kind in bundle.tables:
            tables[kind] = bundle.tables[kind]
        elif kind == "gene":
            if bundle.model.gene_table is not None:
                tables[kind] = EmbeddingTable(
                    tuple(bundle.genes), bundle.model.gene_table.vectors.cpu().numpy()
                )
        else:
            table = _frozen(bundle.model, kind)
            if table is not None:
                tables[kind] = _from_buffer(bundle, kind, table.vectors[1:].cpu().numpy())
    return tables


def _from_buffer(bundle: Bundle, kind: LabelKind, vectors: np.ndarray) -> EmbeddingTable:
    labels = list(getattr(bundle.vocabulary, kind))
    names, rows = list(labels), list(range(len(labels)))
    if kind == "perturbation":
        taken = set(labels)
        for row, label in enumerate(labels):
            (agent, _), *others = agents(label, bundle.config.model.combination_separator)
            if not others and agent not in taken:
                taken.add(agent)
                names.append(agent)
                rows.append(row)
    return EmbeddingTable(tuple(names), vectors[rows])


def add_tables(bundle: Bundle, further: Tables) -> None:
    """Give a bundle vectors for names that its own tables lack. The change is in memory only.

    Raises
    ------
    UserError
        If the vectors have another length than the bundle's, or if its model learned its vectors.
    """
    known = tables_of(bundle)
    for kind, table in further.items():
        if kind == "gene":
            raise UserError(
                "--embedding gene: the genes' vectors are part of the model; give the table to train"
            )
        if kind not in known:
            raise UserError(
                f"--embedding {kind}: the model has learned vectors of its {kind} labels and cannot use a table; "
                "train one with the table"
            )
        bundle.tables[kind] = known[kind].joined(table)


def teach(bundle: Bundle, labels: Mapping[LabelKind, Iterable[str]]) -> None:
    """Add labels that a model was not trained with, by its semantic tables. The change is in memory only.

    The bundle's vocabulary and the buffers of its model grow. Covariates with learned vectors do not change.

    Parameters
    ----------
    bundle
        The model.
    labels
        Perturbations and cell types to predict.

    Raises
    ------
    UserError
        If a table lacks a label, or a dose is unknown.
    """
    tables = tables_of(bundle)
    for kind in _LABELS:
        known = bundle.vocabulary
        wanted = [label for label in dict.fromkeys(labels.get(kind, ())) if (kind, label) not in known]
        if wanted and kind in tables:
            _add(bundle, kind, wanted, tables[kind])


@torch.no_grad()
def _add(bundle: Bundle, kind: LabelKind, labels: list[str], table: EmbeddingTable) -> None:
    settings, model = bundle.config.model, bundle.model
    parts, control = kind == "perturbation", bundle.vocabulary.control
    matches = {label: find(label, table, settings, parts=parts, control=control) for label in labels}
    unknown = [label for label, (vector, _) in matches.items() if vector is None]
    if unknown:
        raise UserError(
            f"the model was not trained with {kind} {listing(unknown)}, and the semantic table has no such name"
            f"{nearest(unknown[0], table.names)}; leave these conditions out, or give their vectors "
            f"(same encoder) with --embedding {kind}=FILE"
        )
    frozen, dose = _frozen(model, kind), model.covariate_encoder.dose
    if frozen is None:
        return
    if kind == "perturbation" and dose is not None:
        doses = known_doses(settings, bundle.vocabulary, table)
        if len(doses) != dose.weights.shape[1]:
            raise UserError(
                f"the model has vectors of {dose.weights.shape[1]} doses, its labels tell {len(doses)}; "
                f"perturbation {listing(labels)} cannot be added"
            )
        weights = weights_of(settings, bundle.vocabulary, doses, table, labels)
        without_dose = [label for label, row in zip(labels, weights, strict=True) if not row.any()]
        if without_dose:
            logger.warning(
                "perturbations without a dose, which the model was not trained on: %s", listing(without_dose)
            )
        dose.weights = _grown(dose.weights, weights)
    else:
        _warn_of_doses(settings, [label for label, (_, how) in matches.items() if how == "agent"])
    vectors = np.array([vector for vector, _ in matches.values()])
    if parts and isinstance(model.expected, PredictedChanges):
        extend(model.expected, frozen.vectors.cpu().numpy(), vectors)
    frozen.vectors = _grown(frozen.vectors, vectors)
    bundle.vocabulary = bundle.vocabulary.with_labels(kind, labels)
    logger.info("%s not trained on, predicted through semantic vectors: %s", kind, listing(labels))


def _grown(buffer: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return torch.cat([buffer, torch.from_numpy(np.asarray(rows, np.float32)).to(buffer)])


def _frozen(model: Denoiser, kind: str) -> SemanticTable | None:
    table = dict(model.covariate_encoder.tables.items()).get(kind)
    return table if isinstance(table, SemanticTable) else None


def _warn_of_doses(settings: ModelConfig, by_agent: Iterable[str]) -> None:
    """Warn that the model cannot tell the doses of an agent apart, if it sees the agent's vector without a dose."""
    dosed = [] if settings.dose != "label" else list(by_agent)
    if dosed:
        logger.warning(
            "%s: the agent's vector without the dose; doses of an agent are the same to the model "
            "(model.dose=sum or concat tells them apart)",
            listing(dosed, 5),
        )
