"""Networks and arrays of the authors' released code, loaded through the package's own import.

``data/released_{onehot,drug_dose}.npz`` each hold a small network's weights (zero-initialised gates re-randomised, so
that a wrong wiring shows) under ``weights/``, a batch, and what the released code made of them: B=3 sets, S=16
cells, G=96 genes, D=64, conditioning per cell. The ``.json`` beside each has the settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbdiff.config.settings import Config
from perturbdiff.model import Covariates, Denoiser
from perturbdiff.released.checkpoint_import import denoiser_of
from perturbdiff.released.released_settings import Stored, recipe_of
from perturbdiff.released.released_weights import layout_of, translate

FIXTURES = ("onehot", "drug_dose")
DATA = Path(__file__).parent / "data"
DICTIONARIES = {"perturbation": "pert_dict", "cell_type": "cell_type_dict", "batch": "batch_dict"}
SETS, CELLS, GENES, WIDTH = 3, 16, 96, 64


@dataclass(frozen=True)
class Released:
    """One fixture.

    Attributes
    ----------
    name
        One of `FIXTURES`.
    arrays
        By the names of the fixture's README (x0, control, t, fwd_cond_sc0_x, ddim10_w0_final, …).
    weights
        The released state dict.
    settings
        Its JSON: model, cov, optimizer, frozen, init_mean_std.
    covariates
        Our ids of the batch's cells [B, S].
    """

    name: str
    arrays: dict[str, Tensor]
    weights: dict[str, Tensor]
    settings: dict[str, Any]
    covariates: Covariates

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    @property
    def config(self) -> Config:
        """The fixture's recipe, as the import reads it from its settings."""
        hyper = {
            "model_cfg": self.settings["model"],
            "cov_encoding_cfg": self.settings["cov"],
            "optimizer_cfg": self.settings["optimizer"],
        }
        return recipe_of(layout_of(self.weights), Stored.of(hyper))

    def names(self) -> dict[str, str]:
        """Return the released name of each of our learned tensors."""
        sizes = {kind: len(self.settings["cov"][name]) for kind, name in DICTIONARIES.items()}
        state = translate(self.weights, layout_of(self.weights), sizes).state
        place = {tensor.untyped_storage().data_ptr(): name for name, tensor in self.weights.items()}
        found = {ours: place.get(tensor.untyped_storage().data_ptr()) for ours, tensor in state.items()}
        for kind, name in (("cell_type", "celltype"), ("batch", "batch")):  # copied for the reserved row
            found[f"covariate_encoder.tables.{kind}.weight"] = f"cov_encoder.{name}_encoder.weight"
        return {name: found[name] for name, _ in self.denoiser().named_parameters()}

    def denoiser(self) -> Denoiser:
        """Return a fresh network with the fixture's weights, its unit 1 (arrays are in model units)."""
        hyper = {"model_cfg": self.settings["model"], "cov_encoding_cfg": self.settings["cov"]}
        model = denoiser_of(self.weights, hyper, unit=1.0)
        return model.train()


@cache
def released(name: str) -> Released:
    """Load a fixture; the arrays are shared, do not write to them."""
    with np.load(DATA / f"released_{name}.npz") as archive:
        found = {key: torch.from_numpy(np.asarray(archive[key])) for key in archive.files}
    prefix = "weights/"
    weights = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    arrays = {k: v for k, v in found.items() if not k.startswith(prefix)}
    settings = json.loads((DATA / f"released_{name}.json").read_text())
    covariates = Covariates(arrays["pert"] + 1, arrays["celltype"] + 1, arrays["batch"] + 1)
    return Released(name, arrays, weights, settings, covariates)


def relative(ours: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference over the largest absolute expected value."""
    assert ours.shape == expected.shape
    difference = (ours.detach().double() - expected.double()).abs().max()
    return (difference / expected.double().abs().max().clamp_min(1e-30)).item()
