"""The configuration: one frozen, typed tree, read from presets or YAML files and changed by ``--set a.b=c``.

A preset says where each value comes from by a YAML tag: ``!paper 1000``, ``!released 512``, ``!ours 32``
(`config show` prints them). A user's own file needs no tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perturbdiff.errors import UserError, listing, nearest

SOURCES = ("paper", "released", "ours")


class Section(BaseModel):
    """A part of the tree: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class DataConfig(Section):
    """What the input's columns mean and how counts become the store."""

    perturbation_key: str = Field("perturbation", description="obs column of the perturbation label")
    control: str = Field("control", description="label of the control cells in the perturbation column")
    cell_type_key: str | None = Field("cell_type", description="obs column of the cell type; none: one type")
    batch_key: str | None = Field("batch", description="obs column of the batch or donor; none: one batch")
    dose_key: str | None = Field(
        None, description="obs column of the dose; joined to the label as 'drug@dose'"
    )
    extra_obs: tuple[str, ...] = Field((), description="further obs columns to keep (e.g. to hold out by)")
    layer: str = Field("X", description="where the values are: X, raw, or layers/NAME")
    input_scale: Literal["counts", "log1p"] = Field("counts", description="what the values are")
    min_counts: int = Field(0, ge=0, description="drop cells with fewer counts")
    min_genes: int = Field(0, ge=0, description="drop cells with fewer detected genes")
    target_sum: float | Literal["median"] = Field(
        "median", description="depth every cell is scaled to; 'median' as scanpy's normalize_total"
    )
    scale: float = Field(10.0, gt=0, description="log1p values are divided by this for the model")
    num_hvgs: int | None = Field(2000, ge=1, description="highly variable genes to keep; none: all genes")
    hvg_flavor: Literal["seurat"] = Field("seurat", description="scanpy's flavor of the selection")
    hvg_by_batch: bool = Field(False, description="select per batch and combine (scanpy's batch_key)")
    hvg_cells: Literal["all", "train"] = Field("all", description="cells the selection may look at")


class SplitConfig(Section):
    """Which conditions are held out. A STATE-style TOML replaces these rules."""

    context_column: str = Field("batch", description="obs column whose values are held out")
    held_out: tuple[str, ...] = Field((), description="contexts to hold out by name")
    num_held_out: int = Field(0, ge=0, description="contexts to choose if none is named")
    choose: Literal["random", "pca"] = Field(
        "random", description="how to choose them: at random, or spread over PCA clusters of pseudobulks"
    )
    train_fraction: float = Field(
        0.3, ge=0, le=1, description="share of a held-out context's perturbations moved to training"
    )
    valid_fraction: float = Field(
        0.1, ge=0, lt=1, description="share of a held-out context's remaining perturbations for validation"
    )
    perturbations: tuple[str, ...] = Field((), description="only these can be held out; empty: all")


class ModelConfig(Section):
    """Architecture and the space the network works in (App. Architecture Implementation Details)."""

    width: int = Field(512, ge=8, description="model width D")
    depth: int = Field(8, ge=1, description="number of MM-DiT blocks")
    heads: int = Field(8, ge=1, description="attention heads over the joint width 2D")
    mlp_ratio: int = Field(4, ge=1, description="hidden width of the MLPs in units of D")
    covariate_width: int = Field(128, ge=1, description="width of each covariate's embedding")
    covariates: tuple[Literal["perturbation", "cell_type", "batch"], ...] = Field(
        ("perturbation", "cell_type", "batch"), description="covariates the model is told"
    )
    mlp_branch: Literal["sequential", "parallel"] = Field(
        "sequential", description="MLP after the attention update (paper) or beside it (released)"
    )
    fusion: Literal["concat", "sum"] = Field(
        "concat", description="time and covariates: MLP on both (paper) or a sum (released)"
    )
    head: Literal["relu", "softplus"] = Field("relu", description="non-negative output")
    gate: bool = Field(False, description="outputs below the data's detection limit become exact zeros")
    clip: bool = Field(True, description="sampled values stay within each gene's training maximum")
    unit: Literal["scale", "rms"] = Field(
        "scale", description="model values are log1p / data.scale, or log1p / RMS of the training cells"
    )
    gene_embedding: Literal["none", "shared"] = Field(
        "none", description="one learned vector added to every cell of both streams (paper), or none"
    )
    covariate_projection: Literal["width", "genes"] = Field(
        "width", description="covariates go straight to D (paper), or through a vector of G (released)"
    )
    leak: float = Field(0.0, ge=0, lt=1, description="gradient of the relu head where its output is zero")
    anchor: Literal["none", "control"] = Field(
        "none",
        description="cells are made from noise (paper), or as changes to the control cell at their place",
    )


