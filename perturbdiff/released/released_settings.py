"""The settings stored in a released checkpoint, and the tensors' shapes, as a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.released.released_weights import Layout
from perturbdiff.runtime.errors import UserError

_LARGEST = 1e12
NORMALISATION = 10.0
"""The released data path divides log1p values by this."""


@dataclass
class Stored:
    """The settings of one checkpoint; a value that is missing or of another type counts as its default.

    Attributes
    ----------
    model, covariates, optimiser, trainer
        Sections of the file's hyper-parameters.
    source
        What the file is called in messages.
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
        """Names of the data sets it was trained on, as its batch labels begin with."""
        return _names(self.model.get("dataset_dict"))

    @property
    def marginal(self) -> bool:
        """Whether the control stream was always zero (pretraining)."""
        return self.dropped_controls == 1

    @property
    def dropped_controls(self) -> float:
        """How often the control stream was zero in training."""
        found = _number(self.model, "p_drop_control", 0.0)
        if not 0 <= found <= 1:
            raise UserError(
                f"{self.source}: its setting p_drop_control is {found:g}, not a share from 0 to 1"
            )
        return found

    @property
    def told(self) -> bool:
        """Whether the perturbation was told."""
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

    Shapes decide the architecture; the stored settings decide what shapes cannot tell: the fusion, the noise
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
    """Return the course of training; what the file does not say stays the preset's."""
    adam = stored.optimiser.get("optimizer")
    course = stored.optimiser.get("scheduler")
    found: dict[str, Any] = {"zero_control": stored.marginal}
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
            found[key] = kind(value)
    return found


def _refuse(stored: Stored) -> None:
    """Refuse what changes the mathematics and has no switch of ours."""
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
