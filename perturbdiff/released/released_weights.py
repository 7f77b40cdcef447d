"""Translates tensors of the released code to our names, and reports which ones are not used.

Everything is read from names and shapes, because the stored settings can be out of date. After finetuning with new
gene layers, they still contain the old number of genes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perturbdiff.runtime.errors import UserError, listing

_INPUT = re.compile(r"model\.x_embedder\.(?:(?P<dataset>.+)\.)?weight")
_BLOCK = re.compile(r"model\.blocks\.(\d+)\.")
_ENCODERS = {"perturbation": "pert_encoder", "cell_type": "celltype_encoder", "batch": "batch_encoder"}

UNUSED = {
    "gene embedding map and its norm": r"model\.gene_embedding\.(gene_embedding|layer_norm)\.",
    "output head of the control stream": r"model\.control_final_layer\.",
    "control MLP of the last block": r"model\.blocks\.{last}\.block\.control_mlp\.",
}
"""Tensors without effect on the perturbed cells, by what they are. ``{last}`` is the last block's number."""


@dataclass(frozen=True)
class Layout:
    """The architecture of the network that a set of released tensors forms.

    Attributes
    ----------
    num_genes, width, depth, heads, mlp_ratio
        G, D, number of blocks, attention heads over 2D, hidden width of the MLPs in units of D.
    covariate_width, inner_width
        Width of each covariate's vector, and of the vector between the covariates and D.
    datasets
        Data sets with an input layer of their own. ``("all",)`` if there is one layer.
    rows
        Rows of each covariate's table in the file, 0 if a frozen table is missing.
    semantic
        Width of the frozen vectors of the covariates that have them.
    num_doses
        Distinct doses. 0 if doses have no vectors of their own.
    """

    num_genes: int
    width: int
    depth: int
    heads: int
    mlp_ratio: int
    covariate_width: int
    inner_width: int
    datasets: tuple[str, ...]
    rows: Mapping[str, int]
    semantic: Mapping[str, int]
    num_doses: int

    @property
    def covariates(self) -> tuple[str, ...]:
        """The covariates of the network."""
        return tuple(self.rows)

    @property
    def missing_tables(self) -> tuple[str, ...]:
        """Covariates whose frozen vectors are not in the file."""
        return tuple(kind for kind in self.semantic if self.rows[kind] == 0)


@dataclass
class Translated:
    """Released tensors under our names.

    Attributes
    ----------
    state
        Tensors by our names. They are views of the released tensors, unless tensors had to be joined.
    dropped
        Number of values that were not used, by description.
    """

    state: dict[str, Tensor]
    dropped: dict[str, int] = field(default_factory=dict)

    def report(self) -> list[str]:
        """Return a line for each group of tensors that is not used."""
        return [f"not used: {what} ({number:,} values)" for what, number in self.dropped.items()]