class ScheduleConfig(Section):
    """Variance-preserving noise schedule."""

    num_steps: int = Field(1000, ge=2, description="T")
    kind: Literal["linear"] = Field("linear", description="betas from 1e-4 to 0.02 (for T = 1000)")


class LossConfig(Section):
    """Energy-distance MMD plus mean squared error, both in model units."""

    mmd_weight: float = Field(1.0, ge=0)
    mmd_factor: Literal["paper", "half"] = Field(
        "paper", description="2E|x-y|-E|x-x'|-E|y-y'| (paper) or half of it (released)"
    )
    mmd_statistic: Literal["V", "U", "cross"] = Field(
        "V", description="pairs within a set with (V) or without (U) self-pairs, or only across twin sets (cross)"
    )
    mse_weight: float = Field(1.0, ge=0)
    mse_reduction: Literal["sum", "mean"] = Field("mean", description="over genes")


class TrainConfig(Section):
    """Optimisation, cell sets and checkpoints (App. Training Details)."""

    max_steps: int = Field(20000, ge=1)
    set_size: int = Field(256, ge=2, description="m, cells in a set")
    sets_per_step: int = Field(8, ge=1, description="B, sets in an optimiser step over all ranks")
    learning_rate: float = Field(2e-4, gt=0)
    warmup_steps: int = Field(200, ge=0)
    plateau_fraction: float = Field(
        0.0, ge=0, lt=1, description="share of the steps at full rate after warm-up"
    )
    final_rate: float = Field(0.1, ge=0, le=1, description="floor of the cosine, share of the learning rate")
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    ema_decay: float = Field(0.99, ge=0, lt=1)
    ema_every: int = Field(10, ge=1)
    drop_covariates: float = Field(0.1, ge=0, le=1, description="p_drop of classifier-free guidance")
    drop_per: Literal["set", "step"] = Field("set", description="one coin per set or per optimiser step")
    self_condition: float = Field(0.5, ge=0, le=1, description="p_sc")
    control_targets: bool = Field(False, description="control sets are targets too, with the control label")
    zero_control: bool = Field(False, description="marginal pretraining: the control stream is zero")
    valid_every: int = Field(2000, ge=1, description="steps between validations")
    valid_sets: int = Field(32, ge=1, description="at most this many validation sets, fixed over the run")
    checkpoint_every: int = Field(1000, ge=1, description="steps between resumable checkpoints")
    log_every: int = Field(50, ge=1)
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    valid_metric: Literal["energy", "loss"] = Field(
        "energy", description="choose the best step by the energy distance of sampled cells, or by the loss"
    )
    valid_steps: int = Field(4, ge=1, description="reverse steps of the samples that validation draws")
    memory_gib: float = Field(
        8.0, ge=0, description="stores up to this size are held in memory, larger ones read in windows"
    )
    statistics_cells: int = Field(
        500_000, ge=1, description="training cells looked at for the unit, the detection limit and the maxima"
    )
    stop_margin: float = Field(
        120.0, ge=0, description="seconds before the allocation's end to stop with a checkpoint"
    )


class SampleConfig(Section):
    """The reverse process."""

    sampler: Literal["ddim", "ddpm"] = "ddim"
    num_steps: int = Field(100, ge=1, description="K")
    timesteps: Literal["respaced", "last"] = Field(
        "respaced", description="K levels over the whole range (paper) or the last K levels (released)"
    )
    eta: float = Field(0.0, ge=0, le=1)
    guidance: float = Field(0.0, ge=0, description="w, in noise space")
    self_condition: bool = True
    set_size: int | None = Field(None, ge=2, description="m when sampling; none: as trained")
    sets_per_batch: int = Field(8, ge=1)
    ddpm_variance: Literal["posterior", "beta"] = Field(
        "posterior", description="noise of a DDPM step: of the posterior, or beta (released)"
    )
    cutoff: float = Field(0.0, ge=0, description="estimates below this (model units) become zero")


