"""Checkpoints in the layout of the authors' released code, of any size, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BY_NAME = ("pbmc", "tahoe100m", "replogle", "cellxgene")


@dataclass(frozen=True)
class ReleasedLayout:
    """What a released network is made of; the defaults are a small one with one-hot covariates.

    ``inner`` is the length of the covariate vector, other than ``genes`` after gene layers were replaced;
    ``perturbation`` is ``onehot``, ``esm2``, ``genept`` or ``chemberta``; ``vectors`` the width of frozen ones.
    """

    genes: int = 40
    width: int = 16
    depth: int = 2
    heads: int = 4
    datasets: Sequence[str] = ()
    inner: int | None = None
    labels: tuple[int, int, int] = (5, 3, 4)
    perturbation: str = "onehot"
    cell_type: str = "onehot"
    batch: bool = True
    vectors: int = 12
    doses: int = 3
    covariate_width: int = 128

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its released name."""
        h, g, inner = self.width, self.genes, self.inner or self.genes
        shapes: dict[str, tuple[int, ...]] = dict(self._covariates(inner))

        def linear(name: str, outputs: int, inputs: int) -> None:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

        for place in [f".{name}" for name in self.datasets] or [""]:
            linear(f"model.x_embedder{place}", h, 2 * g)
            linear(f"model.x_control_embedder{place}", h, 2 * g)
        linear("model.t_embedder.mlp.0", h, 256)
        linear("model.t_embedder.mlp.2", h, h)
        linear("model.gene_embedding.gene_embedding", h, 5120)
        shapes["model.gene_embedding.null_emb.weight"] = (1, h)
        shapes |= {f"model.gene_embedding.layer_norm.{k}": (h,) for k in ("weight", "bias")}
        linear("model.class_embedding.emb", h, inner)
        shapes["model.class_embedding.null_emb.weight"] = (1, h)
        for i in range(self.depth):
            block = f"model.blocks.{i}.block"
            linear(f"{block}.attn.qkv", 6 * h, 2 * h)
            shapes |= {f"{block}.attn.{k}_norm.weight": (2 * h // self.heads,) for k in "qk"}
            linear(f"{block}.attn.proj", 2 * h, 2 * h)
            for mlp in ("mlp", "control_mlp"):
                linear(f"{block}.{mlp}.fc1", 4 * h, h)
                linear(f"{block}.{mlp}.fc2", h, 4 * h)
            linear(f"{block}.adaLN_modulation.1", 6 * h, h)
            linear(f"{block}.control_adaLN_modulation.1", 6 * h, h)
        for head in ("final_layer", "control_final_layer"):
            linear(f"model.{head}.linear", g, h)
            linear(f"model.{head}.adaLN_modulation.1", 2 * h, h)
        return shapes

    def _covariates(self, inner: int) -> dict[str, tuple[int, ...]]:
        d, (p, c, b), prefix = self.covariate_width, self.labels, "cov_encoder"
        frozen = {"esm2": ("pert", p + 3), "genept": ("pert", p), "chemberta": ("drug", p)}
        shapes: dict[str, tuple[int, ...]] = {}
        if self.perturbation in frozen:
            name, rows = frozen[self.perturbation]
            shapes |= self._frozen(f"{prefix}.{name}_encoder", rows)
        else:
            shapes[f"{prefix}.pert_encoder.weight"] = (p + 1, d)
        if self.perturbation == "chemberta":
            shapes |= {f"{prefix}.dose_encoder.weight": (self.doses, d), f"{prefix}.dose_indices": (p,)}
        if self.cell_type == "llm":
            shapes |= self._frozen(f"{prefix}.celltype_encoder", c)
        else:
            shapes[f"{prefix}.celltype_encoder.weight"] = (c, d)
        if self.batch:
            shapes[f"{prefix}.batch_encoder.weight"] = (b, d)
        parts = 2 + self.batch + (self.perturbation == "chemberta")
        return shapes | {
            f"{prefix}.transform.weight": (inner, parts * d),
            f"{prefix}.transform.bias": (inner,),
        }

    def _frozen(self, name: str, rows: int) -> dict[str, tuple[int, ...]]:
        d, e = self.covariate_width, self.vectors
        return {f"{name}.0.weight": (rows, e), f"{name}.1.weight": (d, e), f"{name}.1.bias": (d,)}

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        """Return random tensors."""
        generator = torch.Generator().manual_seed(seed)
        found = {
            name: torch.empty(shape).uniform_(-0.05, 0.05, generator=generator)
            for name, shape in self.shapes().items()
            if name != "cov_encoder.dose_indices"
        }
        if self.perturbation == "chemberta":
            found["cov_encoder.dose_indices"] = torch.tensor(self._dose_codes(), dtype=torch.int32)
        return found

    def _dose_codes(self) -> list[int]:
        return [0, *(1 + i % (self.doses - 1) for i in range(self.labels[0] - 1))]

    def perturbations(self) -> list[str]:
        """Return the labels in the order of their codes; the first is the control."""
        if self.perturbation == "chemberta":
            doses = [0.0, *(0.05 * 10**i for i in range(self.doses - 1))]
            codes = self._dose_codes()
            drugs = ["DMSO_TF", *(f"drug{i}" for i in range(1, self.labels[0]))]
            return [f"[('{d}', {doses[c]}, 'uM')]" for d, c in zip(drugs, codes, strict=True)]
        return ["PBS", *(f"cytokine{i}" for i in range(1, self.labels[0]))]

    def settings(self, **model: Any) -> dict[str, Any]:
        """Return the hyper-parameters; ``hidden_num`` is out of date where gene layers were replaced."""
        source = (self.datasets or ("pbmc",))[0]
        cell_types = [f"type{i}" for i in range(self.labels[1])]
        batches = [f"{source}_Donor{i}" for i in range(self.labels[2])]
        encoding = {"esm2": "esm2", "genept": "genept"}.get(self.perturbation, "onehot")
        return {
            "model_cfg": {
                "hidden_num": [self.inner or self.genes, self.width],
                "dataset_dict": list(self.datasets or ("pbmc",)),
                "steps": 1000,
                "p_drop_control": 0,
                **model,
            },
            "cov_encoding_cfg": {
                "pert_encoding": encoding,
                "pert_dict": {label: i for i, label in enumerate(self.perturbations())},
                "cell_type_dict": {label: i for i, label in enumerate(cell_types)},
                "batch_dict": {label: i for i, label in enumerate(batches)},
            },
            "optimizer_cfg": {},
            "trainer_cfg": {},
        }

    def write(self, path: Path, *, raw: bool = False, optimiser: bool = False, **model: Any) -> Path:
        """Write a checkpoint; with raw weights beside the averaged ones, and Adam's state, if asked for."""
        weights = self.weights()
        content: dict[str, Any] = {"epoch": 1, "global_step": 20000, "state_dict": weights}
        if raw:
            content["current_model_state"] = {name: t.clone() for name, t in weights.items()}
            content["averaging_state"] = {"n_averaged": torch.tensor(2000)}
        if optimiser:
            moments = [{"exp_avg": t.clone(), "exp_avg_sq": t.clone()} for t in weights.values()]
            content["optimizer_states"] = [{"state": dict(enumerate(moments)), "param_groups": []}]
        torch.save({**content, "hyper_parameters": self.settings(**model)}, path)
        return path
