"""Checkpoints of the authors' released code (Lightning files) as our networks and bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from perturbdiff.config.settings import Config
from perturbdiff.model import Denoiser
from perturbdiff.released.pickles import plain, read_torch, tensors
from perturbdiff.released.released_labels import ordered
from perturbdiff.released.released_settings import NORMALISATION, Stored, recipe_of
from perturbdiff.released.released_weights import Layout, Translated, layout_of, translate
from perturbdiff.runtime.errors import UserError, listing

Weights = Literal["ema", "raw"]
_NO_EMA = "weights: the file has one set (at the end of training the averaged ones, if they were averaged)"


@dataclass
class Checkpoint:
    """A released checkpoint as it lies in the file.

    Attributes
    ----------
    weights
        Released names to tensors, still on disk.
    stored
        Its settings.
    layout
        The network that the tensors make up.
    report
        What was found.
    """

    weights: Mapping[str, Tensor]
    stored: Stored
    layout: Layout
    report: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, weights: Weights = "ema") -> Checkpoint:
        """Read a file without running anything in it; see `perturbdiff.released.pickles`.

        Raises
        ------
        UserError
            If the file is not a released checkpoint, or lacks the wanted weights.
        """
        content, source = read_torch(path), str(path)
        chosen, line = _choose(content, weights, source)
        hyper = plain(content.get("hyper_parameters", {}))
        stored = Stored.of(hyper if isinstance(hyper, dict) else {}, source)
        step = content.get("global_step")
        report = [*([f"step {step} of training"] if isinstance(step, int) else []), line]
        return cls(chosen, stored, layout_of(chosen, source), report)

    def sizes(self) -> dict[str, int]:
        """Return the number of labels of each covariate that the network is told."""
        found = {}
        for kind in self.layout.covariates:
            labels = ordered(self.stored.covariates, kind, self.stored.source)
            if not labels:
                raise UserError(f"{self.stored.source}: it has no dictionary of the labels of {kind}")
            found[kind] = len(labels)
        return found

    def translated(self) -> Translated:
        """Return the tensors under our names."""
        return translate(self.weights, self.layout, self.sizes(), self.stored.source)


def _choose(content: Mapping[str, Any], weights: Weights, source: str) -> tuple[dict[str, Tensor], str]:
    """Return the wanted weights: with averaging ``state_dict`` has the averaged and another entry the raw ones."""
    state, raw = tensors(content, "state_dict"), tensors(content, "current_model_state")
    if not state:
        raise UserError(f"{source}: no 'state_dict' with tensors; not a checkpoint of the released code")
    if weights == "ema":
        return state, "weights: averaged (EMA)" if raw else _NO_EMA
    if not raw:
        raise UserError(f"{source}: holds one set of weights only, no raw ones; use --weights ema")
    return raw, "weights: raw, as of the step"


def load_released(path: str | Path, *, weights: Weights = "ema") -> Denoiser:
    """Return the network of a checkpoint that the released code wrote.

    Parameters
    ----------
    path
        Lightning file, or the weights-only file of the end of training.
    weights
        ``ema``: averaged, if the run averaged; ``raw``: as of the step.

    Returns
    -------
    In evaluation mode, on the CPU; its unit is the released scale, 10. Ids are the released codes plus one.

    Raises
    ------
    UserError
        If the file is not such a checkpoint, asks for code to be run, or lacks a frozen table.
    """
    found = Checkpoint.read(Path(path), weights)
    missing = found.layout.missing_tables
    if missing:
        raise UserError(
            f"{path}: the frozen vectors of {listing(missing)} are not in the file; give them to import-checkpoint "
            "with --embedding KIND=FILE"
        )
    return build(found.layout, recipe_of(found.layout, found.stored), found.translated().state)


def denoiser_of(
    weights: Mapping[str, Tensor], hyper: Mapping[str, Any], *, unit: float = NORMALISATION
) -> Denoiser:
    """Return the network of a released state dict and its settings; see `load_released`.

    Parameters
    ----------
    weights
        By the names of the released code.
    hyper
        ``model_cfg`` and ``cov_encoding_cfg`` (with the dictionaries), plain.
    unit
        Model values are log1p / unit.
    """
    found = Checkpoint(weights, Stored.of(hyper), layout_of(weights))
    config = recipe_of(found.layout, found.stored)
    return build(found.layout, config, found.translated().state, unit)


class _WithoutStart(TorchFunctionMode):
    """Networks made in this block keep their tensors unfilled: memory that nobody wrote to costs nothing.

    The meta device would do as well, but loads seconds' worth of libraries.
    """

    _FILLS = frozenset({torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.zero_, torch.Tensor.mul_})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass everything on but fills, and the functions of torch.nn.init, which are whole calls here."""
        given = kwargs or {}
        if func in self._FILLS or getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def build(
    layout: Layout, config: Config, state: Mapping[str, Tensor], unit: float = NORMALISATION
) -> Denoiser:
    """Return a network that owns copies of translated tensors; nothing is initialised on the way.

    Parameters
    ----------
    layout, config
        What the tensors make up.
    state
        By our names; see `translate`.
    unit
        Model values are log1p / unit.
    """
    sizes = {kind: len(_table(state, kind)) for kind in layout.covariates}
    with _WithoutStart():
        model = Denoiser(
            config.model,
            num_genes=layout.num_genes,
            num_perturbations=sizes["perturbation"],
            num_cell_types=sizes["cell_type"],
            num_batches=sizes.get("batch", 2),
            datasets=layout.datasets,
            semantic=layout.semantic,
            num_doses=layout.num_doses,
        )
    own = {
        name: tensor.detach().float().clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }
    own["unit"], own["gate_threshold"] = torch.tensor(float(unit)), torch.zeros(())
    own["maximum"] = torch.full((layout.num_genes,), float("inf"))
    own["zero_level"] = torch.zeros(layout.num_genes)
    model.load_state_dict(own, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def _table(state: Mapping[str, Tensor], kind: str) -> Tensor:
    name = f"covariate_encoder.tables.{kind}"
    return state[f"{name}.vectors" if f"{name}.vectors" in state else f"{name}.weight"]
