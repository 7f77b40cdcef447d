"""The settings for data: columns and preprocessing, splits, simulation."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

LARGEST_SEED = (1 << 32) - 1  # accepted by every library
LARGEST_NUMBER = 10**10


def _label(value: Any) -> Any:
    """Return a label as the text that data have for it: 3 and 3.0 are '3', as in `perturbdiff.io.columns`."""
    if isinstance(value, bool):
        raise PydanticCustomError(
            "truth_value",
            "yes, no, on, off, true and false are truth values in YAML; put this name in quotes, on the command line "
            "in quotes of both kinds, as in --set \"data.control='off'\"",
        )
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | float | date) else value


def _several(value: Any) -> Any:
    """Return one label as a list of it."""
    return [value] if isinstance(value, str | int | float | date) else value


def none(value: Any) -> Any:
    """Return None for the word none, as in a YAML file null."""
    return None if value in ("none", "None") else value


Label = Annotated[str, BeforeValidator(_label)]
"""A label or the name of a column. A number stands for its text."""
Column = Annotated[Label | None, BeforeValidator(none)]
"""The name of a column; none or null: there is none."""
FileName = Annotated[Column, "file"]
"""A file; the workflow brings it where a task runs, or has a column of the sheet for it."""
Labels = Annotated[tuple[Label, ...], BeforeValidator(_several)]
"""Several labels or names. One alone needs no list."""


class Section(BaseModel):
    """One section of the configuration. It is immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _within_reach(cls, value: Any) -> Any:
        """Refuse absurdly large numbers. Fields that cost memory have lower limits of their own."""
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and abs(number) > LARGEST_NUMBER:
                raise PydanticCustomError(
                    "out_of_reach",
                    "input should be between -{largest} and {largest}",
                    {"largest": LARGEST_NUMBER},
                )
        return value


