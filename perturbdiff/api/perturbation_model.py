"""`PerturbDiff`: a perturbation screen and the model of it, from an AnnData to scores in Python."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import anndata
import pandas as pd

from perturbdiff.api.inputs import (
    ADATA,
    AnyCells,
    AnyData,
    AnyPath,
    Scratch,
    cells_file,
    split_file,
    working,
)
from perturbdiff.api.own_labels import OwnLabels
from perturbdiff.api.requests import Conditions, condition_file, control_store
from perturbdiff.api.scores import Scores
from perturbdiff.api.settings import COLUMNS, Recipe, Settings, recipe_of
from perturbdiff.baselines import NAMES
from perturbdiff.baselines import predict as baseline_stage
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config.settings import Config
from perturbdiff.embeddings.embedding_tables import SemanticKind
from perturbdiff.evaluation.evaluation_stage import CEILING
from perturbdiff.evaluation.evaluation_stage import ceiling as ceiling_stage
from perturbdiff.evaluation.evaluation_stage import evaluate as evaluation_stage
from perturbdiff.predictions import read_predictions
from perturbdiff.preprocessing.preprocessing_stage import Machine
from perturbdiff.preprocessing.preprocessing_stage import preprocess as preprocess_stage
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.outputs import check_place
from perturbdiff.sampling.sampling_stage import sample as sampling_stage
from perturbdiff.splits.splits import make_split, read_split
from perturbdiff.store.store import Store
from perturbdiff.training.training_stages import train as training_stage

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
    >>> model = perturbdiff.PerturbDiff(adata, perturbation="perturbation", control="control", config="tiny")
    >>> scores = model.fit().evaluate()
    >>> cells = model.predict()
    """

    config: Config

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
        self._scratch, self._folder = Scratch(), None if folder is None else Path(folder)
        self._bundle: Path | None = None
        self._store: Path | None = None
        self._split: Path | None = None
        self._given_split, self._device = split, device
        self._embeddings = {kind: Path(path) for kind, path in (embeddings or {}).items()}
        given = {"perturbation": perturbation, "control": control, "batch": batch, "cell_type": cell_type}
        given = {
            COLUMNS[name]: value or None
            for name, value in {**given, "layer": layer}.items()
            if value is not None
        }
        self._cells: AnyCells | None = adata
        with self._working():
            self.config = recipe_of(config, {**given, **(settings or {})}, seed=seed)
        self.own_labels = OwnLabels.of(
            self.config.data, adata if isinstance(adata, anndata.AnnData) else None
        )

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
        >>> trained = perturbdiff.PerturbDiff.load(bundle)
        >>> cells = trained.predict(["KD1"], controls=adata)
        """
        given = {"perturbation": perturbation, "control": control, "batch": batch, "cell_type": cell_type}
        given = {
            COLUMNS[name]: value or None
            for name, value in {**given, "layer": layer}.items()
            if value is not None
        }
        return cls.of(Path(path), given, device=device)

    @classmethod
    def of(
        cls,
        bundle: Path,
        given: Settings = None,
        *,
        device: str = "auto",
        store: Path | None = None,
        split: Path | None = None,
        scratch: Scratch | None = None,
        keep: Any = None,
    ) -> Self:
        """Return the model of a bundle, with the store and the split that it was trained on.

        ``keep`` is held as long as the model lives.
        """
        self = cls.__new__(cls)
        self._scratch, self._folder, self._cells, self._given_split = scratch or Scratch(), None, None, None
        self._bundle, self._store, self._split, self._device = bundle, store, split, device
        self._embeddings, self._kept = {}, keep
        with self._working():
            self.config = recipe_of(self.bundle.config, given)
        self.own_labels = OwnLabels.of(self.config.data)
        return self

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
        """The folder of the bundle.

        Raises
        ------
        UserError
            Before `fit`.
        """
        if self._bundle is None:
            raise UserError(
                "the model is not fitted: call fit() first, or open one with PerturbDiff.load(path)"
            )
        return self._bundle

    @contextmanager
    def _working(self) -> Iterator[Path]:
        with working(self._scratch) as folder:
            yield self._folder or folder

    @property
    def store(self) -> Store:
        """The store that the model was fitted to.

        Raises
        ------
        UserError
            If there is none: before `fit`, or after `load`.
        """
        if self._store is None:
            raise UserError("the model has no store: call fit() first")
        return Store(self._store)

    @property
    def split(self) -> pd.DataFrame:
        """What is held out: the table that `perturbdiff.split` returns.

        Raises
        ------
        UserError
            If there is none: before `fit`, or after `load`.
        """
        if self._split is None:
            raise UserError("the model has no split: call fit() first")
        return read_split(self._split)

    @cached_property
    def bundle(self) -> Bundle:
        """The trained network with its recipe, genes, labels and training curve (``curve``, loss terms by step).

        Raises
        ------
        UserError
            Before `fit`.
        """
        if self._bundle is None:
            raise UserError(
                "the model is not fitted: call fit() first, or open one with PerturbDiff.load(path)"
            )
        return Bundle.load(self._bundle)

    def fit(self) -> Self:
        """Preprocess, split and train: the stages of ``perturbdiff preprocess``, ``split`` and ``train``.

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
        """
        if self._bundle is not None:
            return self
        config, seed = self.config, self.config.seed
        with self._working() as folder:
            cells = cells_file(_given(self._cells), self._scratch.path)
            store, split = folder / "store", folder / "split.parquet"
            from_cells = config.data.hvg_cells == "train"  # the split is then needed first
            if self._given_split is not None:
                split = split_file(self._given_split, folder)
            elif from_cells:
                make_split(cells, split, config, seed=seed)
            known = split if from_cells else None
            preprocess_stage([cells], store, config.data, split=known, seed=seed, machine=Machine(jobs=1))
            if self._given_split is None and not from_cells:
                make_split(store, split, config, seed=seed)
            training_stage(
                store, split, folder / "bundle", config, embeddings=self._embeddings, device=self._device
            )
            if cells.parent == self._scratch.path:
                cells.unlink()
            self._store, self._split, self._bundle = store, split, folder / "bundle"
        return self

    def predict(
        self,
        conditions: Conditions | None = None,
        controls: AnyData | None = None,
        *,
        part: Part = "test",
        seed: int | None = None,
    ) -> anndata.AnnData:
        """Predict cells.

        Parameters
        ----------
        conditions
            What to predict. Default: the conditions of ``part``, as many cells as there really are. Else
            perturbations by name (``"IFNB"`` or ``["IFNB", "TNF"]``, each in every cell type and batch with control
            cells), a table (or its CSV) with the user's columns or ``perturbation, cell_type, batch`` and optionally
            ``n_cells`` and ``guidance``, or an AnnData whose conditions are predicted.
        controls
            Control cells to start from: an AnnData, a file or a store. Default: an AnnData that was given as
            ``conditions`` and has control cells, else the data of `fit`.
        part
            Part of the split: ``test``, ``valid`` or ``train``.
        seed
            Seed of the noise and of the choice of control cells. Default: the recipe's.

        Returns
        -------
        AnnData
            Predicted cells alone, float32 CSR [cells × genes of the model], with the user's obs columns, labels and
            gene names, in the units of the user's values. For counts, ``X`` has counts at the depth
            ``uns["perturbdiff"]["target_sum"]`` (no whole numbers), and the layer ``log1p`` their log1p.

        Raises
        ------
        UserError
            If the model is not fitted, there are no control cells, or it does not know a perturbation or cell type.

        Examples
        --------
        >>> cells = model.predict()
        >>> more = model.predict(["KD1"])
        """
        bundle, data, labels = self.bundle, self.config.data, self.own_labels
        if controls is None and isinstance(conditions, anndata.AnnData) and self._has_controls(conditions):
            controls = conditions
        if controls is None and self._store is None:
            raise UserError(
                "predict: the model has no data of its own; give control cells: predict(…, controls=adata)"
            )
        if conditions is None and self._split is None:
            raise UserError(
                "predict: say what to predict: perturbations by name, a table of conditions or an AnnData"
            )
        request: dict[str, Any] = {"seed": self.config.seed if seed is None else seed, "device": self._device}
        with self._working() as folder, working() as scratch:
            store = self.store if controls is None else control_store(controls, bundle, data, scratch)
            if isinstance(controls, anndata.AnnData):
                labels = OwnLabels.of(data, controls)
            out = scratch / "predicted.h5ad"
            if conditions is None and self._split is not None:
                request |= {"split": self._split, "part": part}
                if controls is None and part == "test":
                    out = self._predictions(folder) if seed is None else out
            else:
                request["conditions"] = condition_file(_given(conditions), store, labels, scratch)
            made = sampling_stage(self.path, Path(store.path), out, config=self.config.sample, **request)
            return labels.apply(
                read_predictions(made), counts=store.input_scale == "counts", control=store.control
            )

    def _has_controls(self, cells: anndata.AnnData) -> bool:
        key = self.config.data.perturbation_key
        return key in cells.obs and bool((cells.obs[key].astype(str) == self.config.data.control).any())

    def _predictions(self, folder: Path, name: str | None = None) -> Path:
        return folder / "predictions" / f"{name or self.config.name}.h5ad"

    def evaluate(self, *, baselines: Sequence[str] = NAMES) -> Scores:
        """Score the model on the test conditions, beside the baselines and the ceiling of the data.

        Parameters
        ----------
        baselines
            Names of built-in baselines, for example ``("control", "nearest-context")``. Default: all of them.

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
        store, split = self.store.path, _given(self._split)
        config, seed = self.config.evaluate, self.config.seed
        ours = {name: type(config).model_fields[name].default for name in _OUR_COLUMNS}
        config = config.model_copy(
            update=ours
        )  # the predictions have our columns, whatever the data call them
        with self._working() as folder:
            predicted = [self._predictions(folder)]
            sampling_stage(
                self.path, store, predicted[0], split=split, config=self.config.sample, seed=seed,
                device=self._device,
            )  # fmt: skip
            for name in baselines:
                predicted.append(
                    baseline_stage(name, store, split, self._predictions(folder, name), seed=seed)
                )
            scored = folder / "scores"
            names = {"dataset": self._name(), "seed": seed}
            runs = [evaluation_stage(p, store, scored / p.stem, config, **names) for p in predicted]
            runs.append(ceiling_stage(store, scored / CEILING, config, split=split, **names))
            scores = Scores.read(runs)
        scores.keep(self._scratch)
        return scores

    def _name(self) -> str:
        """Return the name of the data set."""
        return Path(self._cells).name.split(".")[0] if isinstance(self._cells, str | Path) else ADATA

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
        """
        out, source = Path(path), self.path
        check_place(out)
        if out.exists():
            raise UserError(f"{out}: is there already; choose another folder, or remove it first")
        with files.writing(out, folder=True) as partial:
            shutil.copytree(source, partial, dirs_exist_ok=True)
        return out


_OUR_COLUMNS = ("perturbation_key", "cell_type_key", "batch_key")


def _given(value: Any) -> Any:
    """Return a value that earlier checks have made sure of."""
    assert value is not None
    return value
