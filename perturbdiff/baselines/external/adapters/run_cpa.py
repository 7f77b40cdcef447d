"""CPA (cpa-tools 0.8.8) in the task folder: see docs/adapters.md for the contract.

The prediction is CPA's own counterfactual: a matched control cell is encoded, the embedding of the perturbation is
added, and the decoder's mean is the predicted cell (`CPA.predict`, which the authors evaluate as well). CPA offers
no draws from its likelihood, so the predicted cells of a condition differ less than real cells do.

Labels go in as codes ("p003"), because CPA splits perturbations at "+" and joins labels with "_".
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
from perturbdiff_adapter import Task, open_task

COUNT_LOSSES = ("nb", "zinb")
LOSSES = (*COUNT_LOSSES, "gauss")
MODEL = (
    "recon_loss",
    "n_latent",
    "doser_type",
    "n_hidden_encoder",
    "n_layers_encoder",
    "n_hidden_decoder",
    "n_layers_decoder",
    "use_batch_norm_encoder",
    "use_layer_norm_encoder",
    "use_batch_norm_decoder",
    "use_layer_norm_decoder",
    "dropout_rate_encoder",
    "dropout_rate_decoder",
)
"""Settings that are arguments of `cpa.CPA`."""
PLAN = (
    "lr",
    "wd",
    "step_size_lr",
    "do_clip_grad",
    "gradient_clip_value",
    "mixup_alpha",
    "n_epochs_mixup_warmup",
    "reg_adv",
    "pen_adv",
    "n_hidden_adv",
    "n_layers_adv",
    "use_batch_norm_adv",
    "use_layer_norm_adv",
    "dropout_rate_adv",
    "adv_lr",
    "adv_wd",
    "adv_loss",
    "doser_lr",
    "doser_wd",
)
"""Settings that are arguments of CPA's training plan as they are."""
_ROWS_PER_BLOCK = 16_384
_PREDICT_BATCH = 2048  # as in the authors' tutorial; results do not depend on it


def main() -> None:
    """Train on the task's cells, predict its queries, write the predictions."""
    task = open_task()
    task.require_seen()
    _require_settings(task)
    cpa = _load_cpa(task)
    queries = known_queries(task)
    with task.phase("train"):
        cells = _cells(task, queries)
        model = _train(task, cpa, cells)
    with task.phase("predict"):
        values = _predict(task, model, cells, queries)
    task.note(from_control_row=True)
    task.write(values)


def _require_settings(task: Task) -> None:
    """Refuse what CPA cannot do, before anything is loaded."""
    loss = task.settings.recon_loss
    if loss not in LOSSES:
        task.refuse(f"recon_loss is '{loss}'; it must be one of {', '.join(LOSSES)}")
    if loss in COUNT_LOSSES and not task.has_counts:
        task.refuse(
            f"recon_loss {loss} needs raw counts, and the data set was read as log1p values: "
            "set baseline.options.recon_loss=gauss"
        )
    if task.settings.batch_size < 3:
        task.refuse(f"batch_size is {task.settings.batch_size}; it must be at least 3")
    if not 0 < task.settings.valid_fraction < 1:
        task.refuse(f"valid_fraction is {task.settings.valid_fraction}; it must lie between 0 and 1")


def _load_cpa(task: Task) -> Any:
    """Return the package, quiet and with the task's threads and device."""
    logging.disable(logging.INFO)  # Lightning and scvi-tools tell of seeds, accelerators and column names
    load_without_tkinter()
    cpa, torch = importlib.import_module("cpa"), importlib.import_module("torch")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(task.threads)
    if task.device == "cuda" and (reason := why_no_gpu(torch)):
        task.without_gpu(reason)
    return cpa


