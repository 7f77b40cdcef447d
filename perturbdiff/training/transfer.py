"""Starting from a pretrained bundle: which tensors are kept, and which start anew (paper, App. Training Details).

The paper's three strategies for the input and output layers: ``keep`` uses the pretrained genes and their
layers; ``reinitialise`` uses the pretrained genes with new layers; ``replace`` uses the new store's genes, with
new layers. Everything else is kept; embeddings follow their labels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from perturbdiff.bundle import Bundle
from perturbdiff.data.vocabulary import Kind, Vocabulary
from perturbdiff.model import Denoiser

Transfer = Literal["keep", "reinitialise", "replace"]

_KINDS: tuple[Kind, ...] = ("perturbation", "cell_type", "batch")
_TABLES: dict[str, Kind] = {f"covariate_encoder.tables.{kind}.weight": kind for kind in _KINDS}
_UNITS = ("unit", "gate_threshold", "maximum")


@torch.no_grad()
def transfer_weights(old: Bundle, new: Denoiser, vocabulary: Vocabulary, mode: Transfer) -> list[str]:
    """Copy a bundle's weights into ``new`` and report on every group of tensors.

    Parameters
    ----------
    old
        The pretrained bundle.
    new
        A network of the same architecture; its genes are the bundle's unless ``mode`` is ``replace``.
    vocabulary
        Labels of ``new``; its data sets name the input layers.
    mode
        What becomes of the input and output layers.
    """
    source, target = old.model.state_dict(), new.state_dict()
    kept, fresh, report = [], [], []
    # Pretrained without controls, the output layer makes whole cells; an anchored one makes changes to controls.
    from_nothing = new.config.anchor == "control" and old.config.train.zero_control
    for name, tensor in target.items():
        if name in _UNITS or name.startswith(("input_layers.", "control_layers.")):
            continue
        if name in _TABLES:
            report.append(_copy_rows(name, source[name], tensor, old.vocabulary, vocabulary))
        elif name.startswith(("output_layer.", "gain_layer.")) and (mode != "keep" or from_nothing):
            fresh.append(name)
        elif name in source and source[name].shape == tensor.shape:
            tensor.copy_(source[name])
            kept.append(name)
        else:
            fresh.append(name)
    report = [_input_layers(old, new, vocabulary, mode), *report]
    return [*report, _group("kept", kept), *([_group("new", fresh)] if fresh else [])]


def _copy_rows(name: str, old: Tensor, new: Tensor, words: Vocabulary, vocabulary: Vocabulary) -> str:
    kind: Kind = _TABLES[name]
    new[0] = old[0]
    shared = [label for label in getattr(vocabulary, kind) if (kind, label) in words]
    there = torch.from_numpy(vocabulary.encode(kind, shared))
    new[there] = old[torch.from_numpy(words.encode(kind, shared))]
    total = len(getattr(vocabulary, kind))
    return f"{kind} embeddings: {len(shared)} kept by label, {total - len(shared)} new"


def _input_layers(old: Bundle, new: Denoiser, vocabulary: Vocabulary, mode: Transfer) -> str:
    if mode != "keep":
        return "input, control and output layers: new weights"
    known, lines = list(old.vocabulary.datasets), []
    for index, name in enumerate(vocabulary.datasets):
        same = name in known
        for layers, before in (
            (new.input_layers.layers, old.model.input_layers.layers),
            (new.control_layers.layers, old.model.control_layers.layers),
        ):
            for key in ("weight", "bias"):
                chosen = [before[known.index(name)]] if same else list(before)
                mean = torch.stack([getattr(layer, key) for layer in chosen]).mean(0)
                getattr(layers[index], key).copy_(mean)
        how = "kept" if same or len(known) == 1 else f"mean of {len(known)} pretrained layers"
        lines.append(f"input and control layer of data set {name}: {how}")
    return "; ".join(lines)


def _group(how: str, names: list[str]) -> str:
    groups = list(dict.fromkeys(name.split(".")[0] for name in names))
    return f"{how}: {len(names)} tensors of {', '.join(groups)}"
