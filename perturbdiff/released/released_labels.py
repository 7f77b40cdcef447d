"""The labels and genes of released models: stored dictionaries and gene list files to our vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.released.pickles import read_pickle
from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.errors import UserError, listing, nearest

CONTROLS = ("PBS", "[('DMSO_TF', 0.0, 'uM')]", "non-targeting", "control")
"""What the released data sets call their unperturbed cells."""

_LARGEST_LIST = 1 << 26  # bytes
_DICTIONARIES = {"perturbation": "pert_dict", "cell_type": "cell_type_dict", "batch": "batch_dict"}


def ordered(settings: Mapping[str, Any], kind: str, source: str = "checkpoint") -> tuple[str, ...]:
    """Return a covariate's labels in the order of their codes; empty if the file has no dictionary of them.

    Raises
    ------
    UserError
        If the codes are not 0, 1, 2, ….
    """
    name = _DICTIONARIES[kind]
    codes = settings.get(name) or {}
    numbers: list[Any] = list(codes.values()) if isinstance(codes, Mapping) else [None]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise UserError(f"{source}: its dictionary '{name}' does not number labels from 0")
    return tuple(str(label) for label, _ in sorted(codes.items(), key=lambda item: item[1]))


def control_label(labels: Sequence[str], given: str | None, source: str) -> str:
    """Return which of the perturbations is the control.

    Raises
    ------
    UserError
        If none or several are known controls and ``given`` does not decide, or it is not a label.
    """
    if given is not None:
        if given not in labels:
            raise UserError(
                f"{source}: no perturbation '{given}'{nearest(given, labels)}; give another --control"
            )
        return given
    known = [label for label in labels if label in CONTROLS]
    if len(known) != 1:
        what = (
            f"several controls ({listing(known)})"
            if known
            else f"no known control among {listing(labels, 5)}"
        )
        raise UserError(f"{source}: {what}; say which label the controls have with --control")
    return known[0]


def own_batches(labels: Sequence[str], datasets: Sequence[str]) -> tuple[str, ...]:
    """Return batch labels without the name of their data set in front, if they stay different from each other.

    The released code calls the batch ``Donor1`` of the data set ``pbmc`` ``pbmc_Donor1``.
    """
    longest = sorted(datasets, key=len, reverse=True)
    bare = [next((b.removeprefix(f"{d}_") for d in longest if b.startswith(f"{d}_")), b) for b in labels]
    return tuple(bare if len(set(bare)) == len(bare) else labels)


def vocabulary_of(
    settings: Mapping[str, Any],
    *,
    datasets: Sequence[str],
    sources: Sequence[str],
    control: str | None,
    told: bool,
    source: str,
) -> Vocabulary:
    """Return the vocabulary of a released model.

    Parameters
    ----------
    settings
        Its covariate settings with the dictionaries.
    datasets
        Names of the input layers.
    sources
        Names of the data sets it was trained on, which its batch labels begin with.
    control
        Label of the controls; None: found among `CONTROLS`.
    told
        False for a model that was never told the perturbation: only the control's label is kept.
    source
        What the file is called in messages.
    """
    labels = {kind: ordered(settings, kind, source) for kind in _DICTIONARIES}
    if told:
        control = control_label(labels["perturbation"], control, source)
    else:
        control = control or next((c for c in CONTROLS if c in labels["perturbation"]), "control")
        labels["perturbation"] = (control,)
    labels["batch"] = own_batches(labels["batch"], sources)
    return Vocabulary(**labels, datasets=tuple(datasets), control=control)


def read_genes(path: Path) -> list[str]:
    """Read a gene list: the released pickle (a list keeps its order, a set is sorted), .txt, .json or .npy.

    Raises
    ------
    UserError
        If it is none of these, or a name occurs twice.
    """
    if files.existing(path, "gene list").stat().st_size > _LARGEST_LIST:
        raise UserError(f"{path}: larger than any list of genes")
    try:
        if path.suffix == ".json":
            found = untrusted.read(path, "JSON")
        elif path.suffix == ".npy":
            found = np.load(path, allow_pickle=False, mmap_mode="r").tolist()
        elif path.suffix in (".txt", ".csv", ".tsv"):
            found = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        else:
            found = read_pickle(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as a gene list ({type(error).__name__})") from None
    if isinstance(found, set | frozenset):
        found = sorted(str(gene) for gene in found)
    if not isinstance(found, list) or not all(isinstance(gene, str) for gene in found):
        raise UserError(f"{path}: expected a list of gene names")
    twice = sorted(gene for gene, number in Counter(found).items() if number > 1)
    if twice:
        raise UserError(f"{path}: genes occur twice: {listing(twice)}")
    return found
