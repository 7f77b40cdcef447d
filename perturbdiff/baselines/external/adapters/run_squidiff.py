"""Squidiff (He et al., Nature Methods 2025) as a baseline: a diffusion auto-encoder and arithmetic on its latents.

Training is the package's own loop on single cells. A cell ``x`` of perturbation ``p`` is then predicted from

    z = E(control) + mean over groups g with p in training of (mean E(cells of p in g) - mean E(controls of g))

by deterministic (DDIM) sampling from noise, with ``E`` the package's encoder and g = (cell type, batch). That is
what ``interp_with_direction`` of the authors' sampler does (github.com/siyuh/Squidiff, sample_squidiff.py; not
part of the published wheel). Why the default network predicts the cell and not the noise: lab/squidiff.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from perturbdiff_adapter import Task, open_task

if TYPE_CHECKING:
    import torch
    from Squidiff.respace import SpacedDiffusion

LATENT = 60
"""Width of the package's latent: ``EncoderMLPModel`` has no option for it."""
CHUNK = 1024
"""Cells that are encoded or sampled at once; bounds memory, changes nothing else."""
RECONSTRUCTED = 256
"""Training cells that are sampled from their own latent to see whether the training converged."""


class Batches:
    """Endless batches of one size, every cell once per pass, in the form the package's loop reads.

    The package's data loader leaves a last, smaller batch (of one cell at worst, which BatchNorm refuses), and its
    loop asks ``next(iter(data))`` at each step, which shuffles all cells anew for every batch.

    Parameters
    ----------
    values
        float32 [n, G], log1p.
    size
        Cells in a batch, 2 … n.
    seed
        Of the order of the cells.
    """

    def __init__(self, values: torch.Tensor, size: int, seed: int) -> None:
        import torch

        self._values, self._size = values, size
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        import torch

        if len(self._order) < self._size:
            again = torch.randperm(len(self._values), generator=self._generator)
            self._order = torch.cat([self._order, again])
        rows, self._order = self._order[: self._size], self._order[self._size :]
        return {"feature": self._values[rows], "group": torch.zeros(len(rows))}


def make_diffusion(settings: Any, sample_steps: int = 0) -> SpacedDiffusion:
    """Return the package's diffusion, over all its steps or over ``sample_steps`` of them."""
    from Squidiff.script_util import create_gaussian_diffusion

    spacing = f"ddim{sample_steps}" if 0 < sample_steps < settings.diffusion_steps else ""
    return create_gaussian_diffusion(
        steps=settings.diffusion_steps,
        noise_schedule=settings.noise_schedule,
        predict_xstart=settings.predict_xstart,
        timestep_respacing=spacing,
        use_encoder=True,
    )


def make_model(settings: Any, n_genes: int) -> torch.nn.Module:
    """Return the package's network. Its ``create_model`` is this call with ``width`` 2048."""
    from Squidiff.MLPModel import MLPModel

    return MLPModel(
        gene_size=n_genes,
        output_dim=n_genes,
        num_layers=settings.layers,
        hidden_sizes=settings.width,
        time_pos_dim=settings.width,
        time_embed_dim=settings.width,
        latent_dim=LATENT,
        use_encoder=True,
    )


def make_loop(task: Task, model: torch.nn.Module, batches: Batches, size: int) -> Any:
    """Return the package's ``TrainLoop``, ready for its first step.

    Without a GPU its constructor asks torch.distributed for the number of processes: a group of one exists for as
    long as that takes. The moving average of the weights is dropped: the authors sample from the last weights.
    """
    import torch.distributed as dist
    from Squidiff import logger
    from Squidiff.resample import create_named_schedule_sampler
    from Squidiff.train_util import TrainLoop

    logger.configure(dir=str(task.folder / "squidiff"), format_strs=[])
    diffusion = make_diffusion(task.settings)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loop = TrainLoop(
            model=model,
            diffusion=diffusion,
            data=batches,
            batch_size=size,
            microbatch=-1,
            lr=task.settings.learning_rate,
            ema_rate="0.9999",
            log_interval=sys.maxsize,
            save_interval=sys.maxsize,
            resume_checkpoint="",
            schedule_sampler=create_named_schedule_sampler("uniform", diffusion),
            weight_decay=0.0,
            lr_anneal_steps=task.settings.steps,
        )
    finally:
        dist.destroy_process_group()
    loop.ema_rate, loop.ema_params = [], []
    return loop