class _Taker:
    """Returns tensors by name and records which were used."""

    def __init__(self, weights: Mapping[str, Tensor], source: str) -> None:
        self.weights, self.source, self.taken = weights, source, set[str]()

    def __call__(self, name: str, *shape: int | None) -> Tensor:
        if name not in self.weights:
            raise UserError(f"{self.source}: the tensor '{name}' is missing; not a whole released model")
        tensor = self.weights[name]
        wrong = len(shape) != tensor.dim() or any(
            want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        if wrong:
            expected = tuple("any" if want is None else want for want in shape)
            raise UserError(f"{self.source}: '{name}' has shape {tuple(tensor.shape)}, expected {expected}")
        if not tensor.numel():
            raise UserError(f"{self.source}: '{name}' holds no values")
        if tensor.is_complex() or not torch.isfinite(tensor).all():
            raise UserError(f"{self.source}: '{name}' holds values that are not finite real numbers")
        self.taken.add(name)
        return tensor

    def linear(self, ours: str, theirs: str, outputs: int, inputs: int, keep: int | None = None) -> dict:
        """Return a linear layer's tensors under our name. ``keep`` leaves out the outputs after it."""
        weight, bias = self(f"{theirs}.weight", outputs, inputs), self(f"{theirs}.bias", outputs)
        return {f"{ours}.weight": weight[:keep], f"{ours}.bias": bias[:keep]}


def layout_of(weights: Mapping[str, Tensor], source: str = "checkpoint") -> Layout:
    """Return the architecture of the network that released tensors form.

    Parameters
    ----------
    weights
        Tensors by the names of the released code (``model.…``, ``cov_encoder.…``).
    source
        Name of the file in messages.

    Raises
    ------
    UserError
        If tensors that every released model has are missing, or the model uses what we do not have.
    """
    take = _Taker(weights, source)
    num_genes, width = take("model.final_layer.linear.weight", None, None).shape
    blocks = {int(match[1]) for name in weights if (match := _BLOCK.match(name))}
    first = "model.blocks.0.block"
    head = take(f"{first}.attn.q_norm.weight", None).shape[0]
    hidden = take(f"{first}.mlp.fc1.weight", None, width).shape[0]
    gene_embedding = weights.get("model.gene_embedding.gene_embedding.weight")
    if gene_embedding is not None and len(gene_embedding) == 1 != width:
        raise UserError(f"{source}: it adds gene embeddings to its inputs, which cannot be imported")
    kinds = [kind for kind in _ENCODERS if _encoder(kind, weights)]
    if "perturbation" not in kinds or "cell_type" not in kinds:
        raise UserError(f"{source}: no encoder of perturbations and cell types; not a released model")
    rows, semantic = {}, {}
    for kind in kinds:
        name = f"cov_encoder.{_encoder(kind, weights)}"
        learned, frozen = weights.get(f"{name}.weight"), weights.get(f"{name}.0.weight")
        table = frozen if learned is None else learned
        rows[kind] = 0 if table is None else len(table)
        if learned is None:
            semantic[kind] = take(f"{name}.1.weight", None, None).shape[1]
    dose = weights.get("cov_encoder.dose_encoder.weight")
    inner, joined = take("cov_encoder.transform.weight", None, None).shape
    return Layout(
        num_genes=num_genes,
        width=width,
        depth=len(blocks),
        heads=2 * width // head,
        mlp_ratio=hidden // width,
        covariate_width=joined // (len(kinds) + (dose is not None)),
        inner_width=inner,
        datasets=_datasets(weights, num_genes, source),
        rows=rows,
        semantic=semantic,
        num_doses=0 if dose is None else len(dose),
    )


def translate(
    weights: Mapping[str, Tensor], layout: Layout, sizes: Mapping[str, int], source: str = "checkpoint"
) -> Translated:
    """Return the released tensors under our names.

    Parameters
    ----------
    weights, layout, source
        See `layout_of`.
    sizes
        Number of labels of each covariate, without the reserved id 0.

    Raises
    ------
    UserError
        If a tensor is missing, has another shape than the rest asks for, or has no place in our network.
    """
    take = _Taker(weights, source)
    genes, width, inner = layout.num_genes, layout.width, layout.inner_width
    state: dict[str, Tensor] = {}
    for index, dataset in enumerate(layout.datasets):
        place = "" if layout.datasets == ("all",) else f".{dataset}"
        inputs = take.linear(f"input_layers.layers.{index}", f"model.x_embedder{place}", width, 2 * genes)
        name = f"control_layers.layers.{index}"
        control = take.linear(name, f"model.x_control_embedder{place}", width, 2 * genes)
        control[f"{name}.weight"] = control[f"{name}.weight"][:, :genes]
        state |= inputs | control
    state |= take.linear("time_embedding.expand", "model.t_embedder.mlp.0", width, 256)
    state |= take.linear("time_embedding.project", "model.t_embedder.mlp.2", width, width)
    state["gene_embedding"] = take("model.gene_embedding.null_emb.weight", 1, width)[0]
    state |= _covariates(take, layout, sizes)
    state |= take.linear("covariate_projection", "model.class_embedding.emb", width, inner)
    state["null_covariates"] = take("model.class_embedding.null_emb.weight", 1, width)[0]
    for index in range(layout.depth):
        state |= _block(take, layout, index)
    state |= take.linear("final_modulation.project", "model.final_layer.adaLN_modulation.1", 2 * width, width)
    state |= take.linear("output_layer", "model.final_layer.linear", genes, width)
    return Translated(state, _left_behind(take, layout))


def _covariates(take: _Taker, layout: Layout, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    width, state = layout.covariate_width, {}
    for kind in layout.covariates:
        theirs, ours = f"cov_encoder.{_encoder(kind, take.weights)}", f"covariate_encoder.tables.{kind}"
        if kind in layout.semantic:
            inputs = layout.semantic[kind]
            state |= take.linear(f"{ours}.project", f"{theirs}.1", width, inputs)
            if kind not in layout.missing_tables:
                table = take(f"{theirs}.0.weight", None, inputs)
                state[f"{ours}.vectors"] = _rows(table, sizes[kind], kind, take.source, frozen=True)
        else:
            table = take(f"{theirs}.weight", None, width)
            state[f"{ours}.weight"] = _rows(table, sizes[kind], kind, take.source, frozen=False)
    if layout.num_doses:
        state["covariate_encoder.dose.vectors"] = take("cov_encoder.dose_encoder.weight", None, width)
        dose = take("cov_encoder.dose_indices", sizes["perturbation"]).long()
        if not 0 <= int(dose.min()) <= int(dose.max()) < layout.num_doses:
            raise UserError(
                f"{take.source}: 'cov_encoder.dose_indices' names doses that it has no vectors of"
            )
        one_hot = torch.nn.functional.one_hot(dose, layout.num_doses).float()
        state["covariate_encoder.dose.weights"] = _with_zero_row(one_hot)
    parts = len(layout.covariates) + bool(layout.num_doses)
    inner = layout.inner_width
    return state | take.linear("covariate_encoder.project", "cov_encoder.transform", inner, parts * width)


def _rows(table: Tensor, labels: int, kind: str, source: str, *, frozen: bool) -> Tensor:
    """Return a table with the reserved row 0. Tables of perturbations mostly have theirs already."""
    if len(table) == labels:
        return _with_zero_row(table)
    if kind == "perturbation" and (len(table) == labels + 1 or (frozen and len(table) > labels)):
        return table[: labels + 1]  # a frozen table may hold more than is used
    raise UserError(f"{source}: {len(table)} rows for {labels} labels of {kind}; its dictionaries do not fit")


def _with_zero_row(table: Tensor) -> Tensor:
    return torch.cat([table.new_zeros(1, table.shape[1]), table])


def _block(take: _Taker, layout: Layout, index: int) -> dict[str, Tensor]:
    """Return one block's tensors. The last one's control stream ends in it, so it keeps less."""
    width, last = layout.width, index == layout.depth - 1
    theirs, ours = f"model.blocks.{index}.block", f"blocks.{index}"
    head = 2 * width // layout.heads
    state = take.linear(f"{ours}.attention.qkv", f"{theirs}.attn.qkv", 6 * width, 2 * width)
    keep = width if last else None
    state |= take.linear(f"{ours}.attention.project", f"{theirs}.attn.proj", 2 * width, 2 * width, keep)
    state[f"{ours}.attention.query_norm.weight"] = take(f"{theirs}.attn.q_norm.weight", head)
    state[f"{ours}.attention.key_norm.weight"] = take(f"{theirs}.attn.k_norm.weight", head)
    state |= take.linear(f"{ours}.modulation.project", f"{theirs}.adaLN_modulation.1", 6 * width, width)
    control, keep = f"{theirs}.control_adaLN_modulation.1", 2 * width if last else None
    state |= take.linear(f"{ours}.control_modulation.project", control, 6 * width, width, keep)
    for mlp in ("mlp",) if last else ("mlp", "control_mlp"):
        hidden = layout.mlp_ratio * width
        state |= take.linear(f"{ours}.{mlp}.expand", f"{theirs}.{mlp}.fc1", hidden, width)
        state |= take.linear(f"{ours}.{mlp}.contract", f"{theirs}.{mlp}.fc2", width, hidden)
    return state


def _left_behind(take: _Taker, layout: Layout) -> dict[str, int]:
    """Return the values that were not taken, by what they are. Refuse tensors that nobody knows."""
    last, weights = layout.depth - 1, take.weights
    left = {name for name in weights if name not in take.taken}
    dropped = {}
    for what, pattern in UNUSED.items():
        there = {name for name in left if re.match(pattern.replace("{last}", str(last)), name)}
        left -= there
        if there:
            dropped[what] = sum(weights[name].numel() for name in there)
    other = {name for name in left if re.match(r"model\.x_(control_)?embedder\.[^.]+\.(weight|bias)$", name)}
    if other and layout.datasets != ("all",):
        names = sorted({name.split(".")[2] for name in other})
        dropped[f"input layers of other genes: {', '.join(names)}"] = sum(weights[n].numel() for n in other)
        left -= other
    if left:
        raise UserError(f"{take.source}: no place for the tensors {listing(sorted(left), 4)}")
    width, size = layout.width, width_of_controls(layout)
    dropped["second half of the control input, which sees zeros"] = size
    dropped["last block's update of the control stream"] = 2 * width * width + width + 4 * width * (width + 1)
    return dropped


def width_of_controls(layout: Layout) -> int:
    """Return the number of weights of the control input layers' second halves."""
    return len(layout.datasets) * layout.width * layout.num_genes


def _encoder(kind: str, weights: Mapping[str, Tensor]) -> str | None:
    """Return the name of the module that encodes a covariate, None if there is none."""
    names = [_ENCODERS[kind], *(["drug_encoder"] if kind == "perturbation" else [])]
    return next((n for n in names if any(key.startswith(f"cov_encoder.{n}.") for key in weights)), None)


def _datasets(weights: Mapping[str, Tensor], num_genes: int, source: str) -> tuple[str, ...]:
    """Return the data sets with an input layer for the model's genes."""
    layers = {match["dataset"]: name for name in weights if (match := _INPUT.fullmatch(name))}
    if None in layers:
        return ("all",)
    fitting = [dataset for dataset, name in layers.items() if weights[name].shape[1] == 2 * num_genes]
    if not fitting:
        raise UserError(f"{source}: no input layer for its {num_genes} genes; not a released model")
    return tuple(fitting)
