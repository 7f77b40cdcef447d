"""The settings, labels and genes stored in a released checkpoint, as a recipe and a vocabulary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.released.pickles import read_pickle
from perturbdiff.released.released_weights import Layout
from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.errors import UserError, listing, nearest

CONTROLS = ("PBS", "[('DMSO_TF', 0.0, 'uM')]", "non-targeting", "control")
"""Labels of unperturbed cells in the released data sets."""
_LARGEST_LIST = 1 << 26  # bytes
_DICTIONARIES = {"perturbation": "pert_dict", "cell_type": "cell_type_dict", "batch": "batch_dict"}
_LARGEST = 1e12
NORMALISATION = 10.0
"""The released data path divides log1p values by this."""


def ordered(settings: Mapping[str, Any], kind: str, source: str = "checkpoint") -> tuple[str, ...]:
    """Return a covariate's labels in the order of their codes. Empty if the file has no dictionary of them.

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


def control_label(labels: Sequence[str], chosen: str | None, source: str) -> str:
    """Return which of the perturbations is the control.

    Raises
    ------
    UserError
        If none or several are known controls and ``given`` does not decide, or it is not a label.
    """
    if chosen is not None:
        if chosen not in labels:
            raise UserError(
                f"{source}: no perturbation '{chosen}'{nearest(chosen, labels)}; give another --control"
            )
        return chosen
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
    """Remove the name of the data set from the start of batch labels, if the labels stay distinct.

    In the released code, the label of the batch ``Donor1`` of the data set ``pbmc`` is ``pbmc_Donor1``.
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
        Label of the controls. None: found among `CONTROLS`.
    told
        False for a model that was never given the perturbation. Only the control's label is then kept.
    source
        Name of the file in messages.
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
            genes = untrusted.read(path, "JSON")
        elif path.suffix == ".npy":
            genes = np.load(path, allow_pickle=False, mmap_mode="r").tolist()
        elif path.suffix in (".txt", ".csv", ".tsv"):
            genes = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        else:
            genes = read_pickle(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as a gene list ({type(error).__name__})") from None
    if isinstance(genes, set | frozenset):
        genes = sorted(str(gene) for gene in genes)
    if not isinstance(genes, list) or not all(isinstance(gene, str) for gene in genes):
        raise UserError(f"{path}: expected a list of gene names")
    twice = sorted(gene for gene, number in Counter(genes).items() if number > 1)
    if twice:
        raise UserError(f"{path}: genes occur twice: {listing(twice)}")
    return genes


@dataclass
class Stored:
    """The settings of one checkpoint. A value that is missing or of another type counts as its default.

    Attributes
    ----------
    model, covariates, optimiser, trainer
        Sections of the file's hyper-parameters.
    source
        Name of the file in messages.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    covariates: Mapping[str, Any] = field(default_factory=dict)
    optimiser: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    source: str = "checkpoint"

    @classmethod
    def of(cls, hyper: Mapping[str, Any], source: str = "checkpoint") -> Stored:
        """Take the sections out of ``hyper_parameters``, already `plain`."""
        names = ("model_cfg", "cov_encoding_cfg", "optimizer_cfg", "trainer_cfg")
        sections = [hyper.get(name) if isinstance(hyper.get(name), Mapping) else {} for name in names]
        return cls(*sections, source=source)  # pyright: ignore[reportArgumentType]

    @property
    def datasets(self) -> list[str]:
        """Names of the data sets that it was trained on, with which its batch labels begin."""
        return _names(self.model.get("dataset_dict"))

    @property
    def marginal(self) -> bool:
        """Whether the control stream was always zero (pretraining)."""
        return self.dropped_controls == 1

    @property
    def dropped_controls(self) -> float:
        """How often the control stream was zero in training."""
        share = _number(self.model, "p_drop_control", 0.0)
        if not 0 <= share <= 1:
            raise UserError(
                f"{self.source}: its setting p_drop_control is {share:g}, not a share from 0 to 1"
            )
        return share

    @property
    def told(self) -> bool:
        """Whether the network was given the perturbation."""
        return self.covariates.get("pert_encoding") != "non"