class EvaluateConfig(Section):
    """Definitions of the metrics."""

    definition: Literal["cell-eval-0.6.6"] = "cell-eval-0.6.6"
    alpha: float = Field(0.05, gt=0, lt=1, description="false discovery rate of a DE gene")
    context_column: str = Field("cell_type", description="obs column of the contexts scored one by one")
    perturbation_key: str = Field(
        "perturbation", description="perturbation column of a truth that is AnnData"
    )
    cell_type_key: str | None = Field("cell_type", description="its cell type column; none: one type")
    batch_key: str | None = Field("batch", description="its batch column; none: one batch")
    scale: Literal["declared", "log1p"] = Field(
        "declared", description="what AnnData values are: as uns['perturbdiff'] says, or log1p on your word"
    )
    control: str | None = Field(None, description="control label of AnnData files that do not declare theirs")
    max_cells: int = Field(2000, ge=2, description="cells a side in the energy distance of a condition")
    embed_conditions: int = Field(6, ge=0, description="conditions in the embedding")
    embed_cells: int = Field(300, ge=2, description="cells of each kind and condition in the embedding")


class SimulateConfig(Section):
    """A simulated experiment with known effects; calibrated on real screens (docs/simulation.md)."""

    cells: int = Field(8000, ge=1, description="cells in all")
    genes: int = Field(900, ge=2, description="measured genes")
    cell_types: int = Field(3, ge=1)
    batches: int = Field(2, ge=1)
    knockdowns: int = Field(12, ge=0, description="perturbations named by the measured gene they knock down")
    drugs: int = Field(2, ge=0, description="drugs, each at every dose")
    doses: tuple[float, ...] = Field((0.1, 1.0, 10.0), description="doses of each drug, positive")
    cytokines: int = Field(2, ge=0)
    control_fraction: float = Field(0.15, gt=0, lt=1, description="share of cells that are controls")
    size_spread: float = Field(0.6, ge=0, description="SD of the log size of conditions")
    tiny_fraction: float = Field(0.03, ge=0, le=1, description="share of conditions with only 1 to 5 cells")
    counts_per_gene: float = Field(0.9, gt=0, description="median depth of a cell / number of genes")
    depth_spread: float = Field(0.45, ge=0, description="SD of the log depth of cells")
    mean_spread: float = Field(1.5, ge=0, description="SD of the genes' log mean expression")
    mean_skew: float = Field(0.6, ge=0, description="skewness of the genes' log mean expression")
    dispersion: float = Field(0.07, ge=0, description="NB dispersion of well expressed genes")
    dispersion_low: float = Field(
        0.08, ge=0, description="further dispersion of a gene with mean count 1; 1/mean"
    )
    dispersion_spread: float = Field(
        0.7, ge=0, description="SD of the genes' log dispersion about that trend"
    )
    cell_type_spread: float = Field(
        0.5, ge=0, description="SD of a cell type's log expression about the mean"
    )
    batch_spread: float = Field(0.12, ge=0, description="SD of a batch's shift of log expression")
    cell_programmes: int = Field(5, ge=0, description="activities that differ from cell to cell")
    cell_spread: float = Field(0.3, ge=0, description="SD of the strongest activity's effect on its genes")
    programmes: int = Field(8, ge=1, description="response programmes that perturbations share")
    programme_share: float = Field(0.12, gt=0, le=1, description="share of genes in a response programme")
    effect_size: float = Field(
        1.3, ge=0, description="RMS log fold change of a programme's genes, knock-downs"
    )
    effect_spread: float = Field(0.4, ge=0, description="SD of the perturbations' log strength")
    specificity: float = Field(
        0.2, ge=0, le=1, description="share of an effect's variance that belongs to the cell type"
    )
    private_share: float = Field(
        0.15, ge=0, le=1, description="share of an effect's variance outside programmes"
    )
    escape: float = Field(0.1, ge=0, lt=1, description="share of knock-down cells that do not respond")
    wells: int = Field(4, ge=1, description="sets (wells) of each condition, each with its latent factor")
    latent_strength: float = Field(0.25, ge=0, description="SD of the response's strength between sets")
    latent_shift: float = Field(
        0.1, ge=0, description="SD of the sets' common shift on its genes, controls too"
    )
    context_depth_spread: float = Field(0.15, ge=0, description="SD of the contexts' log median depth")


class Config(Section):
    """A complete recipe."""

    name: str = "custom"
    description: str = ""
    seed: int = Field(0, ge=0)
    data: DataConfig = DataConfig()
    split: SplitConfig = SplitConfig()
    model: ModelConfig = ModelConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    simulate: SimulateConfig = SimulateConfig()


