"""Every number of the paper's text (App. Training Details) and of the released code's command lines, typed again."""

import pytest

from perturbdiff.config import recipes

TAHOE_CONTROL = "[('DMSO_TF', 0.0, 'uM')]"
TAHOE_LINES = ("CVCL_1097", "CVCL_1285", "CVCL_1098", "CVCL_0334", "CVCL_0480")
DONORS = ("Donor1", "Donor4", "Donor9", "Donor12")

PAPER = {
    "schedule.num_steps": 1000, "schedule.kind": "linear",
    "data.scale": 10, "data.target_sum": "median", "data.num_hvgs": 2000,
    "train.betas": (0.9, 0.98), "train.weight_decay": 1e-2, "train.learning_rate": 2e-4,
    "train.warmup_steps": 200, "train.final_rate": 0.1, "train.plateau_fraction": 0, "train.clip_norm": 1,
    "train.ema_decay": 0.99, "train.ema_every": 10, "train.max_steps": 20_000, "train.valid_every": 2000,
    "train.choose": "validation", "train.zero_control": False, "train.time_power": 1,
    "loss.mmd_weight": 1, "loss.mse_weight": 1, "loss.mmd_factor": "paper", "loss.mmd_statistic": "V",
    "loss.mse_reduction": "mean",  # docs/methods.md: under the formula's sum the text's own remark would be wrong
    "sample.sampler": "ddim", "sample.num_steps": 100, "sample.eta": 0, "sample.start_level": None,
    "sample.self_condition": True, "sample.cutoff": 0,
    "model.mlp_branch": "sequential", "model.fusion": "concat", "model.covariate_projection": "width",
    "model.gene_embedding": "shared", "model.head": "relu", "model.dose": "sum",
    "model.control_embedding": "mean", "model.clip": False,
}  # fmt: skip
RELEASED = {
    "seed": 42,
    "schedule.num_steps": 1000, "schedule.kind": "linear",
    "data.scale": 10, "data.num_hvgs": 2000,
    "model.width": 512, "model.depth": 8, "model.heads": 8, "model.mlp_ratio": 4, "model.covariate_width": 128,
    "model.mlp_branch": "parallel", "model.fusion": "sum", "model.covariate_projection": "genes",
    "model.gene_embedding": "shared", "model.head": "relu", "model.dose": "concat",
    "model.control_embedding": "scalar", "model.clip": False,
    "train.betas": (0.9, 0.98), "train.weight_decay": 0.01, "train.learning_rate": 2e-4,
    "train.warmup_steps": 200, "train.final_rate": 0.1, "train.plateau_fraction": 0.1, "train.clip_norm": 1,
    "train.max_steps": 200_000, "train.ema_decay": 0.99, "train.ema_every": 10,
    "train.set_size": 256, "train.sets_per_step": 4 * 2048 // 256,
    "train.drop_covariates": 0.5, "train.drop_per": "step", "train.self_condition": 0.5,
    "train.control_targets": False, "train.zero_control": False, "train.precision": "32-true",
    "train.keep_every": 10_000, "train.valid_metric": "loss", "train.valid_sets": 5 * 4 * 8,
    "loss.mmd_weight": 1, "loss.mse_weight": 1, "loss.mmd_factor": "half", "loss.mse_reduction": "mean",
    "sample.sampler": "ddim", "sample.num_steps": 100, "sample.start_level": 100, "sample.eta": 0,
    "sample.guidance": 1, "sample.self_condition": True, "sample.cutoff": 1e-4,
    "sample.ddpm_variance": "beta", "sample.arithmetic": "single",
}  # fmt: skip
PBMC = {
    "data.perturbation_key": "cytokine", "data.control": "PBS", "data.cell_type_key": "cell_type",
    "data.batch_key": "donor", "split.context_column": "batch", "split.held_out": DONORS,
}  # fmt: skip
TAHOE = {
    "data.perturbation_key": "drugname_drugconc", "data.control": TAHOE_CONTROL,
    "data.cell_type_key": "cell_line", "data.batch_key": "plate",
    "split.context_column": "cell_type", "split.held_out": TAHOE_LINES,
}  # fmt: skip
REPLOGLE = {
    "data.perturbation_key": "gene", "data.control": "non-targeting", "data.cell_type_key": "cell_line",
    "data.batch_key": "gem_group", "split.context_column": "cell_type", "split.held_out": ("hepg2",),
    "data.input_scale": "log1p",
    "train.learning_rate": 2e-3, "train.set_size": 32, "train.sets_per_step": 4 * 128 // 32,
}  # fmt: skip
LOG1P = {"data.input_scale": "log1p"}
PRETRAIN = {
    "data.num_hvgs": 12_626, "train.zero_control": True, "train.control_targets": True,
    "train.choose": "first-epoch", "train.keep_every": 1000,
}  # fmt: skip
EXPECTED = {
    "paper": PAPER,
    "paper-pbmc": PAPER | PBMC | {"data.input_scale": "counts", "split.train_fraction": 0.3},
    "paper-tahoe100m": PAPER | TAHOE | {"data.input_scale": "counts", "split.train_fraction": 0},
    "paper-replogle": PAPER | REPLOGLE | {"split.train_fraction": 0.3},
    "paper-pretrain": PAPER | PRETRAIN,
    "released": RELEASED,
    "released-pbmc": RELEASED | PBMC | LOG1P,
    "released-tahoe100m": RELEASED | TAHOE | LOG1P,
    "released-replogle": RELEASED | REPLOGLE | {"train.valid_sets": 5 * 4 * 4},
    "released-pretrain": RELEASED | PRETRAIN | LOG1P,
    "released-finetune-pbmc": RELEASED | PBMC | LOG1P | {"data.num_hvgs": 12_626},
    "released-finetune-tahoe100m": RELEASED | TAHOE | LOG1P,
    "released-finetune-replogle": RELEASED
    | REPLOGLE
    | {"data.num_hvgs": 12_626, "train.valid_sets": 5 * 4 * 4},
}

