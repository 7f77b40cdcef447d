"""CellFlow (cellflow-tools): flow matching from control to perturbed cells, in principal components.

Runs in CellFlow's own environment, see ``tools/cellflow.yaml``. Principal components of all training cells; one-hot
perturbations; each (cell type, batch) a population whose controls flow to its perturbed cells; predicted cells are the
matched controls, moved along the learnt flow and decoded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

import anndata
import numpy as np
import pandas as pd
from cellflow_cells import (
    Components,
    Controls,
    Table,
    components,
    context_embeddings,
    filled_chunks,
    group_size,
    one_hot,
    training_table,
)
from perturbdiff_adapter import Task, open_task

_CELLS = "X_pca"
_PERTURBATION, _CONTEXT, _CONTROL = "perturbation", "population", "is_control"
_PROGRESS_LINES = 200
_LOSSES = 200  # a loss is noisy: means of so many are recorded
_CONTEXT_KINDS = ("controls", "one-hot")


def main() -> None:
    """Train and predict, see the module's text."""
    task = open_task()
    task.require_seen()
    if task.settings.context not in _CONTEXT_KINDS:
        task.refuse(f"context={task.settings.context!r} is none of {', '.join(_CONTEXT_KINDS)}")
    confine(task)
    with task.phase("train"):
        fitted = components(task.train.X, task.settings.pcs)
        cells = fitted.project(task.train.X)
        adata, embeddings = training_data(task, cells)
        model = build(task, adata, sorted(embeddings))
        fit(task, model)
    with task.phase("predict"):
        coordinates = predict(task, model, adata.uns, cells)
        values = decode(fitted, coordinates)
    task.note(pcs=cells.shape[1], variance_in_pcs=round(fitted.share, 4), from_control_row=True)
    task.write(values)


def confine(task: Task) -> None:
    """Hold JAX to the task's device and dask to one thread; must precede the import of JAX.

    Threads, and the variables of JAX on CPUs, are the parent process's (``variables.py``).
    """
    if task.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # it would be shared by all runs
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else it takes most of a GPU, whatever it needs
    os.environ["TQDM_DISABLE"] = "1"
    import dask
    import jax

    dask.config.set(scheduler="synchronous")
    device = jax.devices()[0]
    if task.device == "cuda" and device.platform != "gpu":
        task.without_gpu(
            f"JAX finds no GPU (the locked environment has JAX for CPUs; 'jax[cuda12]=={jax.__version__}' adds GPUs)"
        )
    task.note(jax_device=f"{device.platform} {device.device_kind}")


def training_data(task: Task, cells: np.ndarray) -> tuple[anndata.AnnData, dict[str, np.ndarray]]:
    """Return the tool's training data and the covariates of contexts.

    Labels are replaced by codes, which no character of a label can upset.

    Parameters
    ----------
    cells
        float32 [n_train, K]: coordinates of the training cells.

    Returns
    -------
    tuple
        AnnData of coordinates in ``obsm`` with embeddings of the labels in ``uns``; covariates by name, float32
        [n_contexts, width].
    """
    rng = np.random.default_rng(task.seed)
    labels = [task.labels(name) for name in ("cell_type", "batch")]
    is_control = task.train.obs["is_control"].to_numpy(bool)
    controls = Controls(*labels, is_control)
    table = training_table(*labels, is_control, controls, rng)
    contexts = sorted({*table.contexts, *query_contexts(task)})
    means = np.stack([cells[controls.rows(context, rng)].mean(axis=0) for context in contexts])
    embeddings = context_embeddings(task.settings.context, contexts, means)
    note_contexts(task, table, contexts)

    codes = np.asarray([contexts.index(context) for context in table.contexts])[table.context]
    perturbations = sorted(set(task.labels("perturbation")) - {task.control})
    names = {name: f"p{i:06d}" for i, name in enumerate(perturbations)} | {task.control: "control"}
    columns = {
        _PERTURBATION: [names[name] for name in task.labels("perturbation")[table.rows]],
        _CONTROL: is_control[table.rows],
        **{name: context_codes(codes) for name in (_CONTEXT, *embeddings)},
    }
    obs = pd.DataFrame(columns, index=[f"cell{i}" for i in range(len(table.rows))])
    for name in (_PERTURBATION, _CONTEXT, *embeddings):
        obs[name] = obs[name].astype("category")
    adata = anndata.AnnData(obs=obs, obsm={_CELLS: cells[table.rows]})
    adata.uns[_rep(_PERTURBATION)] = dict(
        zip((names[p] for p in perturbations), one_hot(perturbations), strict=True)
    )
    for name, vectors in embeddings.items():
        adata.uns[_rep(name)] = dict(zip(context_codes(np.arange(len(contexts))), vectors, strict=True))
    adata.uns["names"] = names
    adata.uns["contexts"] = {context: f"c{i:06d}" for i, context in enumerate(contexts)}
    return adata, embeddings


