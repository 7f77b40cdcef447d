"""Hints for who writes a command line: what the Tab key offers, and the examples in the help of each command.

The examples work in this order on the demo's simulated data. Files are completed by the shell itself.
"""

from __future__ import annotations


def presets(incomplete: str) -> list[str]:
    """Return the presets that begin like this; none, so that the shell offers files."""
    from importlib import resources

    files = (resources.files("perturbdiff.config") / "presets").iterdir()
    names = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return [name for name in names if name.startswith(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Return the keys of the recipe that begin like this, with the sign that follows them."""
    from perturbdiff.config.recipes import keys as all_keys

    return [f"{key}=" for key in all_keys() if f"{key}=".startswith(incomplete)]


def datasets(incomplete: str) -> list[str]:
    """Return the published data sets that begin like this."""
    from perturbdiff.datasets import registered

    return [name for name in registered() if name.startswith(incomplete)]


EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "perturbdiff simulate --out sim --cells 2000",
        "perturbdiff preprocess sim/counts.h5ad --out store",
    ),
    "run": (
        "perturbdiff run sim/counts.h5ad",
        "perturbdiff run my.h5ad --perturbation stim --control ctrl --out results",
        "perturbdiff run my.h5ad --embedding perturbation=genes.parquet",
    ),
    "init": ("perturbdiff init sim/counts.h5ad --out plan",),
    "simulate": ("perturbdiff simulate --out sim --cells 2000",),
    "preprocess": (
        "perturbdiff preprocess sim/counts.h5ad --out store",
        "perturbdiff preprocess screen.h5ad --out store --pert-col gene --control non-targeting --batch-col none",
    ),
    "split": (
        "perturbdiff split store --out split.parquet --set split.num_held_out=1",
        "perturbdiff split store --out split.parquet --set split.held_out=batch_2",
    ),
    "stats": ("perturbdiff stats store --split split.parquet --out stats",),
    "data": ("perturbdiff data list", "perturbdiff data check sim/counts.h5ad"),
    "data list": ("perturbdiff data list", "perturbdiff data list replogle"),
    "data get": (
        "perturbdiff data get norman19 --out data",
        "perturbdiff data get replogle --out data --yes",
    ),
    "data check": (
        "perturbdiff data check sim/counts.h5ad",
        "perturbdiff data check screen.h5ad --config kang18 --toml split.toml --prior prior",
        "perturbdiff data check --experiment main",
    ),
    "store": ("perturbdiff store info store",),
    "store info": ("perturbdiff store info store", "perturbdiff store info store --json"),
    "store check": ("perturbdiff store check store", "perturbdiff store check store --quick"),
    "store export": ("perturbdiff store export store --out controls.h5ad --perturbation control",),
    "vocabulary": ("perturbdiff vocabulary build study1.h5ad study2.h5ad --out vocab",),
    "vocabulary build": ("perturbdiff vocabulary build study1.h5ad study2.h5ad --out vocab --top 2000",),
    "vocabulary align": ("perturbdiff vocabulary align screen.h5ad --genes vocab --out alignment",),
    "embed": (
        "perturbdiff embed proteins.fasta --out proteins.parquet --model esm2-650m",
        "perturbdiff embed store --out genes.parquet --model co-expression",
    ),
    "import-checkpoint": ("perturbdiff import-checkpoint model.ckpt --genes genes.pkl --out bundle",),
    "pretrain": ("perturbdiff pretrain store --downstream store:split.parquet --out prior",),
    "train": (
        "perturbdiff train store --split split.parquet --out bundle",
        "perturbdiff train store --split split.parquet --out quick --config tiny --set train.max_steps=50",
    ),
    "finetune": ("perturbdiff finetune prior store --split split.parquet --out finetuned",),
    "sample": (
        "perturbdiff sample bundle store --split split.parquet --out predictions.h5ad",
        "perturbdiff sample bundle store --conditions wanted.csv --out wanted.h5ad",
        "perturbdiff sample bundle store --split split.parquet --out counts.h5ad --values counts",
    ),
    "export": (
        "perturbdiff export counts.h5ad --for cell-eval2 --genes counts.h5ad --out submission.h5ad",
        "perturbdiff export counts.h5ad --for vcc2026 --genes gene_names.csv --perturbations pert_counts.csv --dry-run",
    ),
    "baseline": (
        "perturbdiff baseline nearest-context store --split split.parquet --out nearest-context.h5ad",
        "perturbdiff baseline kernel-ridge store --split s.parquet --out o.h5ad --embedding perturbation=genes.parquet",
        "perturbdiff baseline list",
    ),
    "baseline list": ("perturbdiff baseline list",),
    "baseline show": ("perturbdiff baseline show cpa",),
    "baseline install": ("perturbdiff baseline install cpa state",),
    "baseline remove": ("perturbdiff baseline remove cpa",),
    "bundle": ("perturbdiff bundle info bundle",),
    "bundle info": ("perturbdiff bundle info bundle",),
    "bundle push": ("perturbdiff bundle push bundle my-lab/my-model",),
    "bundle pull": ("perturbdiff bundle pull my-lab/my-model --out bundle",),
    "evaluate": (
        "perturbdiff evaluate predictions.h5ad store --out metrics/perturbdiff",
        "perturbdiff evaluate theirs.h5ad real.h5ad --out metrics/theirs --pert-col gene --control ctrl --scale log1p",
        "perturbdiff evaluate predictions.h5ad store --out metrics/perturbdiff --replicate-col donor",
        "perturbdiff evaluate counts.h5ad real.h5ad --out metrics/other --definition cell-eval2 --ends metrics/one",
    ),
    "ceiling": (
        "perturbdiff ceiling store --split split.parquet --out metrics/ceiling",
        "perturbdiff ceiling store --split split.parquet --out metrics/mean --reference perturbed_mean",
    ),
    "calibrate": (
        "perturbdiff calibrate store --split split.parquet --out calibration",
        "perturbdiff evaluate predictions.h5ad store --out metrics/calibrated --calibration calibration",
    ),
    "adversaries": ("perturbdiff adversaries store --split split.parquet --out adversaries",),
    "merge": ("perturbdiff merge part0 part1 --out metrics/whole",),
    "report": ("perturbdiff report metrics/perturbdiff metrics/ceiling --out report.html",),
    "doctor": ("perturbdiff doctor", "perturbdiff doctor --folder results --json"),
    "config": ("perturbdiff config show",),
    "config show": (
        "perturbdiff config show",
        "perturbdiff config show recommended --set train.max_steps=500",
    ),
    "config schema": ("perturbdiff config schema",),
}
