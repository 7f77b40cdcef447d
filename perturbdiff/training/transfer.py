"""Starting from a pretrained bundle: what is taken from it, and what starts anew (paper, App. Training)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.pretrained_embeddings import (
    Semantics,
    Tables,
    known_doses,
    semantics,
    tables_of,
    validation_labels,
)
from perturbdiff.conditions.vocabulary import Kind, Vocabulary
from perturbdiff.config.settings import Config, ModelConfig
from perturbdiff.embeddings.embedding_tables import EmbeddingTable, SemanticKind, find
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import listing
from perturbdiff.training.network_size import group_of, listed

logger = logging.getLogger(__name__)

_OWN = ("gate", "clip", "unit", "missing_embedding")
_WITH_TABLE = ("dose", "control_embedding", "combination", "combination_separator")
_UNITS = ("unit", "gate_threshold", "maximum", "zero_level", "size_spread")
_DOSES = "covariate_encoder.dose.vectors"
_INPUTS = ("input_layers", "control_layers")
_OUTPUTS = ("output_layer", "gain_layer", "noise_layer")
_FATES = {
    "taken": "taken from the pretrained model",
    "anew": "re-initialised",
    "missing": "missing in the pretrained model, so new",
    "behind": "left behind",
}


@dataclass(frozen=True)
class Inheritance:
    """The semantic tables of a finetuning: those that the user gives, else the bundle's.

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
        """Return the tables of a bundle, replaced by the given ones where there are any."""
        of_bundle = tables_of(old)
        doses: tuple[float, ...] = ()
        if old.model.covariate_encoder.dose is not None and "perturbation" in of_bundle:
            doses = known_doses(old.config.model, old.vocabulary, of_bundle["perturbation"])
        return cls({**of_bundle, **given}, {**old.tables, **given}, doses)

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
    from_recipe = {*_OWN, *(() if inherited else _WITH_TABLE)}
    changed = [k for k in ours if k not in from_recipe and ours[k] != theirs[k]]
    if changed:
        logger.info("the bundle decides the architecture: %s", ", ".join(f"{k}={theirs[k]}" for k in changed))
    merged = {**theirs, **{k: ours[k] for k in from_recipe}}
    return config.model_copy(update={"model": type(config.model)(**merged)})


Transfer = Literal["keep", "reinit", "new-genes"]

_KINDS: tuple[Kind, ...] = ("perturbation", "cell_type", "batch")
_TABLES: dict[str, Kind] = {f"covariate_encoder.tables.{kind}.weight": kind for kind in _KINDS}
_FROZEN = (
    *(f"covariate_encoder.tables.{kind}.vectors" for kind in _KINDS),
    "covariate_encoder.dose.weights",
    "gene_table.vectors",
    "expected.changes",
    "expected.measured",
    "expected.explained",
    "expected.rows",
    "expected.levels",
    "expected.nearness",
)  # these are made from their tables and the training cells


