"""`PerturbDiff`: a perturbation screen and the model of it, from an AnnData to scores in Python."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import anndata
import pandas as pd

from perturbdiff.api.given_inputs import (
    AnyCells,
    AnyData,
    AnyPath,
    Recipe,
    Scratch,
    Settings,
    cells_file,
    overrides,
    recipe_file,
    said_of_data,
    split_file,
    store_path,
    working,
)
from perturbdiff.api.requests import Conditions, OwnLabels, condition_file, control_store
from perturbdiff.api.score_frame import Scores
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.embeddings.embedding_tables import SemanticKind
from perturbdiff.io.columns import as_text
from perturbdiff.predictions import read_predictions
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.files import existing
from perturbdiff.runtime.outputs import check_place
from perturbdiff.sampling.sampling_stage import sample as sampling_stage
from perturbdiff.screen.plan import RECIPE, plan_screen
from perturbdiff.screen.stages import Stages
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

Part = Literal["train", "valid", "test"]


class PerturbDiff:
    """A perturbation screen and the model that predicts its cells.

    Nothing is read but the labels and a look at the values until `fit`. What is not given is guessed from the data,
    and every guess is logged. The AnnData is never changed.

    Parameters
    ----------
    adata
        Raw counts or log1p values [cells × genes], in memory or as the path of an h5ad, Zarr folder or 10x h5 file.
        An AnnData may be a view, and sparse or dense; its labels may be texts, categories or numbers.
    perturbation
        obs column with the perturbation.
    control
        Label of the control cells in it.
    batch, cell_type
        obs columns with the batch or donor, and with the cell type. False: the data have none.
    layer
        Where the values are: ``X``, ``raw`` or ``layers/NAME``.
    config
        The recipe: the name of a preset (``perturbdiff config show`` lists them), a YAML file or a `Config`.
        Default: ``recommended``.
    settings
        Changes of the recipe by dotted key, for example ``{"train.max_steps": 500, "split.held_out": ["rep_3"]}``.
    split
        Table of `perturbdiff.split` (or its file) that says what is held out. Default: chosen by the recipe's rules.
    embeddings
        Files with vectors by ``perturbation``, ``cell_type`` or ``gene`` (docs/embeddings.md).
    seed
        Random seed. The same seed gives the same cells. Default: the recipe's.
    device
        ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
    folder
        Folder that keeps the store, the split, the bundle, the predictions and the scores. An interrupted `fit` goes
        on from what is there. Without it, they lie in a temporary folder, which goes when this object does.

    Attributes
    ----------
    config
        The complete recipe, with what was guessed.

    Raises
    ------
    UserError
        In one message, everything that has to be mended first.

    Examples
    --------
    >>> model = perturbdiff.PerturbDiff(adata, perturbation="perturbation", control="control", config="tiny").fit()
    >>> cells = model.predict()
    >>> sorted(cells.obs.columns)
    ['batch', 'cell_type', 'perturbation', 'set']
    """

    config: Config
    _labels: OwnLabels
    _cells: AnyCells | None
    _bundle: Path | None
    _stages: Stages | None
    _kept: Any

    def __init__(
        self,
        adata: AnyCells,
        *,
        perturbation: str | None = None,
        control: str | None = None,
        batch: str | Literal[False] | None = None,
        cell_type: str | Literal[False] | None = None,
        layer: str | None = None,
        config: Recipe = None,
        settings: Settings = None,
        split: pd.DataFrame | AnyPath | None = None,
        embeddings: Mapping[SemanticKind, AnyPath] | None = None,
        seed: int | None = None,
        device: str = "auto",
        folder: AnyPath | None = None,
    ) -> None:
        self._cells, self._scratch, self._bundle, self._kept = adata, Scratch(), None, None
        self._device = device
        with working(self._scratch) as scratch:
            if place := store_path(adata):
                raise UserError(f"{place}: is a store; perturbdiff.train(store, split) trains on one")
            plan = plan_screen(
                adata if isinstance(adata, anndata.AnnData) else existing(Path(adata), "input"),
                recipe_file(config, scratch),
                overrides(settings),
                given=said_of_data(perturbation, control, batch, cell_type, layer),
                seed=seed,
                has_split=split is not None,
            )
            for line in plan.lines:
                logger.info("%s", line)
            (scratch / RECIPE).write_text(plan.recipe, encoding="utf-8")
            self.config = recipes.load(scratch / RECIPE)
            self._stages = Stages.within(
                scratch if folder is None else Path(folder), self.config, plan.name,
                split=None if split is None else split_file(split, scratch), device=device, jobs=1,
                embeddings={kind: Path(path) for kind, path in (embeddings or {}).items()},
            )  # fmt: skip
        self._labels = OwnLabels.of(self.config.data, adata if isinstance(adata, anndata.AnnData) else None)

    @classmethod
    def load(
        cls,
        path: AnyPath,
        *,
        perturbation: str | None = None,
        control: str | None = None,
        batch: str | Literal[False] | None = None,
        cell_type: str | Literal[False] | None = None,
        layer: str | None = None,
        device: str = "auto",
    ) -> Self:
        """Open a model that `save`, ``perturbdiff train`` or ``perturbdiff run`` wrote, on this machine or another.

        Parameters
        ----------
        path
            The bundle.
        perturbation, control, batch, cell_type, layer
            How the cells that `predict` is given name things, where this differs from the data of the training.
        device
            As above.

        Returns
        -------
        PerturbDiff
            A model for `predict`, which needs control cells.

        Raises
        ------
        UserError
            If it is no bundle, or it was changed since it was made.

        Examples
        --------
        >>> later = perturbdiff.PerturbDiff.load(folder / "bundle")
        >>> cells = later.predict(["cytokine_1"], controls=adata)
        """
        model = cls.of(Path(path), device=device)
        data = model.config.data.model_copy(
            update=said_of_data(perturbation, control, batch, cell_type, layer)
        )
        model.config = model.config.model_copy(update={"data": data})
        model._labels = OwnLabels.of(data)
        return model

    @classmethod
    def of(
        cls, bundle: Path, stages: Stages | None = None, *, device: str = "auto",
        cells: anndata.AnnData | None = None, keep: Any = None,
    ) -> Self:  # fmt: skip
        """Return the model of a bundle, with the stages that made it and the cells it was fitted to.

        ``keep`` is held as long as the model lives.
        """
        model = cls.__new__(cls)
        model._cells, model._scratch, model._bundle, model._kept = None, Scratch(), bundle, keep
        model._stages, model._device = stages, device
        with working(model._scratch):
            model.config = model.bundle.config
        model._labels = OwnLabels.of(model.config.data, cells)
        return model

    def __repr__(self) -> str:
        data = self.config.data
        named = {"perturbation": data.perturbation_key, "control": data.control}
        named |= {"cell_type": data.cell_type_key, "batch": data.batch_key}
        lines = [f"PerturbDiff, recipe '{self.config.name}'", f"  {self._about_data()}"]
        lines.append(
            "  " + ", ".join(f"{name}: {value}" for name, value in named.items() if value is not None)
        )
        if self._bundle is None:
            return "\n".join([*lines, "  not fitted: call fit()"])
        bundle = self.bundle
        size = sum(weights.numel() for weights in bundle.model.parameters())
        words, steps = bundle.vocabulary, bundle.training.get("best_step", bundle.training.get("steps"))
        lines.append(
            f"  fitted: {size / 1e6:.2f} M parameters, {len(bundle.genes)} genes, {len(words.perturbation) - 1} "
            f"perturbations, {len(words.cell_type)} cell types, {len(words.batch)} batches"
            + (f", weights of step {steps}" if steps is not None else "")
        )
        return "\n".join(lines)

    def _about_data(self) -> str:
        if isinstance(self._cells, anndata.AnnData):
            return f"data: AnnData, {self._cells.n_obs} cells × {self._cells.n_vars} genes"
        if self._cells is not None:
            return f"data: {self._cells}"
        return f"bundle: {self._bundle}"

    @property
    def path(self) -> Path:
        """The folder of the bundle. A `UserError` before `fit`."""
        if self._bundle is None:
            raise UserError(
                "the model is not fitted: call fit() first, or open one with PerturbDiff.load(path)"
            )
        return self._bundle

    @cached_property
    def bundle(self) -> Bundle:
        """The trained network with its recipe, genes, labels and ``curve``, the loss terms by step."""
        return Bundle.load(self.path)

    @property
    def stages(self) -> Stages:
        """Where the files of `fit` and `evaluate` lie. A `UserError` after `load`: a bundle has none."""
        if self._stages is None:
            raise UserError(
                "the model was opened from a bundle, which does not hold the data; fit one to them first"
            )
        return self._stages

    @property
    def store(self) -> Store:
        """The store that the model was fitted to. A `UserError` before `fit` and after `load`."""
        return Store(self.stages.store)

    @property
    def split(self) -> pd.DataFrame:
        """What is held out: the table that `perturbdiff.split` returns. A `UserError` before `fit` and after `load`."""
        return read_split(self.stages.split)

    def fit(self) -> Self:
        """Preprocess, split and train: the stages of ``perturbdiff run``.

        If it is interrupted, a further call goes on from the last checkpoint. A model that is fitted already is left
        as it is.

        Returns
        -------
        PerturbDiff
            This object.

        Raises
        ------
        UserError
            If the data are not what was said of them, or nothing can be learnt from them.
        StoppedEarly
            If the training was asked to stop (Ctrl-C, the end of a job's time). Call `fit` again to go on.

        Examples
        --------
        >>> model = model.fit()
        """
        if self._bundle is None and self._cells is not None:
            with working(self._scratch) as scratch:
                cells = cells_file(self._cells, scratch)
                stages = replace(self.stages, source=cells)
                stages.make_store()
                stages.make_split()
                stages.train()
                if cells.parent == scratch:
                    cells.unlink()
                self._bundle = stages.bundle
        return self

    def predict(
        self,
        conditions: Conditions | None = None,
        controls: AnyData | None = None,
        *,
        part: Part = "test",
        seed: int | None = None,
        values: Literal["log1p", "counts"] | None = None,
    ) -> anndata.AnnData:
        """Predict cells.

        Parameters
        ----------
        conditions
            What to predict. Default: the conditions of ``part``, as many cells as there really are. Else
            perturbations by name (``"IFNB"`` or ``["IFNB", "TNF"]``, each in every cell type and batch with control
            cells), a table (or its CSV) with the user's columns or ``perturbation, cell_type, batch`` and optionally
            ``n_cells`` (default: as many as the data have, else one set) and ``guidance``, or an AnnData whose
            conditions are predicted.
        controls
            Control cells to start from: an AnnData, a file or a store. Default: an AnnData that was given as
            ``conditions`` and has control cells, else the data of `fit`.
        part
            Part of the split: ``test``, ``valid`` or ``train``.
        seed
            Seed of the noise and of the choice of control cells. Default: the recipe's.
        values
            ``counts``: whole counts of all genes of the control cells' store, each cell as deep as a control cell.
            Default: the recipe's, which is ``log1p`` unless it was changed.

        Returns
        -------
        AnnData
            Predicted cells alone, float32 CSR [cells × genes of the model], with the user's obs columns, labels and
            gene names, in the units of the user's values. ``set`` in ``obs`` says which cells were sampled together.
            For counts, ``X`` has counts at the depth ``uns["perturbdiff"]["target_sum"]`` (no whole numbers), and the
            layer ``log1p`` their log1p. With ``values="counts"``, ``X`` is int32, ``obs`` has the depths as
            ``n_counts``, and ``var`` says which genes are ``predicted``.

        Raises
        ------
        UserError
            If the model is not fitted, there are no control cells, or it does not know a perturbation or cell type.

        Examples
        --------
        >>> cells = model.predict()
        >>> more = model.predict(["cytokine_1"], seed=7)
        """
        bundle, data, labels = self.bundle, self.config.data, self._labels
        if controls is None and isinstance(conditions, anndata.AnnData) and self._has_controls(conditions):
            controls = conditions
        if controls is None and self._stages is None:
            raise UserError(
                "predict: a bundle does not hold the data; give control cells: predict(…, controls=adata)"
            )
        if conditions is None and (self._stages is None or controls is not None):
            raise UserError(
                "predict: say what to predict: perturbations by name, a table of conditions or an AnnData"
            )
        with working(self._scratch), working() as scratch:
            store = self.store if controls is None else control_store(controls, bundle, data, scratch)
            if isinstance(controls, anndata.AnnData):
                labels = OwnLabels.of(data, controls)
            wanted: dict[str, Any] = {"seed": self.config.seed if seed is None else seed}
            if values is not None:
                wanted["config"] = bundle.config.sample.model_copy(update={"values": values})
            out = scratch / "predicted.h5ad"
            if conditions is None:
                wanted |= {"split": self.stages.split, "part": part}
                as_run = part == "test" and seed is None and values is None
                out = self.stages.predictions() if as_run else out
            else:
                wanted["conditions"] = condition_file(conditions, store, labels, scratch)
            made = sampling_stage(self.path, store.path, out, device=self._device, **wanted)
            return labels.apply(
                read_predictions(made), counts=store.input_scale == "counts", control=store.control
            )

    def _has_controls(self, cells: anndata.AnnData) -> bool:
        key = self.config.data.perturbation_key
        return key in cells.obs and bool((cells.obs[key].map(as_text) == self.config.data.control).any())

    def evaluate(self, *, baselines: Sequence[str] | None = None) -> Scores:
        """Score the model on the test conditions, beside the baselines and the ceiling of the data.

        Parameters
        ----------
        baselines
            Names of built-in baselines, for example ``("control", "nearest-context")``. Default: all of them,
            ``kernel-ridge`` only if the model was given vectors of perturbations.

        Returns
        -------
        Scores
            A DataFrame of methods × metrics with ``plot()`` and ``per_perturbation``.

        Raises
        ------
        UserError
            If the model was not fitted here, or there are no test conditions.

        Examples
        --------
        >>> scores = model.evaluate(baselines=("control",))
        >>> figure = scores.plot(["energy_distance"])
        """
        stages = self.stages
        with working(self._scratch):
            assert self.path  # raises what to do before `fit`
            stages.sample()
            stages.predict_baselines(baselines)
            stages.score_ceiling()
            stages.calibrate()
            stages.evaluate(baselines)
            scores = Scores.read(stages.scored(baselines))
        scores.keep(self)
        return scores

    def save(self, path: AnyPath) -> Path:
        """Write the fitted model as a bundle, the folder that ``perturbdiff train`` writes.

        Parameters
        ----------
        path
            A new folder.

        Returns
        -------
        Path
            ``path``.

        Raises
        ------
        UserError
            If the model is not fitted, or there is something at ``path``.

        Examples
        --------
        >>> place = model.save(folder / "bundle")
        """
        out, source = Path(path), self.path
        check_place(out)
        if out.exists():
            raise UserError(f"{out}: is there already; choose another folder, or remove it first")
        with files.writing(out, folder=True) as partial:
            shutil.copytree(source, partial, dirs_exist_ok=True)
        return out
