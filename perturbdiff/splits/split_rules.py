"""Decides a split by a STATE-style TOML file, or by a rule that holds out contexts.

Both work on a table of conditions with the columns ``context`` (the label that can be held out), ``perturbation``
and ``is_control``, and return the part of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.config.settings import SplitConfig
from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.seeds import generator
from perturbdiff.splits.absent_labels import Missing, faults_of_rule, faults_of_toml

PARTS = ("train", "valid", "test", "unused")

_SECTIONS = ("datasets", "training", "zeroshot", "fewshot", "context_column")
_PART_NAMES = {"val": "valid", "valid": "valid", "test": "test"}
_CONTEXTS, _PERTURBATIONS = 11, 12  # first words of the seeds


@dataclass(frozen=True)
class Specification:
    """The entries of a TOML file for one data set.

    Attributes
    ----------
    path
        The file, for messages.
    context_column
        obs column of the contexts, if the file names one.
    others_train
        Whether all contexts that are not named are training data.
    training
        Contexts that are named as training data.
    zeroshot
        Part ("valid" or "test") of contexts that are held out completely.
    fewshot
        For each context, the perturbations in each part. Its other perturbations are training data.
    """

    path: Path
    context_column: str | None
    others_train: bool
    training: frozenset[str]
    zeroshot: Mapping[str, str]
    fewshot: Mapping[str, Mapping[str, tuple[str, ...]]]

    def contexts(self) -> list[str]:
        """Return every context that the file names."""
        return [*self.training, *self.zeroshot, *self.fewshot]


def read_toml(path: Path, names: Sequence[str]) -> Specification:
    """Read a split in the format of STATE: ``[datasets] [training] [zeroshot] [fewshot."dataset.context"]``.

    Parameters
    ----------
    path
        The TOML file.
    names
        Possible names of this data set, if the file names several.

    Raises
    ------
    UserError
        If the file is not TOML, has other sections or values, or contains several data sets of other names.
    """
    tree = untrusted.read(files.existing(path, "split specification"), "TOML")
    for key in tree:
        if key not in _SECTIONS:
            raise UserError(
                f"{path}: unknown section '{key}'{nearest(key, _SECTIONS)} known: {listing(_SECTIONS)}"
            )
    if not isinstance(tree.get("context_column", ""), str):
        raise UserError(f"{path}: context_column must be the name of an obs column, in quotes")
    sections = {name: tree.get(name, {}) for name in _SECTIONS[:4]}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise UserError(f"{path}: [{name}] must be a table, found {section!r}")
    dataset = _dataset(path, sections, names)
    training = _of_dataset(sections["training"], dataset)
    for key, value in training.items():
        if value != "train":
            raise UserError(f'{path}: [training] {key!r} = {value!r}; the only value there is "train"')
    zeroshot = {
        context: _part(path, f"[zeroshot] '{dataset}.{context}'", value)
        for context, value in _of_dataset(sections["zeroshot"], dataset).items()
    }
    fewshot = {
        context: _lists(path, f"[fewshot.'{dataset}.{context}']", value)
        for context, value in _of_dataset(sections["fewshot"], dataset).items()
    }
    both = sorted(set(zeroshot) & set(fewshot))
    if both:
        raise UserError(f"{path}: context '{both[0]}' is in [zeroshot] and in [fewshot]; keep one")
    named = frozenset(context for context in training if context)
    for context in sorted(named & set(zeroshot)):
        raise UserError(f"{path}: context '{context}' is in [training] and in [zeroshot]; keep one")
    return Specification(path, tree.get("context_column"), "" in training, named, zeroshot, fewshot)


def _dataset(path: Path, sections: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the name of this data set in the file."""
    known = list(sections["datasets"])
    if not known:
        keys = [key for name in ("training", "zeroshot", "fewshot") for key in sections[name]]
        known = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    if len(known) == 1:
        return known[0]
    for name in names:
        if name in known:
            return name
    if not known:
        raise UserError(f'{path}: names no data set; write e.g. [training] with my_data = "train"')
    raise UserError(
        f"{path}: names the data sets {listing(known)}, none of them called '{names[0]}'; rename the input or "
        "keep one data set in the file"
    )