def query_contexts(task: Task) -> set[tuple[str, str]]:
    """Return the (cell type, batch) of the cells to predict."""
    found = task.queries[["cell_type", "batch"]].drop_duplicates()
    return set(found.itertuples(index=False, name=None))


def note_contexts(task: Task, table: Table, contexts: list[tuple[str, str]]) -> None:
    """Record which contexts are new to the model and which learn from controls of others."""
    new = sorted(set(contexts) - set(table.contexts))
    task.note(
        contexts_trained=len(table.contexts),
        contexts_not_trained=[" | ".join(context) for context in new[:20]],
        contexts_without_controls=[" | ".join(context) for context in table.borrowing[:20]],
    )


def context_codes(codes: np.ndarray) -> list[str]:
    """Return the names that contexts have inside the tool."""
    return [f"c{code:06d}" for code in codes]


def _rep(name: str) -> str:
    return f"{name}_embedding"


def build(task: Task, adata: anndata.AnnData, covariates: list[str]) -> Any:
    """Return CellFlow with data and network; ``covariates`` are those of contexts."""
    import optax
    from cellflow.model import CellFlow
    from cellflow.utils import match_linear

    s = task.settings
    model = CellFlow(adata, solver="otfm")
    with contextlib.redirect_stdout(sys.stderr):  # dask's bars are not our progress lines
        model.prepare_data(
            sample_rep=_CELLS,
            control_key=_CONTROL,
            perturbation_covariates={_PERTURBATION: (_PERTURBATION,)},
            perturbation_covariate_reps={_PERTURBATION: _rep(_PERTURBATION)},
            sample_covariates=covariates or None,
            sample_covariate_reps={name: _rep(name) for name in covariates} or None,
            split_covariates=[_CONTEXT],
            max_combination_length=1,
            null_value=0.0,
        )
    optimizer = optax.adam(s.lr)
    if s.accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, s.accumulate)
    before = {name: _layers(s.context_width, 2, 0.0) for name in covariates}
    model.prepare_model(
        condition_mode="deterministic",
        pooling="attention_token",
        layers_before_pool={_PERTURBATION: _layers(s.condition_width, 2, s.perturbation_dropout), **before},
        layers_after_pool=_layers(s.condition_width, 2, 0.0),
        condition_embedding_dim=s.condition_dim,
        cond_output_dropout=s.condition_dropout,
        time_freqs=s.time_freqs,
        time_encoder_dims=[s.time_width] * s.layers,
        hidden_dims=[s.hidden_width] * s.layers,
        decoder_dims=[s.decoder_width] * s.layers,
        conditioning_kwargs={},
        probability_path={"constant_noise": s.noise},
        match_fn=functools.partial(match_linear, epsilon=s.epsilon, tau_a=1.0, tau_b=1.0),
        optimizer=optimizer,
        seed=task.seed,
    )
    return model


def _layers(width: int, count: int, dropout: float) -> dict[str, Any]:
    return {"layer_type": "mlp", "dims": [width] * count, "dropout_rate": dropout}