class DataConfig(Section):
    """The meaning of the input's columns, and how counts become a store."""

    perturbation_key: Column = Field(
        default="perturbation",
        description="obs column with the perturbation label; none: all cells are unperturbed",
    )
    control: Label = Field(
        default="control", description="label of the control cells in the perturbation column"
    )
    cell_type_key: Column = Field(
        default="cell_type", description="obs column with the cell type; none: one type"
    )
    batch_key: Column = Field(
        default="batch", description="obs column with the batch or donor; none: one batch"
    )
    set_key: Column = Field(
        default=None,
        description="obs column that says which cells were a set: a well, plate, guide or replicate. The model is "
        "never told it (docs/family.md); none: unknown",
    )
    random_batches: int | None = Field(
        default=None,
        ge=2,
        le=100,
        description="without a batch column: number of batches into which cells are divided at random, so that some "
        "cells can be held out where there is no batch and no cell type; none: one batch",
    )
    missing_labels: Literal["error", "drop"] = Field(
        default="error",
        description="what to do with cells that have no perturbation, cell type or batch: stop with an error, or drop "
        "and count them",
    )
    keep: Column = Field(
        default=None,
        description="keep only the cells of which this is true: comparisons of obs columns with texts and numbers by "
        "==, !=, <, <=, >, >=, in and not in, joined by and, or, not, as in pass_filter == 'full'; none: all cells",
    )
    dose_key: Column = Field(
        default=None, description="obs column with the dose, which is joined to the label as 'drug@dose'"
    )
    extra_obs: Labels = Field(
        default=(), description="further obs columns to keep (e.g. to choose held-out conditions by)"
    )
    layer: str = Field(
        default="X",
        description="where the values are stored: X, raw, the name of a layer, or obsm/NAME (genes: var['"
        "highly_variable'] or uns['NAME_genes'])",
    )
    input_scale: Literal["counts", "log1p", "normalised"] = Field(
        default="counts",
        description="units of the values; normalised: scaled to one total in each cell, without logarithm, which is "
        "taken when they are read",
    )
    min_counts: int = Field(default=0, ge=0, description="drop cells with fewer counts")
    min_genes: int = Field(default=0, ge=0, description="drop cells with fewer detected genes")
    target_sum: float | Literal["median"] = Field(
        default="median",
        description="depth to which every cell is scaled; 'median' as in scanpy's normalize_total",
    )
    scale: float = Field(default=10.0, gt=0, description="the model works on log1p values divided by this")
    num_hvgs: Annotated[int | None, BeforeValidator(none)] = Field(
        default=2000, ge=1, description="number of highly variable genes to keep; none: all genes"
    )
    hvg_flavor: Literal["seurat", "cell_ranger", "seurat_v3"] = Field(
        default="seurat", description="scanpy's flavor for selecting highly variable genes"
    )
    hvg_by_batch: bool = Field(
        default=False, description="select genes per batch and combine them (scanpy's batch_key)"
    )
    hvg_cells: Literal["all", "train"] = Field(default="all", description="cells used to select genes")
    gene_key: Column = Field(
        default=None,
        description="var column with the gene names (ids or symbols); none: the index of var",
    )
    duplicate_genes: Literal["error", "sum", "first"] = Field(
        default="error",
        description="genes of one file that have the same name: stop with an error, add up their counts, or take the "
        "first of them",
    )
    gene_aliases: FileName = Field(
        default=None,
        description="CSV file with the columns alias, symbol: genes that have an alias as their name get the symbol; "
        "none: names stay",
    )
    join_genes: Literal["intersection", "union"] = Field(
        default="intersection",
        description="genes of several inputs: those in all files, or those in any file (counts are 0 where a file "
        "lacks a gene)",
    )
    knockdown: bool = Field(
        default=False,
        description="for CRISPRi, keep only perturbations and cells whose target gene is knocked down",
    )
    knockdown_gene_key: Column = Field(
        default=None,
        description="obs column with the target gene; none: the perturbation's label is the gene",
    )
    knockdown_residual: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="maximum mean expression of the target in a perturbation, relative to the controls",
    )
    knockdown_cell_residual: float = Field(
        default=0.5,
        gt=0,
        description="maximum expression of the target in a cell, relative to the mean of the controls",
    )
    knockdown_min_cells: int = Field(
        default=30, ge=1, description="drop a perturbation with fewer cells left"
    )
    knockdown_by: Literal["all", "cell_type"] = Field(
        default="all",
        description="compare with the controls over all cells (as STATE does), or within each cell type",
    )
    knockdown_values: Literal["normalised", "stored"] = Field(
        default="normalised",
        description="values to compare: counts per 10,000 without logarithm, or the values as stored",
    )

    @property
    def unit(self) -> Literal["counts", "log1p"]:
        """What values are once they were read: normalised ones have become log1p."""
        return "counts" if self.input_scale == "counts" else "log1p"

    @property
    def files(self) -> dict[str, Path]:
        """The files that these settings name, by their role among a stage's inputs."""
        return {} if self.gene_aliases is None else {"gene aliases": Path(self.gene_aliases)}

    def recorded(self) -> dict[str, Any]:
        """Return the settings for a record, without later ones that are not used, so that older records stay equal."""
        later = ("set_key", "keep", "duplicate_genes")
        unused = {name for name in later if getattr(self, name) == type(self).model_fields[name].default}
        unused.add("gene_aliases")  # recorded as an input, by its content
        return self.model_dump(mode="json", exclude=unused)


class SplitConfig(Section):
    """The rules that choose held-out conditions. A STATE-style TOML replaces them."""

    context_column: Label = Field(default="batch", description="obs column whose values are held out")
    held_out: Labels = Field(default=(), description="contexts to hold out by name")
    num_held_out: int = Field(default=0, ge=0, description="number of contexts to choose if none is named")
    choose: Literal["random", "pca"] = Field(
        default="random",
        description="how contexts are chosen: at random, or spread over PCA clusters of their mean profiles",
    )
    train_fraction: float = Field(
        default=0.3, ge=0, le=1, description="share of a held-out context's perturbations that go to training"
    )
    valid_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share of a held-out context's remaining perturbations that go to validation",
    )
    valid_contexts: Labels = Field(
        default=(),
        description="names of contexts in which the held-out perturbations are used for validation",
    )
    perturbations: Labels = Field(default=(), description="perturbations that may be held out; empty: all")
    missing: Literal["error", "warn"] = Field(
        default="error",
        description="what to do with labels that are to be held out but have no cells: stop with an error that names "
        "all of them, or leave them out and say so",
    )


