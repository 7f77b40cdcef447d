"""STATE, the transition model of arc-state (docs/adapters.md).

The steps of `state tx train` and `state tx infer` by way of the package's own configuration, data module and model,
in one process. Three things differ from the two commands:

- `infer` draws controls itself; here each cell to predict starts from its matched control cell.
- `infer` cuts the cells of a condition into sets of the trained size and a rest, which may be a single cell; here
  into sets of nearly equal size.
- Nothing is validated, because no other cells than the training cells are given. That changes no prediction: `infer`
  takes the last weights ("final.ckpt"), not those of the best validation.

Labels are replaced by codes, as the model knows only their one-hot code: no label can meet the meaning that it has in
the tool's configuration files.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
from perturbdiff_adapter import Task, open_task

CELLS, SPLIT = "state_cells", "state_split.toml"
"""Names in the task folder; relative, so that no character of its path is read as a pattern."""

EMBEDDING = "X_hvg"
"""Name by which the tool knows expression as input and output."""

LARGEST_VALUE = 14.0
"""`infer` clips log1p values to 0..14."""

MOST_WORKERS = 12
"""The tool's own number of processes that load cells."""

_COLUMNS = ("perturbation", "cell_type", "batch")
_REPORTS = 100


def main() -> None:
    """Train on the training cells, predict the queries."""
    task = open_task()
    _stay_in(task.folder)
    check(task)
    code = codes(task)
    with task.phase("import"):
        import state.tx.utils  # noqa: F401  # with torch and transformers: seconds that are no training
    with task.phase("train"):
        write_cells(task, code)
        model, one_hot = train(task, code)
    with task.phase("predict"):
        values = predict(task, model, {label: one_hot[name] for label, name in code["perturbation"].items()})
    task.note(from_control_row=True)
    task.write(values)


def check(task: Task) -> None:
    """Refuse what the model cannot do: unseen perturbations, settings that do not fit together."""
    task.require_seen()
    settings = task.settings
    small = [
        name for name in ("max_steps", "batch_size", "num_hidden_layers", "hidden_dim") if settings[name] < 1
    ]
    if small:
        task.refuse(f"{small[0]} is {settings[small[0]]}; it must be at least 1")
    if settings.cell_set_len < 2:
        task.refuse(f"cell_set_len is {settings.cell_set_len}; a set needs at least 2 cells")
    if settings.num_attention_heads < 1 or settings.hidden_dim % settings.num_attention_heads:
        task.refuse(
            f"hidden_dim {settings.hidden_dim} cannot be divided among num_attention_heads "
            f"{settings.num_attention_heads}; choose a multiple"
        )
    if settings.basal_mapping_strategy not in ("random", "batch"):
        task.refuse(
            f"basal_mapping_strategy is '{settings.basal_mapping_strategy}'; it must be 'random' or 'batch'"
        )


def codes(task: Task) -> dict[str, dict[str, str]]:
    """Return the code of each label of the training cells, by column; codes sort like the labels."""
    found = {}
    for column in _COLUMNS:
        labels = sorted(set(task.labels(column)))
        found[column] = {label: f"{column}{i:06d}" for i, label in enumerate(labels)}
    return found


def usable(task: Task) -> np.ndarray:
    """Return the training rows with a control of their cell type, int64 [n].

    For others cell-load takes a cell without any expression as the control, silently.
    """
    cell_type = task.labels("cell_type")
    has_control = set(cell_type[task.labels("perturbation") == task.control])
    keep = np.isin(cell_type.astype(str), sorted(has_control))
    if not keep.all():
        task.note(training_cells_without_control=int((~keep).sum()))
        print(f"{int((~keep).sum())} training cells of cell types without controls are left out", flush=True)
    return np.flatnonzero(keep)