def fit(task: Task, model: Any) -> None:
    """Train; the tool's own loop, with batches drawn by the task's seed (it draws them by seed 0) and progress."""
    from cellflow.data._dataloader import TrainSampler

    steps = task.settings.iterations
    every = max(1, steps // _PROGRESS_LINES)

    class Batches(TrainSampler):
        """One batch per step."""

        drawn = 0

        def sample(self, rng: np.random.Generator) -> dict[str, Any]:
            if self.drawn % every == 0:
                watch(self.drawn)
            self.drawn += 1
            return super().sample(order)

    def watch(step: int) -> None:
        recent = model.trainer.training_logs.get("loss", [])[-every:]
        if recent and not np.all(np.isfinite(recent)):
            task.refuse(
                f"the training diverged by step {step} (loss {recent[-1]}); a lower baseline.options.lr helps"
            )
        task.progress(step, steps, f"training, loss {np.mean(recent):.3f}" if recent else "training")

    order = np.random.default_rng(task.seed)
    batches = Batches(model.train_data, batch_size=task.settings.batch_size)
    model.trainer.train(dataloader=batches, num_iterations=steps, valid_freq=steps + 1)
    watch(steps)
    losses = model.trainer.training_logs["loss"]
    task.note(
        steps=steps,
        cells_seen=steps * task.settings.batch_size,
        loss_first=round(float(np.mean(losses[:_LOSSES])), 4),
        loss_last=round(float(np.mean(losses[-_LOSSES:])), 4),
    )


def predict(task: Task, model: Any, uns: Any, cells: np.ndarray) -> np.ndarray:
    """Move the matched controls along the flow of their condition.

    Parameters
    ----------
    model
        Trained CellFlow.
    uns
        Of the training data: embeddings and codes of the labels.
    cells
        float32 [n_train, K].

    Returns
    -------
    numpy.ndarray
        float32 [n_queries, K].
    """
    import diffrax

    accuracy = diffrax.PIDController(rtol=task.settings.tolerance, atol=task.settings.tolerance)
    keys = ["perturbation", "cell_type", "batch"]
    groups = list(task.queries.groupby(keys, sort=True).indices.items())
    conditions = condition_inputs(model, uns, [key for key, _ in groups])
    rows = task.queries["control_row"].to_numpy(np.int64)
    unique = [np.unique(rows[at], return_inverse=True) for _, at in groups]
    size = group_size([len(found) for found, _ in unique])
    moved = np.empty((len(rows), cells.shape[1]), dtype=np.float32)
    for done, ((_, at), (found, back), condition) in enumerate(zip(groups, unique, conditions, strict=True)):
        pieces = [
            model.solver.predict(cells[piece], condition, stepsize_controller=accuracy)
            for piece in filled_chunks(found, size)
        ]
        moved[at] = np.concatenate(pieces)[: len(found)][back]
        task.progress(done + 1, len(groups), "predicting")
    task.note(cells_per_call=size)
    return moved


def condition_inputs(model: Any, uns: Any, keys: list[tuple[str, str, str]]) -> list[dict[str, np.ndarray]]:
    """Return the network's inputs for conditions (perturbation, cell type, batch), each float32 [1, 1, width]."""
    contexts = [uns["contexts"][key[1:]] for key in keys]
    names = [_PERTURBATION, _CONTEXT, *model.data_manager.sample_covariates]
    columns = dict.fromkeys(names, contexts) | {_PERTURBATION: [uns["names"][key[0]] for key in keys]}
    index = np.arange(len(keys))
    wanted = pd.DataFrame({**columns, _CONTROL: False, "condition": index})
    with contextlib.redirect_stdout(sys.stderr):
        found = model.data_manager.get_condition_data(wanted, rep_dict=uns, condition_id_key="condition")
    place = {int(condition): at for at, condition in found.perturbation_idx_to_id.items()}
    return [
        {name: values[[place[int(condition)]]] for name, values in found.condition_data.items()}
        for condition in index
    ]


def decode(fitted: Components, coordinates: np.ndarray) -> np.ndarray:
    """Return log1p expression, float32 [n, G], block by block."""
    values = np.empty((len(coordinates), len(fitted.mean)), dtype=np.float32)
    for first in range(0, len(coordinates), 4096):
        values[first : first + 4096] = fitted.decode(coordinates[first : first + 4096])
    return values


if __name__ == "__main__":
    main()