def _of_dataset(section: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """Return the entries of a data set by context. The entry of the complete data set has the context ''."""
    entries = {
        key[len(dataset) + 1 :]: value for key, value in section.items() if key.startswith(f"{dataset}.")
    }
    return {**({"": section[dataset]} if dataset in section else {}), **entries}


def _part(path: Path, where: str, value: object) -> str:
    if not isinstance(value, str) or value not in _PART_NAMES:
        raise UserError(f'{path}: {where} = {value!r}; write "test" or "val"')
    return _PART_NAMES[value]


def _lists(path: Path, where: str, value: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise UserError(f"{path}: {where} must hold the lists val and test, found {value!r}")
    lists: dict[str, tuple[str, ...]] = {}
    for key, labels in value.items():
        if not isinstance(labels, list) or not all(type(label) in (str, int) for label in labels):
            raise UserError(f"{path}: {where} {key} must be a list of perturbation names")
        lists[_part(path, where, key)] = tuple(map(str, labels))
    both = sorted(set(lists.get("valid", ())) & set(lists.get("test", ())))
    if both:
        raise UserError(
            f"{path}: {where}: {listing(both)} in both val and test, so a condition would be in two parts; "
            "keep each in one list"
        )
    return lists


def by_toml(table: pd.DataFrame, spec: Specification, missing: Missing = "error") -> np.ndarray:
    """Return the part of each condition (object [n]) by the file. Controls are always training data.

    Parameters
    ----------
    table
        Conditions.
    spec
        The file.
    missing
        ``warn`` leaves out what the file names and the data lack; ``error`` refuses it.

    Raises
    ------
    UserError
        If the file names contexts or conditions without cells (all in one message), or holds out the control.
    """
    contexts, perturbations = table["context"].to_numpy(object), table["perturbation"].to_numpy(object)
    faults = faults_of_toml(table, spec)
    faults.refuse(missing)
    part = np.full(len(table), "train" if spec.others_train else "unused", dtype=object)
    part[np.isin(contexts, sorted(spec.training))] = "train"
    for context, value in spec.zeroshot.items():
        part[contexts == context] = value
    for context, lists in spec.fewshot.items():
        here = contexts == context
        part[here] = "train"
        for value, labels in lists.items():
            part[here & np.isin(perturbations, labels)] = value
    part[table["is_control"].to_numpy(bool)] = "train"
    if faults.absent and not np.isin(part, ("valid", "test")).any():
        raise UserError(f"{spec.path}: nothing of what it holds out has cells; correct its labels")
    return part


def by_rule(
    table: pd.DataFrame, rule: SplitConfig, seed: int, profiles: Callable[[Sequence[str]], np.ndarray]
) -> tuple[np.ndarray, list[str]]:
    """Return the part of each condition (object [n]) and the held-out contexts.

    A random share of the perturbations in the held-out contexts is training data, and a share of the others is
    validation data. There is one draw for all contexts, so a perturbation has the same part in every held-out context
    (paper, App. Data Splits for Task Evaluation). The perturbations held out there are validation data in
    ``rule.valid_contexts``.

    Parameters
    ----------
    table
        Conditions.
    rule
        The settings.
    seed
        Seed of the choices.
    profiles
        Returns the mean profiles of contexts, float64 [n, G]. It is called only to choose by PCA.

    Raises
    ------
    UserError
        If names have no cells (all in one message) or a held-out context has no controls.
    """
    faults_of_rule(table, rule).refuse(rule.missing)
    rule = _present(table, rule)
    held_out = _held_out(table, rule, seed, profiles)
    contexts, perturbations = table["context"].to_numpy(object), table["perturbation"].to_numpy(object)
    perturbed = ~table["is_control"].to_numpy(bool)
    eligible = perturbed & np.isin(contexts, held_out)
    if rule.perturbations:
        eligible &= np.isin(perturbations, rule.perturbations)
    labels = np.array(sorted(set(perturbations[eligible])), dtype=object)
    generator(_PERTURBATIONS, seed).shuffle(labels)
    n_train = round(rule.train_fraction * len(labels))
    rest = len(labels) - n_train
    n_valid = round(rule.valid_fraction * rest)
    if rule.valid_fraction > 0 and rest > 1:
        n_valid = min(max(n_valid, 1), rest - 1)
    part = np.full(len(table), "train", dtype=object)
    part[eligible & np.isin(perturbations, labels[n_train : n_train + n_valid])] = "valid"
    part[eligible & np.isin(perturbations, labels[n_train + n_valid :])] = "test"
    in_valid = perturbed & np.isin(contexts, rule.valid_contexts)
    part[in_valid & np.isin(perturbations, labels[n_train:])] = "valid"
    return part, held_out


def _present(table: pd.DataFrame, rule: SplitConfig) -> SplitConfig:
    """Return the rule without names that have no cells."""
    known = {"held_out": set(table["context"]), "valid_contexts": set(table["context"])}
    known["perturbations"] = set(table["perturbation"])
    return rule.model_copy(
        update={key: tuple(n for n in getattr(rule, key) if n in names) for key, names in known.items()}
    )


def _held_out(
    table: pd.DataFrame, rule: SplitConfig, seed: int, profiles: Callable[[Sequence[str]], np.ndarray]
) -> list[str]:
    is_control = table["is_control"].to_numpy(bool)
    with_controls = set(table["context"][is_control])
    if both := sorted(set(rule.held_out) & set(rule.valid_contexts)):
        raise UserError(f"split: {listing(both)} in held_out and in valid_contexts; keep each in one")
    if rule.held_out or not rule.num_held_out:
        return sorted(set(rule.held_out))
    candidates = sorted((with_controls & set(table["context"][~is_control])) - set(rule.valid_contexts))
    if rule.num_held_out > len(candidates):
        raise UserError(
            f"split.num_held_out={rule.num_held_out}, but only {len(candidates)} values of '{rule.context_column}' "
            "have control and perturbed cells; hold out fewer"
        )
    if rule.choose == "pca":
        return spread(candidates, profiles(candidates), rule.num_held_out, seed)
    chosen = generator(_CONTEXTS, seed).choice(len(candidates), rule.num_held_out, replace=False)
    return sorted(candidates[i] for i in chosen)


def spread(names: Sequence[str], profiles: np.ndarray, number: int, seed: int) -> list[str]:
    """Choose ``number`` different contexts, by PCA of their profiles, k-means and the member nearest to each centre.

    Parameters
    ----------
    names
        The n contexts.
    profiles
        float64 [n, G]: mean log1p expression of each context.
    """
    from sklearn.cluster import KMeans

    centred = profiles - profiles.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    scores = (left * values)[:, : min(len(names) - 1, 20)]
    clusters = KMeans(number, n_init=10, random_state=seed).fit(scores)  # pyright: ignore[reportArgumentType]
    distance = np.linalg.norm(scores - clusters.cluster_centers_[clusters.labels_], axis=1)
    chosen = []
    for cluster in range(number):
        members = np.flatnonzero(clusters.labels_ == cluster)
        chosen.append(names[members[np.argmin(distance[members])]])
    return sorted(chosen)