def _names(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | dict) else []


def _number(section: Mapping[str, Any], key: str, default: float) -> float:
    value = section.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return default
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise UserError(f"the checkpoint's setting {key} is {value:g}, which cannot be")
    return float(value)


def recipe_of(layout: Layout, stored: Stored, *, name: str = "imported") -> Config:
    """Return the recipe of a released model.

    Shapes decide the architecture. The stored settings decide what shapes cannot tell: the fusion, the noise
    schedule, the loss, the variance of a DDPM step, the cutoff, and the course of training.

    Raises
    ------
    UserError
        If the model computes what ours cannot.
    """
    _refuse(stored)
    model, base = stored.model, recipes.load("released")
    architecture = {
        "width": layout.width,
        "depth": layout.depth,
        "heads": layout.heads,
        "mlp_ratio": layout.mlp_ratio,
        "covariate_width": layout.covariate_width,
        "covariates": layout.covariates,
        "projection_width": layout.inner_width,
        "initialisation": "released",
        "covariate_projection": "genes",
        "mlp_branch": "parallel",
        "fusion": "sum-silu" if model.get("use_class_silu") is True else "sum",
        "gene_embedding": "shared",
        "dose": "concat",
        "control_embedding": "scalar",
        "head": "relu",
        "leak": 0.0,
        "anchor": "none",
        "unit": "scale",
        "gate": False,
        "clip": False,
    }
    posterior = model.get("sigma_small") is True
    sampling = {
        "cutoff": _number(model, "cutoff", 1e-4),
        "ddpm_variance": "posterior" if posterior else base.sample.ddpm_variance,
    }
    sections = {
        "model": architecture,
        "schedule": {"num_steps": int(_number(model, "steps", 1000))},
        "loss": _loss(stored),
        "train": _training(stored),
        "sample": sampling,
        "data": {"scale": NORMALISATION},
    }
    tree = base.model_dump()
    for section, values in sections.items():
        tree[section] |= values
    about = {"name": name, "description": "Imported from the released code."}
    return recipes.validated(tree | about, f"{stored.source}: its settings")


def _loss(stored: Stored) -> dict[str, Any]:
    model, optimiser = stored.model, stored.optimiser
    without = model.get("no_mse_loss") is True or optimiser.get("use_mse_loss") is False
    weight = _number(optimiser, "MMD_loss_factor", 1.0)
    return {
        "mmd_weight": weight,
        "mse_weight": 0.0 if without else 1.0,
        "mmd_factor": "half",
        "mse_reduction": "mean",
    }


def _training(stored: Stored) -> dict[str, Any]:
    """Return the course of training. What the file does not say stays the preset's."""
    adam = stored.optimiser.get("optimizer")
    course = stored.optimiser.get("scheduler")
    settings: dict[str, Any] = {"zero_control": stored.marginal}
    places = (
        ("learning_rate", adam, "lr", float),
        ("weight_decay", adam, "weight_decay", float),
        ("warmup_steps", course, "num_warmup_steps", int),
        ("max_steps", course, "num_training_steps", int),
        ("plateau_fraction", course, "plateau_ratio", float),
        ("final_rate", course, "min_ratio", float),
        ("drop_covariates", stored.model, "p_drop_cond", float),
    )
    for key, section, name, kind in places:
        value = _number(section, name, -1.0) if isinstance(section, Mapping) else -1.0
        if value > 0 or (value == 0 and key != "learning_rate" and key != "max_steps"):
            settings[key] = kind(value)
    return settings


def _refuse(stored: Stored) -> None:
    """Refuse settings that change the mathematics and for which we have no switch."""
    model = stored.model
    wanted: dict[str, Any] = {
        "noise_schedule": "linear", "learn_sigma": False, "use_gene_embedding": False, "model_type": "Cross_DiT",
        "Block_type": "MM_DiT", "predict_xstart": True, "rescale_timesteps": False,
    }  # fmt: skip
    for key, value in wanted.items():
        if model.get(key, value) != value:
            raise UserError(
                f"{stored.source}: its setting {key}={model[key]!r} cannot be imported; only {value!r} can"
            )