def train(task: Task, values: torch.Tensor) -> torch.nn.Module:
    """Train the network on all training cells and note the loss.

    Parameters
    ----------
    task
        Its settings: steps, batch_size, learning_rate, width, layers, predict_xstart, …
    values
        float32 [n_train, G], log1p, on the CPU.

    Returns
    -------
    torch.nn.Module
        In evaluation mode (BatchNorm of the encoder uses its running averages), on the device of the run.
    """
    from Squidiff import dist_util, logger

    size = min(task.settings.batch_size, len(values))
    if size < 2:
        task.refuse("needs at least 2 training cells: its encoder normalises over the cells of a batch")
    model = make_model(task.settings, values.shape[1]).to(dist_util.dev())
    loop = make_loop(task, model, Batches(values, size, task.seed), size)
    steps = task.settings.steps
    every, tail = max(1, steps // 100), max(1, steps // 10)
    losses = np.empty(steps)
    for step in range(steps):
        if step == steps - tail:
            logger.dumpkvs()  # the loss per quarter of the steps of diffusion is that of the last tenth
        loop.run_step(next(loop.data))
        loop.step += 1
        losses[step] = loop.loss_list.pop().item()
        if (step + 1) % every == 0:
            recent = losses[max(0, step - 99) : step + 1].mean()
            task.progress(step + 1, steps, f"training, loss {recent:.4f}")
    quarters = logger.dumpkvs()
    task.note(
        steps=steps,
        batch_size=size,
        parameters=sum(one.numel() for one in model.parameters()),
        device=str(dist_util.dev()),
        loss_of="cell" if task.settings.predict_xstart else "noise",
        loss_first=round(float(losses[:tail].mean()), 5),
        loss_last=round(float(losses[-tail:].mean()), 5),
        loss_last_by_quarter=[round(float(quarters.get(f"loss_q{i}", np.nan)), 5) for i in range(4)],
    )
    return model.eval()


def noise_model(model: torch.nn.Module, settings: Any) -> Any:
    """Return a function with the network's signature that gives the noise.

    The package's sampler takes the network's output for the noise whatever the network was trained to predict (the
    lines for ``ModelMeanType.START_X`` in ``p_mean_variance`` are commented out in 1.0.8), so that a network
    trained with the package's own ``predict_xstart`` is sampled as if it were another one. Here the cell that it
    predicts is written as the noise that leads to it: eps = (x_t - sqrt(a) x_0) / sqrt(1 - a), a = alpha_bar_t.
    """
    import torch

    if not settings.predict_xstart:
        return model
    alpha_bar = torch.from_numpy(make_diffusion(settings).alphas_cumprod)

    def noise(x: torch.Tensor, timesteps: torch.Tensor, **conditions: Any) -> torch.Tensor:
        a = alpha_bar.to(timesteps.device)[timesteps].float()[:, None]
        return (x - a.sqrt() * model(x, timesteps, **conditions)) / (1 - a).sqrt()

    return noise


def encode(model: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Return the latents of cells, float32 [n, 60] on the CPU, from float32 [n, G] log1p."""
    import torch
    from Squidiff import dist_util

    with torch.no_grad():
        parts = [model.encoder(part.to(dist_util.dev())).cpu() for part in values.split(CHUNK)]
    return torch.cat(parts)


def directions(
    latents: np.ndarray, perturbation: np.ndarray, group: np.ndarray, is_control: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the mean shift of the latent by perturbation.

    Parameters
    ----------
    latents
        float [n, L], one row per training cell.
    perturbation, group
        Labels [n]; the group is the cell type and batch.
    is_control
        bool [n].

    Returns
    -------
    dict
        Perturbation: float64 [L], the mean over its groups of the difference to the group's controls, weighted by the
        perturbed cells. A group without controls is compared with all controls.
    """
    latents = latents.astype(np.float64)
    everywhere = latents[is_control].mean(axis=0)
    base = {one: latents[is_control & (group == one)].mean(axis=0) for one in set(group[is_control])}
    own = np.stack([base.get(one, everywhere) for one in group])
    shift = latents - own
    return {
        one: shift[(perturbation == one) & ~is_control].mean(axis=0)
        for one in sorted(set(perturbation[~is_control]))
    }


def query_latents(task: Task, latents: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the latent of each cell to predict, float32 [n_queries, 60].

    ``latent_from`` 'cell' moves the latent of the query's own control; 'mean', as the authors' sampler, moves the
    mean over the group's controls and adds normal noise of ``latent_noise`` to stand for differences of cells.
    """
    settings, queries = task.settings, task.queries
    is_control = task.train.obs["is_control"].to_numpy(bool)
    shift = directions(latents, task.labels("perturbation"), group, is_control)
    row = queries["control_row"].to_numpy(np.int64)
    if settings.latent_from == "cell":
        start = latents[row].astype(np.float64)
    else:
        means = {one: latents[is_control & (group == one)].mean(axis=0) for one in set(group[row])}
        start = np.stack([means[one] for one in group[row]]).astype(np.float64)
    moved = start + np.stack([shift[one] for one in queries["perturbation"]])
    noise = np.random.default_rng(task.seed).standard_normal(moved.shape)
    return (moved + settings.latent_noise * noise).astype(np.float32)


def sample(task: Task, model: torch.nn.Module, latents: np.ndarray, n_genes: int, text: str) -> np.ndarray:
    """Return one cell for each latent, float32 [n, G] log1p, never below 0 (the package clamps x_0 there)."""
    import torch
    from Squidiff import dist_util

    diffusion, noise = (
        make_diffusion(task.settings, task.settings.sample_steps),
        noise_model(model, task.settings),
    )
    generator = torch.Generator().manual_seed(task.seed + 1)
    device, found = dist_util.dev(), np.empty((len(latents), n_genes), np.float32)
    for start in range(0, len(latents), CHUNK):
        z = torch.from_numpy(latents[start : start + CHUNK])
        found[start : start + CHUNK] = (
            diffusion.ddim_sample_loop(
                noise,
                shape=(len(z), n_genes),
                noise=torch.randn((len(z), n_genes), generator=generator).to(device),
                model_kwargs={"z_mod": z.to(device)},
                device=device,
            )
            .cpu()
            .numpy()
        )
        task.progress(min(start + CHUNK, len(latents)), len(latents), text)
    return found


def check_reconstruction(task: Task, model: torch.nn.Module, values: np.ndarray, latents: np.ndarray) -> None:
    """Sample training cells from their own latents and note the error; 'unexplained' ≥ 1 means: did not converge."""
    rows = np.random.default_rng(task.seed).permutation(len(values))[:RECONSTRUCTED]
    truth = values[rows].astype(np.float64)
    found = sample(task, model, latents[rows], values.shape[1], "cells from their own latents")
    error, variance = np.square(found - truth).mean(), np.square(truth - truth.mean(axis=0)).mean()
    unexplained = float(error / max(variance, 1e-12))
    task.note(
        reconstruction_mse=float(f"{error:.4g}"), reconstruction_unexplained=float(f"{unexplained:.4g}")
    )
    if not unexplained < 1.0:
        print(
            f"squidiff: did not converge: cells sampled from their own latents miss the truth by {unexplained:.3g} "
            "times the variance between cells (lab/squidiff.md)",
            file=sys.stderr,
            flush=True,
        )
        task.note(converged=False)


def main() -> None:
    """Train, encode, move the controls' latents, sample."""
    task = open_task()
    task.require_seen()
    import torch

    if task.device == "cuda" and not torch.cuda.is_available():
        task.refuse("was asked to run on a GPU, and torch sees none")
    torch.set_num_threads(task.threads)
    torch.manual_seed(task.seed)
    np.random.seed(task.seed)  # noqa: NPY002 - the package draws the steps of diffusion from numpy's global state
    values = task.dense()
    with task.phase("train"):
        model = train(task, torch.from_numpy(values))
    with task.phase("predict"):
        latents = encode(model, torch.from_numpy(values)).numpy()
        check_reconstruction(task, model, values, latents)
        group = task.labels("cell_type") + "\x1f" + task.labels("batch")
        predicted = sample(task, model, query_latents(task, latents, group), values.shape[1], "sampling")
    task.note(from_control_row=task.settings.latent_from == "cell")
    task.note(latent_sd=round(float(latents.std(axis=0).mean()), 4))
    task.write(predicted)


if __name__ == "__main__":
    main()