def why_no_gpu(torch: Any) -> str:
    """Return why this torch cannot use a GPU, '' if it can.

    The torch that CPA needs was built before the newest GPUs: it finds them, and fails at the first computation.
    """
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    major, minor = torch.cuda.get_device_capability()
    built = [arch[3:] for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
    if any(arch[:-1] == str(major) and int(arch[-1]) <= minor for arch in built):
        return ""
    return f"torch {torch.__version__} is built for GPUs up to sm_{built[-1]}, this one is sm_{major}{minor}"


def load_without_tkinter() -> None:
    """Let ``import cpa`` work where Python has no tkinter: the package imports a name from it and never uses it."""
    try:
        importlib.import_module("tkinter")
    except ImportError:
        stand_in = types.ModuleType("tkinter")
        stand_in.N = "n"  # type: ignore[attr-defined]
        sys.modules["tkinter"] = stand_in


def known_queries(task: Task) -> pd.DataFrame:
    """Return the queries with cell types and batches that CPA learns an embedding of.

    A cell type or batch without any training cell takes the label of the matched control cell, whose expression
    is what CPA changes. How many were changed is among the facts.

    Returns
    -------
    pandas.DataFrame
        ``task.queries``, a copy.
    """
    queries = task.queries.copy()
    controls = queries["control_row"].to_numpy(np.int64)
    for column in ("cell_type", "batch"):
        labels = task.labels(column)
        unseen = ~queries[column].isin(set(labels)).to_numpy()
        queries.loc[unseen, column] = labels[controls[unseen]]
        if unseen.any():
            task.note(**{f"queries_with_{column}_of_their_control": int(unseen.sum())})
    return queries


def _expression(task: Task, rows: np.ndarray) -> sp.csr_matrix:
    """Return what CPA's likelihood is about, counts or log1p, float32 CSR [n, G]; a block is dense at a time."""
    read = task.counts if task.settings.recon_loss in COUNT_LOSSES else task.dense
    blocks = [
        sp.csr_matrix(read(rows[first : first + _ROWS_PER_BLOCK]))
        for first in range(0, len(rows), _ROWS_PER_BLOCK)
    ]
    return sp.vstack(blocks, format="csr")


def _codes(task: Task, column: str, prefix: str) -> dict[str, str]:
    return {label: f"{prefix}{i:06d}" for i, label in enumerate(sorted(set(task.labels(column))))}


def coded_labels(task: Task, labels: pd.DataFrame) -> pd.DataFrame:
    """Return codes for labels as text: CPA gives '+' and '_' in labels meanings of its own.

    Parameters
    ----------
    task
        The task, whose training cells have all the labels.
    labels
        Columns ``perturbation, cell_type, batch``.

    Returns
    -------
    pandas.DataFrame
        The same columns, and ``dose``, '1.0' throughout.
    """
    coded = {
        column: labels[column].astype(str).map(_codes(task, column, column[0])).to_numpy(object)
        for column in ("perturbation", "cell_type", "batch")
    }
    return pd.DataFrame({**coded, "dose": "1.0"})


def split_labels(n_cells: int, fraction: float, batch_size: int, seed: int) -> np.ndarray:
    """Return 'train' or 'valid' for each cell at random.

    A batch of one cell breaks CPA's batch normalisation in training, and leaves no neighbour to its validation
    metric, which then is NaN and ends the training: sizes are chosen so that no last batch has one cell.

    Parameters
    ----------
    n_cells
        Number of cells, at least 8.
    fraction
        Share of validation cells.
    batch_size
        Cells in a batch, at least 3.
    seed
        Seed of the draw.

    Returns
    -------
    numpy.ndarray
        str [n_cells].
    """
    n_valid = max(2, round(fraction * n_cells))
    while n_valid % batch_size == 1 or (n_cells - n_valid) % batch_size == 1:
        n_valid += 1
    found = np.full(n_cells, "train", dtype=object)
    found[np.random.default_rng(seed).permutation(n_cells)[:n_valid]] = "valid"
    return found


def _cells(task: Task, queries: pd.DataFrame) -> anndata.AnnData:
    """Return the training cells and, as 'ood', one row for each condition to predict.

    CPA fixes the categories (batch, cell type, perturbation) when it is set up, so those of the queries must be
    there; their expression is that of a control cell and is never trained on.
    """
    rows = np.arange(task.train.n_obs)
    values = _expression(task, rows)
    if task.settings.recon_loss in COUNT_LOSSES:  # the logarithm of the cell's depth goes into the decoder
        kept = np.asarray(values.sum(axis=1)).ravel() > 0
        rows, values = rows[kept], values[kept]
        task.note(cells_without_counts=int((~kept).sum()))
    wanted = queries.drop_duplicates(["perturbation", "cell_type", "batch"])
    train = coded_labels(task, task.train.obs.iloc[rows])
    train["split"] = split_labels(
        len(rows), task.settings.valid_fraction, task.settings.batch_size, task.seed
    )
    ood = coded_labels(task, wanted)
    ood["split"] = "ood"
    obs = pd.concat([train, ood], ignore_index=True)
    obs.index = obs.index.astype(str)
    controls = _expression(task, wanted["control_row"].to_numpy(np.int64))
    return anndata.AnnData(
        sp.vstack([values, controls], format="csr"), obs=obs, var=pd.DataFrame(index=pd.Index(task.genes))
    )


def schedule(settings: Mapping[str, Any], n_train: int) -> dict[str, int]:
    """Return how long to train.

    CPA keeps the state of its best validation, so a training has at least one after its first epoch and does not
    go on beyond its last; with the only one at its end, it keeps its last state. Where ``max_steps`` cuts the
    training short, the two parts in which the adversary is off or weak take a quarter of it at most each.

    Parameters
    ----------
    settings
        ``epochs, max_steps, batch_size, check_val_every_n_epoch`` (0: at the end alone)``,
        n_epochs_pretrain_ae, n_epochs_adv_warmup``.
    n_train
        Number of training cells.

    Returns
    -------
    dict
        ``epochs, check_every, pretrain, warmup`` in epochs.
    """
    epochs = int(settings["epochs"])
    if settings["max_steps"] > 0:
        epochs = min(epochs, settings["max_steps"] // math.ceil(n_train / settings["batch_size"]))
    epochs = max(2, epochs)
    check_every = min(int(settings["check_val_every_n_epoch"]) or epochs, epochs)
    epochs -= epochs % check_every
    return {
        "epochs": epochs,
        "check_every": check_every,
        "pretrain": min(int(settings["n_epochs_pretrain_ae"]), epochs // 4),
        "warmup": min(int(settings["n_epochs_adv_warmup"]), epochs // 4),
    }


def _train(task: Task, cpa: Any, cells: anndata.AnnData) -> Any:
    """Return the trained model; its facts are noted."""
    settings = task.settings
    n_train = int((cells.obs["split"] == "train").sum())
    times = schedule(settings, n_train)
    cpa.CPA.setup_anndata(
        cells,
        perturbation_key="perturbation",
        control_group=_codes(task, "perturbation", "p")[task.control],
        dosage_key="dose",
        categorical_covariate_keys=["cell_type"],
        batch_key="batch" if cells.obs["batch"].nunique() > 1 else None,
        is_count_data=settings.recon_loss in COUNT_LOSSES,
        max_comb_len=1,
    )
    model = cpa.CPA(
        cells,
        split_key="split",
        train_split="train",
        valid_split="valid",
        test_split="ood",
        variational=False,
        seed=task.seed,
        **{name: settings[name] for name in MODEL},
    )
    model.train(
        max_epochs=times["epochs"],
        use_gpu=task.device == "cuda",
        batch_size=settings.batch_size,
        plan_kwargs={
            **{name: settings[name] for name in PLAN},
            "adv_steps": settings.adv_steps or None,
            "n_epochs_pretrain_ae": times["pretrain"] or None,
            "n_epochs_adv_warmup": times["warmup"] or None,
            "n_epochs_verbose": times["epochs"] + 1,
        },
        check_val_every_n_epoch=times["check_every"],
        early_stopping_patience=settings.early_stopping_patience,
        save_path=False,
        enable_progress_bar=False,
        callbacks=[_progress(task, times["epochs"])],
    )
    _note_training(task, model, times, n_train)
    return model


def _progress(task: Task, epochs: int) -> Any:
    """Return a callback that tells the parent process of each epoch."""
    lightning = importlib.import_module("pytorch_lightning.callbacks")

    def tell(trainer: Any, _plan: Any) -> None:
        loss = trainer.callback_metrics.get("recon")
        text = "epochs" if loss is None else f"epochs, reconstruction loss {float(loss):.2f}"
        task.progress(trainer.current_epoch + 1, epochs, text)

    return lightning.LambdaCallback(on_train_epoch_end=tell)


def _note_training(task: Task, model: Any, times: Mapping[str, int], n_train: int) -> None:
    """Note what the training was; end if no validation was finite, for then CPA restores the untrained state."""
    history = model.epoch_history
    metric = model.history_["cpa_metric"]["cpa_metric"].astype(float)
    metric = metric[metric.index > 0]  # CPA never keeps the state after the first epoch
    if not np.isfinite(metric.to_numpy()).any():
        raise SystemExit(f"{task.method}: the training diverged: its validation metric was never finite")
    epochs = int(model.trainer.current_epoch)
    last = {mode: history[history["mode"] == mode].iloc[-1] for mode in ("train", "valid")}
    task.note(
        epochs=epochs,
        epochs_at_most=times["epochs"],
        epochs_pretrain=times["pretrain"],
        epochs_adversary_warmup=times["warmup"],
        stopped_early=epochs < times["epochs"],
        best_epoch=int(metric.idxmax()) + 1,
        best_cpa_metric=float(metric.max()),
        train_cells=n_train,
        steps=epochs * math.ceil(n_train / task.settings.batch_size),
        loss_train=float(last["train"]["recon_loss"]),
        loss_valid=float(last["valid"]["recon_loss"]),
        r2_mean_valid=float(last["valid"]["r2_mean"]),
    )
    task.progress(epochs, epochs, "epochs, stopped early" if epochs < times["epochs"] else "epochs")


def log1p_at_depth(mean_counts: np.ndarray, depth: np.ndarray, target_sum: float) -> np.ndarray:
    """Return mean counts on the scale of the data set: log(1 + count / depth * target sum).

    Parameters
    ----------
    mean_counts
        float [n, G]: the decoder's means; they sum to the counts of the matched control cell over these genes.
    depth
        float [n]: counts of that cell over all genes, by which the data set was normalised.
    target_sum
        Counts of a normalised cell.

    Returns
    -------
    numpy.ndarray
        float32 [n, G].
    """
    scale = (target_sum / np.maximum(depth, 1.0)).astype(np.float32)
    return np.log1p(mean_counts * scale[:, None])


def _predict(task: Task, model: Any, cells: anndata.AnnData, queries: pd.DataFrame) -> np.ndarray:
    """Return the predicted cells, float32 [n_queries, G], log1p."""
    controls = queries["control_row"].to_numpy(np.int64)
    ood = cells.obs[cells.obs["split"] == "ood"]
    columns = ["perturbation", "cell_type", "batch"]
    row_of = {tuple(row): i for i, row in zip(ood.index, ood[columns].astype(str).to_numpy(), strict=True)}
    wanted = [row_of[tuple(row)] for row in coded_labels(task, queries)[columns].to_numpy()]
    positions = cells.obs.index.get_indexer(wanted)
    obs = cells.obs.iloc[positions].copy()
    obs.index = pd.Index([f"q{i}" for i in range(len(obs))])
    asked = anndata.AnnData(
        _expression(task, controls),
        obs=obs,
        var=cells.var,
        obsm={name: np.asarray(cells.obsm[name])[positions] for name in cells.obsm},
    )
    model.predict(asked, batch_size=_PREDICT_BATCH, n_samples=1)
    values = np.asarray(asked.obsm["CPA_pred"], dtype=np.float32)
    if task.settings.recon_loss in COUNT_LOSSES:
        depth = task.train.obs["n_counts"].to_numpy(np.float64)[controls]
        values = log1p_at_depth(values, depth, task.target_sum)
    if not np.isfinite(values).all():
        raise SystemExit(f"{task.method}: the training diverged: predictions are not finite")
    return np.maximum(values, 0.0, out=values)  # a Gaussian mean may lie below zero


if __name__ == "__main__":
    main()