class SimulateConfig(Section):
    """A simulated experiment with known effects, calibrated on real screens (docs/simulation.md)."""

    cells: int = Field(default=8000, le=10**9, ge=1, description="total number of cells")
    genes: int = Field(default=900, le=10**6, ge=2, description="number of measured genes")
    cell_types: int = Field(default=3, le=10**4, ge=1, description="number of cell types")
    batches: int = Field(default=2, le=10**4, ge=1, description="number of batches")
    knockdowns: int = Field(
        default=12,
        le=10**6,
        ge=0,
        description="number of knock-downs; each is named after the measured gene that it knocks down",
    )
    drugs: int = Field(default=2, le=10**6, ge=0, description="number of drugs; each is given at every dose")
    doses: tuple[float, ...] = Field(default=(0.1, 1.0, 10.0), description="doses of each drug (positive)")
    cytokines: int = Field(default=2, le=10**6, ge=0, description="number of cytokines")
    control_fraction: float = Field(default=0.15, gt=0, lt=1, description="share of cells that are controls")
    size_spread: float = Field(default=0.6, ge=0, description="SD of the log size of conditions")
    tiny_fraction: float = Field(
        default=0.03, ge=0, le=1, description="share of conditions with only 1 to 5 cells"
    )
    counts_per_gene: float = Field(default=0.9, gt=0, description="median depth of a cell / number of genes")
    depth_spread: float = Field(default=0.45, ge=0, description="SD of the log depth of cells")
    mean_spread: float = Field(default=1.5, ge=0, description="SD of the genes' log mean expression")
    mean_skew: float = Field(default=0.6, ge=0, description="skewness of the genes' log mean expression")
    dispersion: float = Field(default=0.07, ge=0, description="NB dispersion of well expressed genes")
    dispersion_low: float = Field(
        default=0.08,
        ge=0,
        description="additional dispersion of a gene with mean count 1; it scales as 1/mean",
    )
    dispersion_spread: float = Field(
        default=0.7, ge=0, description="SD of the genes' log dispersion about that trend"
    )
    cell_type_spread: float = Field(
        default=0.5, ge=0, description="SD of a cell type's log expression about the mean"
    )
    batch_spread: float = Field(default=0.12, ge=0, description="SD of a batch's shift of log expression")
    cell_programmes: int = Field(
        default=5, le=10**4, ge=0, description="number of gene activities that differ from cell to cell"
    )
    cell_spread: float = Field(
        default=0.3, ge=0, description="SD of the strongest activity's effect on its genes"
    )
    programmes: int = Field(
        default=8, le=10**4, ge=1, description="number of response programmes that perturbations share"
    )
    programme_share: float = Field(
        default=0.12, gt=0, le=1, description="share of genes in a response programme"
    )
    effect_size: float = Field(
        default=1.3, ge=0, description="RMS log fold change of a programme's genes in knock-downs"
    )
    effect_spread: float = Field(default=0.4, ge=0, description="SD of the log strength of perturbations")
    specificity: float = Field(
        default=0.2, ge=0, le=1, description="share of an effect's variance that belongs to the cell type"
    )
    private_share: float = Field(
        default=0.15, ge=0, le=1, description="share of an effect's variance outside programmes"
    )
    escape: float = Field(
        default=0.1, ge=0, lt=1, description="share of knock-down cells that do not respond"
    )
    wells: int = Field(
        default=4,
        le=10**4,
        ge=1,
        description="number of sets (wells) of each condition; each has its own latent factor",
    )
    latent_strength: float = Field(
        default=0.25, ge=0, description="SD of the strength of the response between sets"
    )
    latent_shift: float = Field(
        default=0.1, ge=0, description="SD of a shift common to all cells of a set, controls included"
    )
    context_depth_spread: float = Field(
        default=0.15, ge=0, description="SD of the log median depth between contexts"
    )
    vector_quality: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="also write vectors of the perturbations, whose numbers correlate this much with the true effects "
        "(1: perfect, 0: useless); none: no vectors",
    )