class _Tally:
    """Numbers of parameters by what was done with them and by group, with remarks."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {fate: {} for fate in _FATES}
        self.remarks: list[str] = []

    def add(self, fate: str, name: str, number: int) -> None:
        """Count ``number`` values of the tensor ``name``."""
        counts, group = self._counts[fate], group_of(name)
        counts[group] = counts.get(group, 0) + number

    def lines(self) -> list[str]:
        """Return the report: a line for each kind of treatment, then the remarks."""
        counted = [
            f"{_FATES[fate]}: {listed(groups)}"
            for fate, groups in self._counts.items()
            if any(groups.values())
        ]
        return [*counted, *self.remarks]


@torch.no_grad()
def transfer_weights(
    old: Bundle,
    new: Denoiser,
    vocabulary: Vocabulary,
    mode: Transfer,
    *,
    doses: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> list[str]:
    """Copy a bundle's weights into ``new`` and return a report.

    The report counts parameters by group: taken, re-initialised by the strategy, missing in the pretrained model
    (labels or layers it does not have), and left behind (its own that ``new`` has no use for).

    Parameters
    ----------
    old
        The pretrained bundle.
    new
        A network of the same architecture; its genes are the bundle's unless ``mode`` is ``new-genes``.
    vocabulary
        Labels of ``new``; its data sets name the input layers.
    mode
        What becomes of the input and output layers.
    doses
        Doses that ``old`` and ``new`` have vectors of; those vectors follow their values.
    """
    source, target, tally = old.model.state_dict(), new.state_dict(), _Tally()
    learned = {name for model in (old.model, new) for name, _ in model.named_parameters()}
    # Pretrained without controls, the output layer makes whole cells; an anchored one makes changes to controls.
    from_nothing = new.config.anchor != "none" and old.config.train.zero_control
    _input_layers(old, new, vocabulary, mode, tally)
    for name, tensor in target.items():
        if name in _UNITS or name in _FROZEN or name.split(".")[0] in _INPUTS:
            continue
        if name == _DOSES and name in source:
            _copy_doses(source[name], tensor, *doses, tally)
            continue
        if name in _TABLES and name in source:
            _copy_rows(name, source[name], tensor, old.vocabulary, vocabulary, tally)
            continue
        renewed = name.split(".")[0] in _OUTPUTS and (mode != "keep" or from_nothing)
        if name in source and source[name].shape == tensor.shape and not renewed:
            tensor.copy_(source[name])
            fate = "taken"
        else:
            fate = "anew" if name in source else "missing"
        if name in learned:
            tally.add(fate, name, tensor.numel())
    for name in learned & (set(source) - set(target)):
        if name.split(".")[0] not in _INPUTS:
            tally.add("behind", name, source[name].numel())
    if mode == "keep" and from_nothing:
        tally.remarks.append(
            "output layer: new, as it now makes changes to control cells and made whole cells before"
        )
    return tally.lines()


def _copy_rows(
    name: str, old: Tensor, new: Tensor, words: Vocabulary, vocabulary: Vocabulary, tally: _Tally
) -> None:
    """Copy the vectors of the labels that both vocabularies have, and that of the reserved id."""
    kind: Kind = _TABLES[name]
    new[0] = old[0]
    shared = [label for label in getattr(vocabulary, kind) if (kind, label) in words]
    there = torch.from_numpy(vocabulary.encode(kind, shared))
    new[there] = old[torch.from_numpy(words.encode(kind, shared))]
    total, width = len(getattr(vocabulary, kind)), new.shape[1]
    tally.add("taken", name, (len(shared) + 1) * width)
    tally.add("missing", name, (total - len(shared)) * width)
    tally.add("behind", name, (len(old) - 1 - len(shared)) * width)
    tally.remarks.append(f"{kind} embeddings: {len(shared)} taken by label, {total - len(shared)} new")


def _copy_doses(
    old: Tensor, new: Tensor, known: Sequence[float], doses: Sequence[float], tally: _Tally
) -> None:
    """Copy the vectors of the doses that both models have."""
    shared = [dose for dose in doses if dose in known]
    new[[doses.index(dose) for dose in shared]] = old[[known.index(dose) for dose in shared]]
    width = new.shape[1]
    tally.add("taken", _DOSES, len(shared) * width)
    tally.add("missing", _DOSES, (len(new) - len(shared)) * width)
    tally.add("behind", _DOSES, (len(old) - len(shared)) * width)
    tally.remarks.append(f"dose embeddings: {len(shared)} taken by value, {len(new) - len(shared)} new")


def _input_layers(old: Bundle, new: Denoiser, vocabulary: Vocabulary, mode: Transfer, tally: _Tally) -> None:
    """Fill the input and control layers: each data set's own, or else the mean of the pretrained ones."""
    known, used = list(old.vocabulary.datasets), set()
    for index, name in enumerate(vocabulary.datasets):
        chosen = [known.index(name)] if name in known else list(range(len(known)))
        used |= set(chosen)
        for place in _INPUTS:
            layer, before = getattr(new, place).layers[index], getattr(old.model, place).layers
            for key, tensor in layer.named_parameters():
                if mode == "keep":
                    tensor.copy_(torch.stack([before[i].get_parameter(key) for i in chosen]).mean(0))
                tally.add("taken" if mode == "keep" else "anew", place, tensor.numel())
        if mode == "keep":
            how = "taken" if len(chosen) == 1 else f"mean of {len(chosen)} pretrained layers"
            tally.remarks.append(f"input and control layer of data set {name}: {how}")
    if mode != "keep":
        tally.remarks.append("input, control and output layers: new weights")
        return
    for place in _INPUTS:
        for index, layer in enumerate(getattr(old.model, place).layers):
            if index not in used:
                tally.add("behind", place, sum(p.numel() for p in layer.parameters()))
