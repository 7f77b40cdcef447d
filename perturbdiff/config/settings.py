"""The configuration is one frozen, typed tree. `perturbdiff.config.recipes` reads it from presets and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from perturbdiff.config.data_settings import (
    LARGEST_SEED,
    Column,
    DataConfig,
    FileName,
    Label,
    Labels,
    Section,
    SimulateConfig,
    SplitConfig,
    none,
)
from perturbdiff.config.readings import agreeing
from perturbdiff.runtime.errors import UserError

Share = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """Architecture of the network and units of its values (App. Architecture Implementation Details)."""

    width: int = Field(default=512, le=16384, ge=8, description="width of the network (D)")
    depth: int = Field(default=8, le=512, ge=1, description="number of transformer blocks (MM-DiT)")
    heads: int = Field(
        default=8, le=1024, ge=1, description="number of attention heads, which share the joint width 2D"
    )
    mlp_ratio: int = Field(
        default=4, le=64, ge=1, description="hidden width of the MLPs, as a multiple of the network's width"
    )
    covariate_width: int = Field(
        default=128, le=16384, ge=1, description="length of the vector of each covariate"
    )
    covariates: tuple[Literal["perturbation", "cell_type", "batch"], ...] = Field(
        default=("perturbation", "cell_type", "batch"),
        description="labels of a condition that the model is told",
    )
    mlp_branch: Literal["sequential", "parallel"] = Field(
        default="sequential",
        description="where the MLP of a block stands: after the attention update (sequential, paper), or beside it "
        "(parallel, released)",
    )
    fusion: Literal["concat", "sum", "sum-silu"] = Field(
        default="concat",
        description="how time and covariates are combined: by an MLP on both (concat, paper), by their sum (sum, "
        "released), or by the SiLU of their sum (sum-silu)",
    )
    head: Literal["relu", "softplus"] = Field(
        default="relu", description="function that makes the output non-negative"
    )
    gate: bool = Field(
        default=False, description="set outputs below the detection limit of the data to exactly zero"
    )
    clip: bool = Field(
        default=True, description="limit sampled values of each gene to its maximum in the training cells"
    )
    unit: Literal["scale", "rms"] = Field(
        default="scale",
        description="units of the model's values: log1p divided by data.scale (scale), or divided by the root mean "
        "square of the training cells (rms)",
    )
    gene_embedding: Literal["none", "shared", "table"] = Field(
        default="none",
        description="what is added to every cell of both streams: nothing (none), one learned vector (shared, paper), "
        "or a vector made from a table of gene vectors (table)",
    )
    covariate_projection: Literal["width", "genes"] = Field(
        default="width",
        description="how covariates reach the network's width: directly (width, paper), or through a vector with one "
        "entry per gene (genes, released)",
    )
    leak: float = Field(
        default=0.0, ge=0, lt=1, description="gradient of the relu head where its output is zero"
    )
    anchor: Literal["none", "control", "predicted", "transferred"] = Field(
        default="none",
        description="what cells are made from: noise (none, paper), the control cell at the same position of its set "
        "(control), this cell with the change that kernel ridge regression on the perturbations' vectors predicts "
        "(predicted), or with the perturbation's mean change in other cell types of the training cells, or in other "
        "batches if there is one cell type, where similar ones count more (transferred)",
    )
    gene_noise: bool = Field(
        default=False,
        description="add each gene's own noise to its output, times a factor that the network gives. Otherwise all "
        "noise passes through the network's width, which the genes share",
    )
    dose: Literal["label", "sum", "concat"] = Field(
        default="label",
        description="how the dose is represented: as part of the label, or as a learned vector that is added to the "
        "agent's frozen vector (sum, paper) or placed beside it (concat, released). Without frozen vectors it is "
        "always part of the label",
    )
    control_embedding: Literal["mean", "scalar"] = Field(
        default="mean",
        description="semantic vector of the control: the mean of the table (paper), or its scalar mean (released)",
    )
    combination: Literal["mean", "sum"] = Field(
        default="mean", description="how the semantic vectors of several agents given together are combined"
    )
    combination_separator: str = Field(
        default="+",
        description="separator between the agents of a combination, e.g. 'IFNG+TNF'; empty: no combinations",
    )
    missing_embedding: Literal["error", "mean"] = Field(
        default="error",
        description="what to do if a semantic table lacks a label: stop with an error, or use the mean of the table",
    )
    projection_width: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="length of the intermediate vector for covariate_projection 'genes'; none: the number of genes",
    )
    initialisation: Literal["small", "released"] = Field(
        default="small",
        description="initial values of the vector that stands for all genes and of the one that stands for dropped "
        "covariates: small, or as in the released code",
    )


class ScheduleConfig(Section):
    """Variance-preserving noise schedule."""

    num_steps: int = Field(default=1000, le=10**5, ge=2, description="number of noise levels (T)")
    kind: Literal["linear"] = Field(default="linear", description="betas from 1e-4 to 0.02 (for T = 1000)")


class LossConfig(Section):
    """Energy-distance MMD plus mean squared error, both in model units."""

    mmd_weight: float = Field(default=1.0, ge=0, description="weight of the energy-distance MMD")
    mmd_factor: Literal["paper", "half"] = Field(
        default="paper",
        description="size of the energy distance: 2E|x-y|-E|x-x'|-E|y-y'| (paper), or half of it (half, released)",
    )
    mmd_statistic: Literal["V", "U", "cross", "set"] = Field(
        default="V",
        description="pairs of cells that the energy distance counts: all pairs of a set, each cell with itself "
        "included (V); the same without these self-pairs (U); only pairs across two twin sets (cross). set: whole sets "
        "are compared, so that the model learns how sets of a condition differ (docs/family.md)",
    )
    set_power: float = Field(
        default=1.0,
        gt=0,
        le=2,
        description="for mmd_statistic 'set': power of the distance between sets (beta). Below 2, the law of the sets "
        "is learnt; at 2, only their mean",
    )
    mse_weight: float = Field(default=1.0, ge=0, description="weight of the mean squared error")
    mse_reduction: Literal["sum", "mean"] = Field(
        default="mean", description="whether the squared error is a sum or a mean over genes"
    )


class TrainConfig(Section):
    """Optimisation, cell sets, validation and checkpoints (App. Training Details)."""

    max_steps: int = Field(default=20000, ge=1, description="number of optimiser steps")
    set_size: int = Field(default=256, le=10**5, ge=2, description="number of cells in a set (m)")
    sets_per_step: int = Field(
        default=8, le=10**5, ge=1, description="number of sets in an optimiser step, over all processes (B)"
    )
    learning_rate: float = Field(default=2e-4, le=10, gt=0, description="highest learning rate")
    warmup_steps: int = Field(
        default=200,
        ge=0,
        description="number of steps in which the learning rate rises from 0 to its highest value",
    )
    plateau_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="share of the steps at the full learning rate after warm-up"
    )
    final_rate: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="lowest rate of the cosine schedule, as a share of the learning rate",
    )
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.98), description="decay of AdamW's averages of the gradients and of their squares"
    )
    weight_decay: float = Field(default=0.01, ge=0, description="weight decay of AdamW; biases have none")
    clip_norm: float = Field(
        default=1.0, gt=0, description="largest norm of the gradient; a longer gradient is shortened to it"
    )
    ema_decay: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="decay of the running average of the weights, which validation and the bundle use",
    )
    ema_every: int = Field(
        default=10, ge=1, description="number of steps between updates of the running average"
    )
    drop_covariates: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="probability of dropping the covariates, for classifier-free guidance (p_drop)",
    )
    drop_per: Literal["set", "step"] = Field(
        default="set", description="draw whether to drop covariates once per set, or once per optimiser step"
    )
    self_condition: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="probability of giving the denoiser its previous estimate (self-conditioning, p_sc)",
    )
    set_noise: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the noise's variance that all cells of a set have in common (rho), in training and "
        "sampling; the noise of a single cell stays the same",
    )
    control_targets: bool | Literal["perturbed"] = Field(
        default=False,
        description="also train on control sets as targets, with the control label; perturbed: only on control sets "
        "that are matched to perturbed training cells",
    )
    zero_control: bool = Field(
        default=False, description="set the control stream to zero, for marginal pretraining"
    )
    valid_every: int = Field(default=2000, ge=1, description="number of steps between validations")
    valid_sets: int = Field(
        default=32,
        le=10**6,
        ge=1,
        description="maximum number of validation sets; they stay the same during the run",
    )
    checkpoint_every: int = Field(
        default=1000, ge=1, description="number of steps between checkpoints that training can resume from"
    )
    log_every: int = Field(default=50, ge=1, description="number of steps between lines of the training log")
    precision: Literal["32-true", "bf16-mixed"] = Field(
        default="32-true", description="precision of the network's matrix products in training"
    )
    valid_metric: Literal["energy", "r2", "pdcorr", "loss"] = Field(
        default="energy",
        description="what tells the best step: the loss, or a score of sampled cells (energy distance, R², or the "
        "Pearson correlation of changes, pdcorr)",
    )
    valid_steps: int = Field(
        default=4, ge=1, description="number of reverse steps when validation samples cells"
    )
    memory_gib: float = Field(
        default=8.0,
        ge=0,
        description="stores up to this size are held in memory; larger stores are read in windows",
    )
    statistics_cells: int = Field(
        default=500_000,
        ge=1,
        description="number of training cells used to measure the unit, the detection limit and the gene maxima",
    )
    stop_margin: float = Field(
        default=120.0,
        ge=0,
        description="stop with a checkpoint this many seconds before the job's time limit",
    )
    max_epochs: float | None = Field(
        default=None,
        gt=0,
        description="stop after this many passes over the training cells, if that comes before max_steps",
    )
    min_steps: int = Field(
        default=0,
        ge=0,
        description="train for at least this many steps, even if max_epochs is reached earlier; never more than "
        "max_steps",
    )
    time_power: float = Field(
        default=1.0,
        ge=1,
        description="draw noise levels t = T·u^(1/power) with uniform u. 1: uniform (paper); larger: higher noise "
        "levels",
    )
    cells_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of each perturbation's training cells to use (few-shot)",
    )
    store_weights: Literal["cells", "equal"] | tuple[float, ...] = Field(
        default="cells", description="how often pretraining draws from each store"
    )
    choose: Literal["validation", "first-epoch", "last"] = Field(
        default="validation",
        description="weights to keep in the bundle: the best by validation (the last without validation data), those "
        "at the end of the first epoch, or the last",
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="keep a complete bundle every this many steps, in the folder 'steps' of the bundle",
    )
    accumulate: int = Field(
        default=1, ge=1, description="number of forward passes per optimiser step; more passes save memory"
    )
    compile: bool = Field(default=False, description="compile the network with torch.compile")
    checkpoint_activations: bool = Field(
        default=False, description="recompute activations of the blocks in the backward pass, to save memory"
    )
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        default=("tensorboard",),
        description="loggers in addition to training.csv; wandb (offline) and mlflow need an extra installation",
    )
    loader_threads: int = Field(
        default=2,
        le=1024,
        ge=1,
        description="number of threads that read and prepare cells; the result does not depend on it",
    )


class SampleConfig(Section):
    """Sampling by the reverse process."""

    sampler: Literal["ddim", "ddpm"] = Field(
        default="ddim",
        description="kind of reverse steps: DDIM, which adds no noise if eta is 0, or DDPM, which does",
    )
    num_steps: int = Field(default=100, le=10**5, ge=1, description="number of reverse steps (K)")
    start_level: Annotated[int | None, BeforeValidator(none)] = Field(
        default=None,
        ge=1,
        description="the K levels are spread below this level; none: over all T levels (paper). The released code "
        "uses K, which visits the last K levels",
    )
    eta: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of noise that a DDIM step adds; 0: none, 1: as much as DDPM",
    )
    guidance: float = Field(
        default=0.0, le=1000, ge=0, description="strength of guidance, in noise space (w); 0: none"
    )
    self_condition: bool = Field(default=True, description="give the denoiser its previous estimate")
    set_size: Annotated[int | None, BeforeValidator(none)] = Field(
        default=None, le=10**5, ge=2, description="number of cells in a sampled set (m); none: as in training"
    )
    controls: Literal["shuffled", "balanced"] = Field(
        default="shuffled",
        description="control cells of a condition: drawn at random, or chosen to represent all of them",
    )
    zeros: Literal["predicted", "matched", "detected"] = Field(
        default="predicted",
        description="keep zeros as predicted, or set the smallest values of each gene to zero until it is zero as "
        "often as in the training cells (matched), and cells differ in their numbers of detected genes as their "
        "control cells do (detected). The gene's mean over a set is kept. Models with model.gate measure the threshold",
    )
    totals: Literal["predicted", "matched"] = Field(
        default="predicted",
        description="keep the totals of cells as predicted, or let them vary within a set no more than those of its "
        "control cells",
    )
    values: Literal["log1p", "counts"] = Field(
        default="log1p",
        description="write log1p values of the model's genes, or whole counts of all genes of the store. A cell gets "
        "the depth of the control cell that it starts from, and its counts of genes that the model does not predict",
    )
    sets_per_batch: int = Field(default=8, le=10**5, ge=1, description="number of sets computed together")
    ddpm_variance: Literal["posterior", "beta"] = Field(
        default="posterior",
        description="noise variance of a DDPM step: that of the posterior, or beta (released)",
    )
    cutoff: float = Field(
        default=0.0, ge=0, description="set estimates below this value (model units) to zero"
    )
    arithmetic: Literal["double", "single"] = Field(
        default="double",
        description="compute coefficients of a reverse step from float64 tables, or round them as the released code "
        "does",
    )
    precision: Literal["32-true", "bf16-mixed"] = Field(
        default="32-true", description="precision of the network's matrix products when sampling"
    )

    def check_levels(self, levels: int) -> None:
        """Check that these settings fit a model with this many noise levels.

        Raises
        ------
        UserError
            If there are more reverse steps than noise levels, or than levels below the start.
        """
        if self.num_steps > levels:
            raise UserError(f"sample.num_steps={self.num_steps} is more than the model's {levels} levels")
        if self.start_level is not None and not self.num_steps <= self.start_level <= levels:
            raise UserError(
                f"sample.start_level={self.start_level} must lie between sample.num_steps={self.num_steps} and the "
                f"model's {levels} levels"
            )


class EvaluateConfig(Section):
    """How predictions are scored."""

    definition: Literal["perturbdiff", "cell-eval-0.6.6", "cell-eval-0.8.2", "cell-eval2"] = Field(
        default="perturbdiff",
        description="definitions of the metrics: ours (as 0.6.6, but discrimination cannot be gamed), or a release's",
    )
    rules: Literal["vcc2026", "v2"] = Field(
        default="vcc2026",
        description="metrics of the definition cell-eval2: those of the 2026 competition, or all of its profile v2",
    )
    metrics: Labels = Field(
        default=(),
        description="metrics or metric families (expression, de, effect, count, distribution, sets) to compute; "
        "none: all",
    )
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="false discovery rate below which a gene counts as DE"
    )
    min_de: int = Field(
        default=10,
        ge=1,
        description="minimum number of real DE genes for a perturbation to count in DEOver_10 and DEPrec_10",
    )
    context_column: Column = Field(
        default=None,
        description="obs column of the contexts to score separately; none: cell types, if there are any",
    )
    perturbation_key: Label = Field(
        default="perturbation", description="perturbation column of AnnData files"
    )
    cell_type_key: Column = Field(
        default="cell_type", description="cell type column of AnnData files, if they have one"
    )
    batch_key: Column = Field(default="batch", description="batch column of AnnData files, if they have one")
    scale: Literal["declared", "log1p", "counts"] = Field(
        default="declared",
        description="units of the values in AnnData files: as they declare in uns['perturbdiff'], or what you say here",
    )
    control: Label | None = Field(
        default=None, description="control label of AnnData files that do not declare one"
    )
    controls: Literal["real", "own"] = Field(
        default="real",
        description="control cells for predicted changes: the real ones, or those of the predictions",
    )
    targets: FileName = Field(
        default=None,
        description="CSV or TSV (perturbation, gene) of the genes that perturbations act on; none: by their names",
    )
    genes: FileName = Field(
        default=None,
        description="text file, vocabulary or store with the genes of a store to score; none: all of them",
    )
    replicate_column: Column = Field(
        default=None,
        description="obs column of the truth with replicates (donors, guides) for DE of pseudobulks; none: no such DE",
    )
    set_column: Column = Field(
        default=None,
        description="obs column of the truth that says which cells were a set (well, plate, guide); none: as the store "
        "knows it",
    )
    ceiling_splits: int = Field(
        default=5, ge=1, le=1000, description="number of times that real cells are halved for the ceiling"
    )
    missing: Literal["error", "skip"] = Field(
        default="error",
        description="what to do with real conditions that have no prediction (pairs of AnnData files)",
    )
    max_cells: int = Field(
        default=2000,
        ge=2,
        description="maximum number of cells per side for distances between populations of a condition",
    )
    bootstrap: int = Field(
        default=2000,
        le=10**6,
        ge=0,
        description="number of bootstrap draws of perturbations for the intervals",
    )
    embed_conditions: int = Field(default=12, ge=0, description="number of conditions shown in the embedding")
    embed_cells: int = Field(
        default=300, ge=2, description="number of cells of each kind and condition in the embedding"
    )


class BaselineConfig(Section):
    """External methods that are compared with the model (docs/baselines.md)."""

    settings: Literal["recommended", "quick"] = Field(
        default="recommended",
        description="hyper-parameters: as the method's authors recommend, or a setting that runs in minutes on a CPU",
    )
    options: dict[str, bool | int | float | str] = Field(
        default={},
        description="changes to single hyper-parameters; 'perturbdiff baseline show NAME' lists their names",
    )
    timeout_hours: float = Field(
        default=24.0, gt=0, description="time limit in hours, after which the method counts as failed"
    )


class Config(Section):
    """A complete recipe."""

    name: str = Field(default="custom", description="name of the recipe")
    variant: Literal["paper", "released", "recommended", "own"] = Field(
        default="own",
        description="reading of the method. In a recipe, it sets the switches; here, it names the variant that all "
        "switches agree with",
    )
    description: str = Field(default="", description="what the recipe is for")
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED, description="seed of all random numbers")
    data: DataConfig = DataConfig()
    split: SplitConfig = SplitConfig()
    model: ModelConfig = ModelConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    simulate: SimulateConfig = SimulateConfig()
    baseline: BaselineConfig = BaselineConfig()

    @model_validator(mode="after")
    def _validated(self) -> Self:
        return self._with_its_variant()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a changed copy whose variant is derived again."""
        return super().model_copy(update=update, deep=deep)._with_its_variant()

    def _with_its_variant(self) -> Self:
        """Derive `variant` from the switches, and ignore the value that was given."""
        object.__setattr__(self, "variant", agreeing(self))
        return self