KNOCKDOWN = ("", "_gene_key", "_residual", "_cell_residual", "_min_cells", "_by", "_values")

# Columns of the user's own file, memory, time and logs: no part of a method.
FREE = {
    *("name", "variant", "description"),
    *(f"data.{k}" for k in ("perturbation_key", "control", "cell_type_key", "batch_key", "dose_key")),
    *(
        "data.extra_obs",
        "data.layer",
        "data.missing_labels",
        "data.random_batches",
        "data.set_key",
        "data.min_counts",
        "data.min_genes",
        "data.gene_key",
        "data.gene_aliases",
        "data.join_genes",
        "data.keep",
        "data.duplicate_genes",
    ),
    *(f"data.knockdown{k}" for k in KNOCKDOWN),
    *("model.combination_separator", "model.missing_embedding", "model.projection_width"),
    *(
        f"train.{k}"
        for k in ("checkpoint_every", "log_every", "memory_gib", "statistics_cells", "stop_margin")
    ),
    *(f"train.{k}" for k in ("accumulate", "compile", "checkpoint_activations", "loggers", "loader_threads")),
    *("train.keep_every", "train.max_epochs", "train.min_steps", "sample.sets_per_batch", "sample.precision"),
    "sample.values",  # the units of the file, not the method
    *("loss.set_power", "train.set_noise"),  # for loss.mmd_statistic=set, which no preset has
}


def value(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("name", EXPECTED)
def test_the_numbers_of_a_preset(name):
    config, sources = recipes.load_with_sources(name)
    found = {key: value(config, key) for key in EXPECTED[name]}
    assert found == EXPECTED[name]
    assert not [key for key in EXPECTED[name] if sources.get(key) not in recipes.SOURCES]
    assert config.variant == name.split("-")[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_value_of_the_method_lacks_a_source(name):
    _, sources = recipes.load_with_sources(name)
    sections = ("data", "model", "schedule", "loss", "train", "sample")
    method = {key for key in set(recipes.keys()) if key.startswith(sections)}
    missing = sorted(key for key in method - FREE if sources.get(key) not in recipes.SOURCES)
    assert not missing, "give it a value with a source in the presets, or say above why it is free"


def test_every_preset_of_paper_and_released_is_here():
    assert set(EXPECTED) == {n for n in recipes.presets() if n.startswith(("paper", "released"))}


@pytest.mark.parametrize(
    ("name", "perturbations", "train", "valid", "test"),
    [
        ("released-pbmc", 90, 24, 4, 62),
        ("released-tahoe100m", 1137, 348, 54, 735),
        ("released-replogle", 1040, 312, 104, 624),
    ],
)
def test_the_split_rule_holds_out_as_many_as_the_released_lists(name, perturbations, train, valid, test):
    rule = recipes.load(name).split
    moved = round(rule.train_fraction * perturbations)  # as `data.split_rules.by_rule`
    checked = round(rule.valid_fraction * (perturbations - moved))
    assert (moved, checked, perturbations - moved - checked) == (train, valid, test)


@pytest.mark.parametrize("name", recipes.presets())
def test_a_model_without_control_cells_is_told_the_cell_type(name):
    config = recipes.load(name)
    assert not config.train.zero_control or "cell_type" in config.model.covariates
