"""The configuration: one frozen, typed tree. `perturbdiff.config.recipes` reads it from presets and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from perturbdiff.config.data_settings import LARGEST_SEED, DataConfig, Section, SimulateConfig, SplitConfig
from perturbdiff.config.readings import agreeing
from perturbdiff.runtime.errors import UserError

Share = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """Architecture and the space the network works in (App. Architecture Implementation Details)."""

    width: int = Field(default=512, le=16384, ge=8, description="model width D")
    depth: int = Field(default=8, le=512, ge=1, description="number of MM-DiT blocks")
    heads: int = Field(default=8, le=1024, ge=1, description="attention heads over the joint width 2D")
    mlp_ratio: int = Field(default=4, le=64, ge=1, description="hidden width of the MLPs in units of D")
    covariate_width: int = Field(
        default=128, le=16384, ge=1, description="width of each covariate's embedding"
    )
    covariates: tuple[Literal["perturbation", "cell_type", "batch"], ...] = Field(
        default=("perturbation", "cell_type", "batch"), description="covariates the model is told"
    )
    mlp_branch: Literal["sequential", "parallel"] = Field(
        default="sequential", description="MLP after the attention update (paper) or beside it (released)"
    )
    fusion: Literal["concat", "sum", "sum-silu"] = Field(
        default="concat",
        description="time and covariates: MLP on both (paper), a sum (released), or SiLU of the sum",
    )
    head: Literal["relu", "softplus"] = Field(default="relu", description="non-negative output")
    gate: bool = Field(
        default=False, description="outputs below the data's detection limit become exact zeros"
    )
    clip: bool = Field(default=True, description="sampled values stay within each gene's training maximum")
    unit: Literal["scale", "rms"] = Field(
        default="scale",
        description="model values are log1p / data.scale, or log1p / RMS of the training cells",
    )
    gene_embedding: Literal["none", "shared", "table"] = Field(
        default="none",
        description="one learned vector added to every cell of both streams (paper), or made from gene vectors",
    )
    covariate_projection: Literal["width", "genes"] = Field(
        default="width",
        description="covariates go straight to D (paper), or through a vector of G (released)",
    )
    leak: float = Field(
        default=0.0, ge=0, lt=1, description="gradient of the relu head where its output is zero"
    )
    anchor: Literal["none", "control"] = Field(
        default="none",
        description="cells are made from noise (paper), or as changes to the control cell at their place",
    )
    dose: Literal["label", "sum", "concat"] = Field(
        default="label",
        description="part of the label, or a learned vector added to (paper) or beside (released) the agent's frozen "
        "one; without frozen vectors always part of the label",
    )
    control_embedding: Literal["mean", "scalar"] = Field(
        default="mean",
        description="semantic vector of the control: mean of the table (paper), or its scalar mean (released)",
    )
    combination: Literal["mean", "sum"] = Field(
        default="mean", description="semantic vector of several agents together"
    )
    combination_separator: str = Field(
        default="+", description="between the agents of a combination, e.g. 'IFNG+TNF'; empty: none"
    )
    missing_embedding: Literal["error", "mean"] = Field(
        default="error", description="a label that a semantic table lacks: refuse, or take the table's mean"
    )
    projection_width: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="length of the vector of covariate_projection 'genes'; none: the number of genes",
    )
    initialisation: Literal["small", "released"] = Field(
        default="small",
        description="learned vectors that stand for nothing start small, or as in the released code",
    )


class ScheduleConfig(Section):
    """Variance-preserving noise schedule."""

    num_steps: int = Field(default=1000, le=10**5, ge=2, description="T")
    kind: Literal["linear"] = Field(default="linear", description="betas from 1e-4 to 0.02 (for T = 1000)")


class LossConfig(Section):
    """Energy-distance MMD plus mean squared error, both in model units."""

    mmd_weight: float = Field(default=1.0, ge=0)
    mmd_factor: Literal["paper", "half"] = Field(
        default="paper", description="2E|x-y|-E|x-x'|-E|y-y'| (paper) or half of it (released)"
    )
    mmd_statistic: Literal["V", "U", "cross"] = Field(
        default="V",
        description="pairs within a set with (V) or without (U) self-pairs, or only across twin sets (cross)",
    )
    mse_weight: float = Field(default=1.0, ge=0)
    mse_reduction: Literal["sum", "mean"] = Field(default="mean", description="over genes")


class TrainConfig(Section):
    """Optimisation, cell sets and checkpoints (App. Training Details)."""

    max_steps: int = Field(default=20000, ge=1)
    set_size: int = Field(default=256, le=10**5, ge=2, description="m, cells in a set")
    sets_per_step: int = Field(
        default=8, le=10**5, ge=1, description="B, sets in an optimiser step over all ranks"
    )
    learning_rate: float = Field(default=2e-4, le=10, gt=0)
    warmup_steps: int = Field(default=200, ge=0)
    plateau_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="share of the steps at full rate after warm-up"
    )
    final_rate: float = Field(
        default=0.1, ge=0, le=1, description="floor of the cosine, share of the learning rate"
    )
    betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    ema_every: int = Field(default=10, ge=1)
    drop_covariates: float = Field(default=0.1, ge=0, le=1, description="p_drop of classifier-free guidance")
    drop_per: Literal["set", "step"] = Field(
        default="set", description="one coin per set or per optimiser step"
    )
    self_condition: float = Field(default=0.5, ge=0, le=1, description="p_sc")
    control_targets: bool | Literal["perturbed"] = Field(
        default=False,
        description="control sets are targets too, with the control label; perturbed: those alone that perturbed "
        "training cells are matched to",
    )
    zero_control: bool = Field(default=False, description="marginal pretraining: the control stream is zero")
    valid_every: int = Field(default=2000, ge=1, description="steps between validations")
    valid_sets: int = Field(
        default=32, le=10**6, ge=1, description="at most this many validation sets, fixed over the run"
    )
    checkpoint_every: int = Field(default=1000, ge=1, description="steps between resumable checkpoints")
    log_every: int = Field(default=50, ge=1)
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    valid_metric: Literal["energy", "r2", "pdcorr", "loss"] = Field(
        default="energy",
        description="choose the best step by energy distance, R² or Pearson of changes of sampled cells, or by loss",
    )
    valid_steps: int = Field(
        default=4, ge=1, description="reverse steps of the samples that validation draws"
    )
    memory_gib: float = Field(
        default=8.0,
        ge=0,
        description="stores up to this size are held in memory, larger ones read in windows",
    )
    statistics_cells: int = Field(
        default=500_000,
        ge=1,
        description="training cells looked at for the unit, the detection limit and the maxima",
    )
    stop_margin: float = Field(
        default=120.0, ge=0, description="seconds before the allocation's end to stop with a checkpoint"
    )
    max_epochs: float | None = Field(
        default=None,
        gt=0,
        description="end after so many passes over the training cells, if that is before max_steps",
    )
    min_steps: int = Field(
        default=0, ge=0, description="steps to take even if max_epochs ends before; never more than max_steps"
    )
    time_power: float = Field(
        default=1.0,
        ge=1,
        description="noise levels t = T·u^(1/power) for uniform u: 1 uniform (paper), more: higher noise",
    )
    cells_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of each perturbation's training cells that are used (few-shot)",
    )
    store_weights: Literal["cells", "equal"] | tuple[float, ...] = Field(
        default="cells", description="how often each store of a pretraining is drawn from"
    )
    choose: Literal["validation", "first-epoch", "last"] = Field(
        default="validation",
        description="weights of the bundle: best by validation (else last), end of the first epoch, or last",
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="keep a whole bundle every so many steps, in the bundle's folder 'steps'",
    )
    accumulate: int = Field(
        default=1, ge=1, description="forward passes an optimiser step is computed in, to save memory"
    )
    compile: bool = Field(default=False, description="torch.compile the network")
    checkpoint_activations: bool = Field(
        default=False, description="recompute the blocks' activations in the backward pass, to save memory"
    )
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        default=("tensorboard",), description="beside training.csv; wandb (offline) and mlflow are extras"
    )
    loader_threads: int = Field(
        default=2,
        le=1024,
        ge=1,
        description="threads that read and prepare cells; the result does not depend on them",
    )


class SampleConfig(Section):
    """The reverse process."""

    sampler: Literal["ddim", "ddpm"] = "ddim"
    num_steps: int = Field(default=100, le=10**5, ge=1, description="K")
    start_level: int | None = Field(
        default=None,
        ge=1,
        description="the K levels are spread below this one; none: over all T (paper); released: K, the last K",
    )
    eta: float = Field(default=0.0, ge=0, le=1)
    guidance: float = Field(default=0.0, le=1000, ge=0, description="w, in noise space")
    self_condition: bool = True
    set_size: int | None = Field(
        default=None, le=10**5, ge=2, description="m when sampling; none: as trained"
    )
    controls: Literal["shuffled", "balanced"] = Field(
        default="shuffled",
        description="control cells of a condition: drawn at random, or chosen so that they stand for all of them",
    )
    zeros: Literal["predicted", "matched"] = Field(
        default="predicted",
        description="zeros as predicted, or each gene's smallest values made zero until it is so as often as in the "
        "training cells, its mean over a set kept (models with model.gate measure from where on)",
    )
    sets_per_batch: int = Field(default=8, le=10**5, ge=1)
    ddpm_variance: Literal["posterior", "beta"] = Field(
        default="posterior", description="noise of a DDPM step: of the posterior, or beta (released)"
    )
    cutoff: float = Field(default=0.0, ge=0, description="estimates below this (model units) become zero")
    arithmetic: Literal["double", "single"] = Field(
        default="double",
        description="coefficients of a reverse step from float64 tables, or rounded as in the released code",
    )
    precision: Literal["32-true", "bf16-mixed"] = Field(
        default="32-true", description="of the network's matrix products when sampling"
    )

    def check_levels(self, levels: int) -> None:
        """Refuse a reverse process that a model of so many noise levels does not allow.

        Raises
        ------
        UserError
            If more levels are to be visited than there are, or than lie below the start.
        """
        if self.num_steps > levels:
            raise UserError(f"sample.num_steps={self.num_steps} is more than the model's {levels} levels")
        if self.start_level is not None and not self.num_steps <= self.start_level <= levels:
            raise UserError(
                f"sample.start_level={self.start_level} must lie between sample.num_steps={self.num_steps} and the "
                f"model's {levels} levels"
            )


class EvaluateConfig(Section):
    """Definitions of the metrics."""

    definition: Literal["cell-eval-0.6.6", "cell-eval-0.8.2"] = "cell-eval-0.6.6"
    metrics: tuple[str, ...] = Field(
        default=(), description="metrics or their families (expression, de, count, distribution); none: all"
    )
    alpha: float = Field(default=0.05, gt=0, lt=1, description="false discovery rate of a DE gene")
    min_de: int = Field(
        default=10,
        ge=1,
        description="real DE genes from which a perturbation counts in DEOver_10 and DEPrec_10",
    )
    context_column: str | None = Field(
        default=None,
        description="obs column of the contexts scored one by one; none: cell types, if there are any",
    )
    perturbation_key: str = Field(default="perturbation", description="perturbation column of AnnData files")
    cell_type_key: str | None = Field(
        default="cell_type", description="their cell type column, if they have it"
    )
    batch_key: str | None = Field(default="batch", description="their batch column, if they have it")
    scale: Literal["declared", "log1p", "counts"] = Field(
        default="declared",
        description="what AnnData values are: as uns['perturbdiff'] says, or log1p or counts on your word",
    )
    control: str | None = Field(
        default=None, description="control label of AnnData files that do not declare theirs"
    )
    controls: Literal["real", "own"] = Field(
        default="real",
        description="controls of the predicted side: the real ones, or those of the predictions",
    )
    missing: Literal["error", "skip"] = Field(
        default="error",
        description="what to do about real conditions that an AnnData pair lacks a prediction of",
    )
    max_cells: int = Field(
        default=2000, ge=2, description="cells a side in the distances between populations of a condition"
    )
    bootstrap: int = Field(
        default=2000, le=10**6, ge=0, description="draws of perturbations for the intervals"
    )
    embed_conditions: int = Field(default=6, ge=0, description="conditions in the embedding")
    embed_cells: int = Field(
        default=300, ge=2, description="cells of each kind and condition in the embedding"
    )


class BaselineConfig(Section):
    """Methods of others, run beside the model (docs/baselines.md)."""

    settings: Literal["recommended", "quick"] = Field(
        default="recommended",
        description="hyper-parameters: as the method's authors recommend, or for minutes on a CPU",
    )
    options: dict[str, bool | int | float | str] = Field(
        default={}, description="changes to them, by the names that 'perturbdiff baseline show NAME' lists"
    )
    timeout_hours: float = Field(default=24.0, gt=0, description="after that the method has failed")


class Config(Section):
    """A complete recipe."""

    name: str = "custom"
    variant: Literal["paper", "released", "recommended", "own"] = Field(
        default="own",
        description="the reading of the method: in a recipe, its switches; here, the one that all switches agree with",
    )
    description: str = ""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
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
        """Return a changed copy, its variant derived again."""
        return super().model_copy(update=update, deep=deep)._with_its_variant()

    def _with_its_variant(self) -> Self:
        """Derive `variant` from the switches, whatever was given for it."""
        object.__setattr__(self, "variant", agreeing(self))
        return self