def write_cells(task: Task, code: Mapping[str, Mapping[str, str]]) -> None:
    """Write the training cells as the tool reads them, and the file that says that all are for training."""
    rows = usable(task)
    obs = pd.DataFrame(
        {name: pd.Categorical(pd.Series(task.labels(name)[rows]).map(code[name])) for name in _COLUMNS},
        index=pd.Index([f"cell{i}" for i in rows]),
    )
    expression = task.dense(rows)
    cells = anndata.AnnData(sp.csr_matrix(expression.shape, dtype=np.float32), obs=obs)
    cells.obsm[EMBEDDING] = expression
    folder = task.folder / CELLS
    folder.mkdir(exist_ok=True)
    cells.write_h5ad(folder / "cells.h5ad")
    split = f'[datasets]\ncells = "{CELLS}"\n\n[training]\ncells = "train"\n'
    (task.folder / SPLIT).write_text(split)
    task.note(training_cells=len(rows))


def changes(task: Task, control: str) -> dict[str, Any]:
    """Return what differs from the tool's published configuration, by its name there."""
    settings = task.settings
    data = {
        "toml_config_path": SPLIT,
        "embed_key": EMBEDDING,
        "output_space": "gene",
        "pert_col": "perturbation",
        "cell_type_key": "cell_type",
        "batch_col": "batch",
        "control_pert": control,
        "basal_mapping_strategy": settings.basal_mapping_strategy,
        "random_seed": task.seed,
        "barcode": False,
        # on a CPU loading in the same process keeps to the threads that were asked for
        "num_workers": min(task.threads - 1, MOST_WORKERS) if task.device == "cuda" else 0,
    }
    training = {name: settings[name] for name in ("max_steps", "batch_size", "lr")}
    training["train_seed"] = task.seed
    backbone = {
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_attention_heads,
        "head_dim": settings.hidden_dim // settings.num_attention_heads,
        "intermediate_size": settings.intermediate_size,
    }
    model = {name: settings[name] for name in ("cell_set_len", "hidden_dim")}
    # a decoder from embeddings to genes, never trained nor used where the input is expression
    model["gene_decoder_bool"] = False
    return {
        **{f"data.kwargs.{name}": value for name, value in data.items()},
        **{f"training.{name}": value for name, value in training.items()},
        **{f"model.kwargs.{name}": value for name, value in model.items()},
        **{f"model.kwargs.transformer_backbone_kwargs.{name}": value for name, value in backbone.items()},
    }


