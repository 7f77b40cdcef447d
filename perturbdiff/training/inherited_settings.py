"""What finetuning takes over besides weights: architecture, labels, and semantic tables with their doses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.pretrained_embeddings import (
    Semantics,
    Tables,
    known_doses,
    semantics,
    tables_of,
    validation_labels,
)
from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.config.settings import Config, ModelConfig
from perturbdiff.embeddings.embedding_tables import EmbeddingTable, SemanticKind, find
from perturbdiff.runtime.errors import listing

logger = logging.getLogger(__name__)

_OWN = ("gate", "clip", "unit", "missing_embedding")
_WITH_TABLE = ("dose", "control_embedding", "combination", "combination_separator")


@dataclass(frozen=True)
class Inheritance:
    """The semantic tables of a finetuning: those given, else the bundle's.

    Attributes
    ----------
    tables
        What the network's frozen vectors are made from.
    kept
        What the new bundle keeps: ``tables`` without those that were read back from a model's buffers.
    doses
        Doses that the bundle's model has vectors of.
    """

    tables: dict[SemanticKind, EmbeddingTable]
    kept: dict[SemanticKind, EmbeddingTable]
    doses: tuple[float, ...] = ()

    @classmethod
    def of(cls, old: Bundle, given: Tables) -> Inheritance:
        """Return what a bundle and the given tables come to."""
        own = tables_of(old)
        doses: tuple[float, ...] = ()
        if old.model.covariate_encoder.dose is not None and "perturbation" in own:
            doses = known_doses(old.config.model, old.vocabulary, own["perturbation"])
        return cls({**own, **given}, {**old.tables, **given}, doses)

    def vocabulary(
        self, old: Bundle, new: Vocabulary, settings: ModelConfig, validation: Sequence[pd.DataFrame]
    ) -> Vocabulary:
        """Return the bundle's labels and ``new`` ones, and those of validation where vectors are frozen.

        A label of the bundle's that the new data lacks is left out if a given table does not have it.
        """
        words = old.vocabulary.extended(new)
        for kind in ("perturbation", "cell_type"):
            if kind in self.tables:
                words = with_vectors(words, kind, settings, self.tables[kind], needed=getattr(new, kind))
        return validation_labels(settings, words, validation, self.tables)

    def semantics(self, settings: ModelConfig, genes: list[str], vocabulary: Vocabulary) -> Semantics:
        """Return the frozen vectors of the network; see `perturbdiff.checkpoint.pretrained_embeddings.semantics`."""
        read_back = "perturbation" in self.tables and "perturbation" not in self.kept
        return semantics(settings, genes, vocabulary, self.tables, control_by_name=read_back)


def with_vectors(
    words: Vocabulary,
    kind: Literal["perturbation", "cell_type"],
    settings: ModelConfig,
    table: EmbeddingTable,
    *,
    needed: Iterable[str] = (),
) -> Vocabulary:
    """Return a vocabulary without the labels that a table lacks, but with those ``needed`` and the control."""
    kept, parts = {*needed, words.control}, kind == "perturbation"
    lost = [
        label
        for label in getattr(words, kind)
        if label not in kept and find(label, table, settings, parts=parts, control=words.control)[0] is None
    ]
    if lost:
        logger.info("%s labels without a vector in the semantic table, left out: %s", kind, listing(lost))
    return words.without(kind, lost)


def with_architecture(config: Config, old: Bundle, given: Tables) -> Config:
    """Return the recipe with the bundle's architecture; units, gate and clipping stay the recipe's.

    So do dose, control and combinations if the perturbations' frozen vectors are new.
    """
    ours, theirs = config.model.model_dump(), old.config.model.model_dump()
    inherited = "perturbation" not in given and "perturbation" in tables_of(old)
    own = {*_OWN, *(() if inherited else _WITH_TABLE)}
    changed = [k for k in ours if k not in own and ours[k] != theirs[k]]
    if changed:
        logger.info("the bundle decides the architecture: %s", ", ".join(f"{k}={theirs[k]}" for k in changed))
    merged = {**theirs, **{k: ours[k] for k in own}}
    return config.model_copy(update={"model": type(config.model)(**merged)})