class _Tagged:
    """A YAML value with the source its tag names."""

    def __init__(self, value: Any, source: str) -> None:
        self.value, self.source = value, source


class _Loader(yaml.SafeLoader):
    pass


def _construct_tagged(loader: _Loader, suffix: str, node: yaml.Node) -> _Tagged:
    if suffix not in SOURCES:
        raise UserError(f"unknown tag '!{suffix}' in a configuration; sources are {listing(SOURCES)}")
    if isinstance(node, yaml.SequenceNode):
        return _Tagged(loader.construct_sequence(node, deep=True), suffix)
    if isinstance(node, yaml.ScalarNode):
        plain = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, node.value, (True, False)), node.value)
        return _Tagged(loader.construct_object(plain, deep=True), suffix)
    raise UserError(f"tag '!{suffix}' belongs on a value, not on a section")


_Loader.add_multi_constructor("!", _construct_tagged)


def presets() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("perturbdiff") / "presets"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Return the configuration of a preset's name or a YAML file, with ``key.path=value`` overrides applied.

    A file or preset may begin with ``base: NAME`` and then gives only what differs.

    Raises
    ------
    UserError
        If the preset or file is unknown, a key does not exist or a value has the wrong type.
    """
    return load_with_sources(source, overrides)[0]


def load_with_sources(
    source: str | Path | None = None, overrides: Iterable[str] = ()
) -> tuple[Config, dict[str, str]]:
    """Return `load`'s configuration and, for each dotted key that was set, its source."""
    tree: dict[str, Any] = {} if source is None else _read(str(source), seen=())
    for text in overrides:
        _set(tree, text)
    values, sources = _untag(tree)
    origin = f"configuration {source}" if source is not None else "configuration"
    try:
        return Config.model_validate(values), sources
    except ValidationError as error:
        raise UserError(f"{origin}: {_explain(error)}") from None


def describe(source: str | Path | None, overrides: Iterable[str] = ()) -> str:
    """Return the resolved configuration as YAML, each value with its source as a comment."""
    config, sources = load_with_sources(source, overrides)
    lines = []
    for dotted in keys():
        value: Any = config
        *sections, last = dotted.split(".")
        for name in dotted.split("."):
            value = getattr(value, name)
        if sections and (head := f"{'.'.join(sections)}:") not in lines:
            lines.append(head)
        text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
        text = text.removesuffix("...\n").strip()
        origin = sources.get(dotted, "default")
        lines.append(f"{'  ' if sections else ''}{last}: {text}" + (f"  # {origin}" if sections else ""))
    return "\n".join(lines)


def _read(source: str, seen: tuple[str, ...]) -> dict[str, Any]:
    path = Path(source)
    if source in presets():
        text = (resources.files("perturbdiff") / "presets" / f"{source}.yaml").read_text()
    elif path.is_file():
        text = path.read_text()
    else:
        raise UserError(
            f"no preset or file '{source}'{nearest(source, presets())} presets: {', '.join(presets())}"
        )
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"configuration {source} is not valid YAML: {error}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"configuration {source}: expected sections, found {type(tree).__name__}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if base in seen:
        raise UserError(f"configuration {source}: its bases form a circle")
    return _merge(_read(str(base), (*seen, source)), tree)


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _set(tree: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text!r}: write it as section.key=value, e.g. train.max_steps=500")
    *sections, last = key.strip().split(".")
    node = tree
    for name in sections:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {text!r}: '{name}' is a value, not a section")
    try:
        node[last] = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise UserError(f"--set {text!r}: cannot read the value {raw!r}") from None


def _untag(tree: Any, prefix: str = "") -> tuple[Any, dict[str, str]]:
    if isinstance(tree, _Tagged):
        return tree.value, {prefix: tree.source}
    if not isinstance(tree, dict):
        return tree, {prefix: "given"}
    values, sources = {}, {}
    for key, value in tree.items():
        values[key], found = _untag(value, f"{prefix}.{key}".lstrip("."))
        sources.update(found)
    return values, sources


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the tree."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{dotted}.")
        else:
            yield dotted


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if part not in ("float", "int"))
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key '{key}'{nearest(key, keys())}")
        else:
            lines.append(
                f"'{key}': {problem['msg'][0].lower()}{problem['msg'][1:]}, got {problem['input']!r}"
            )
    return "; ".join(dict.fromkeys(lines))