def train(task: Task, code: Mapping[str, Mapping[str, str]]) -> tuple[Any, dict[str, Any]]:
    """Fit the model, as `state tx train` does.

    Returns
    -------
    model
        The fitted LightningModule, in evaluation mode, on the task's device.
    one_hot
        Tensor float32 [n_perturbations] of each perturbation's code.
    """
    import lightning.pytorch as lightning
    import torch
    from cell_load.utils.modules import get_datamodule
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from state.tx.utils import get_lightning_module

    config = _configuration(changes(task, code["perturbation"][task.control]))
    fit = config["training"]
    torch.set_num_threads(task.threads)
    torch.set_float32_matmul_precision("medium")
    lightning.seed_everything(task.seed, verbose=False)
    arguments = (config["data"]["kwargs"], fit["batch_size"], config["model"]["kwargs"]["cell_set_len"])
    data = get_datamodule(config["data"]["name"], *arguments)
    data.setup(stage="fit")
    sizes = data.get_var_dims()
    parts = (config["data"]["kwargs"], config["model"]["kwargs"], fit)
    model = get_lightning_module(config["model"]["name"], *parts, sizes)
    trainer = lightning.Trainer(
        accelerator="gpu" if task.device == "cuda" else "cpu",
        devices=1,
        max_steps=fit["max_steps"],
        gradient_clip_val=fit["gradient_clip_val"],
        callbacks=[_reporter(task, fit["max_steps"])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        default_root_dir=task.folder,
        # without it Lightning takes a Slurm job's number of tasks for its own
        plugins=[LightningEnvironment()],
    )
    trainer.fit(model, datamodule=data)
    if trainer.global_step != fit["max_steps"]:
        raise SystemExit(
            f"{task.method}: the training ended at step {trainer.global_step} of {fit['max_steps']}"
        )
    task.note(
        steps=trainer.global_step,
        cells_seen=trainer.global_step * fit["batch_size"] * config["model"]["kwargs"]["cell_set_len"],
        parameters=sum(one.numel() for one in model.parameters() if one.requires_grad),
        device=task.device,
    )
    torch.set_float32_matmul_precision("highest")
    return model.eval().to(task.device), dict(data.pert_onehot_map)


def sets(queries: pd.DataFrame, length: int, columns: list[str], seed: int) -> list[np.ndarray]:
    """Cut the cells to predict into sets like those of the training.

    Parameters
    ----------
    queries
        As in `Task`.
    length
        Largest set.
    columns
        The cells of a set share these labels.
    seed
        Cells of a group fall into its sets at random.

    Returns
    -------
    list of numpy.ndarray
        int64 rows of the queries, each row once; the sizes of a group's sets differ by at most one.
    """
    rng = np.random.default_rng(seed)
    found = []
    for rows in queries.groupby(columns, sort=True, observed=True).indices.values():
        found += np.array_split(rng.permutation(rows), -(-len(rows) // length))
    return found


def predict(task: Task, model: Any, one_hot: Mapping[str, Any]) -> np.ndarray:
    """Predict the cells from their matched controls.

    Returns
    -------
    numpy.ndarray
        float32 [n_queries, G], log1p.
    """
    import torch

    # as in training: with 'random' the sets of a condition mix batches, with 'batch' they do not
    columns = ["perturbation", "cell_type"]
    columns += ["batch"] if task.settings.basal_mapping_strategy == "batch" else []
    control = task.queries["control_row"].to_numpy(np.int64)
    perturbation = task.queries["perturbation"].to_numpy(object)
    values = np.empty((len(task.queries), len(task.genes)), dtype=np.float32)
    done = 0
    for rows in sets(task.queries, task.settings.cell_set_len, columns, task.seed):
        label = perturbation[rows[0]]
        batch = {
            "ctrl_cell_emb": torch.from_numpy(task.dense(control[rows])).to(task.device),
            "pert_emb": one_hot[label].float().repeat(len(rows), 1).to(task.device),
            "pert_name": [label] * len(rows),
        }
        with torch.no_grad():
            found = model.predict_step(batch, batch_idx=0, padded=False)["preds"]
        values[rows] = found.clamp(0.0, LARGEST_VALUE).cpu().numpy()
        done += len(rows)
        task.progress(done, len(values), "cells predicted")
    return values


def _configuration(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published configuration of model=state with changes."""
    from omegaconf import OmegaConf
    from state.__main__ import load_hydra_config

    config = load_hydra_config("tx", ["model=state"])
    for name, value in changed.items():
        OmegaConf.update(config, name, value, force_add=True)
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def _reporter(task: Task, steps: int) -> Any:
    """Return the callback that tells the progress, remembers losses, and ends a training that diverged."""
    from lightning.pytorch.callbacks import Callback

    every = max(1, steps // _REPORTS)

    class Reporter(Callback):
        def __init__(self) -> None:
            self.total, self.curve = 0.0, []

        def on_train_start(self, trainer: Any, module: Any) -> None:
            # Lightning's own handler waits for the batch and ends the process with exit code 0
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.total = self.total + outputs["loss"].detach()
            step = trainer.global_step
            if step % every and step != steps:
                return
            loss = float(self.total) / (step - (self.curve[-1][0] if self.curve else 0))
            if not np.isfinite(loss):
                raise SystemExit(f"{task.method}: the training diverged: the loss is {loss} at step {step}")
            self.total = 0.0
            self.curve.append((step, round(loss, 5)))
            task.note(loss_first=self.curve[0][1], loss_last=loss, losses=self.curve)
            task.progress(step, steps, f"training steps, loss {loss:.4g}")

    return Reporter()


def _stay_in(folder: Path) -> None:
    """Keep the tool's libraries from the network and from writing outside the folder."""
    os.chdir(folder)
    cache = str(folder / "state_cache")
    os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")
    os.environ.update(HF_HOME=cache, TORCHINDUCTOR_CACHE_DIR=cache)


if __name__ == "__main__":
    main()
