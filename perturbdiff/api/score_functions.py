"""The stages that score and show predictions, as functions of Python: `evaluate` and `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anndata

from perturbdiff.api.given_inputs import (
    AnyCells,
    AnyData,
    AnyPath,
    Recipe,
    Scratch,
    Settings,
    cells_file,
    data_path,
    recipe_of,
    split_file,
    working,
)
from perturbdiff.api.score_frame import Scores
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.evaluation_stage import evaluate as evaluation_stage
from perturbdiff.reporting.page.page import write_report

if TYPE_CHECKING:
    import pandas as pd

    from perturbdiff.api.perturbation_model import PerturbDiff

_COLUMNS = ("perturbation", "cell_type", "batch")


def evaluate(
    predictions: AnyCells,
    truth: AnyData,
    out: AnyPath | None = None,
    *,
    perturbation: str | None = None,
    control: str | None = None,
    cell_type: str | None = None,
    batch: str | None = None,
    context: str | None = None,
    scale: Literal["log1p", "counts"] | None = None,
    metrics: Sequence[str] = (),
    method: str | None = None,
    dataset: str | None = None,
    config: Recipe = None,
    settings: Settings = None,
    threads: int | None = None,
    seed: int | None = None,
    force: bool = False,
) -> Scores:
    """Score any method's predicted cells against the real cells of the same conditions.

    Parameters
    ----------
    predictions
        Predicted cells [cells × genes], in memory or by path. What `PerturbDiff.predict` and `sample` return needs no
        further arguments, except ``control`` and ``scale`` if the truth is an AnnData that does not declare them.
    truth
        Real cells with controls: an AnnData, a file or a store.
    out
        Folder to write, as ``perturbdiff evaluate`` does. Without it, nothing stays on disk once the returned object
        is gone.
    perturbation, cell_type, batch
        obs columns. Default: ``perturbation``, ``cell_type``, ``batch``.
    control
        Label of the control cells, where the data do not declare it.
    context
        obs column of the contexts to score separately. Default: cell types.
    scale
        Units of values that are not declared: ``log1p`` (of normalised counts) or ``counts``.
    metrics
        Metrics or families (``expression``, ``de``, ``count``, ``distribution``). Default: all.
    method, dataset
        Names in the table. Default: as the predictions and the truth say.
    config, settings
        The recipe and changes of it, for example ``{"evaluate.missing": "skip"}``.
    threads
        Threads that compare. The scores do not depend on it. Default: all processors.
    seed
        Random seed of the cells drawn for distances and of the intervals. Default: the recipe's.
    force
        Score even if an equal output is in ``out``.

    Returns
    -------
    Scores
        A DataFrame with one row, and ``plot()``, ``per_perturbation`` and ``details``.

    Raises
    ------
    UserError
        If scale, genes, conditions or controls do not match.

    Examples
    --------
    >>> scores = perturbdiff.evaluate(predicted, store)
    >>> float(scores["energy_distance"].iloc[0]) > 0
    True
    """
    scratch = Scratch()
    with working(scratch) as folder:
        recipe = recipe_of(config, settings, seed=seed)
        options: dict[str, Any] = {
            **_declared_columns(predictions),
            "control": control, "context_column": context, "scale": scale, "metrics": tuple(metrics) or None,
        }  # fmt: skip
        named = {"perturbation_key": perturbation, "cell_type_key": cell_type, "batch_key": batch}
        options |= {key: value for key, value in named.items() if value is not None}
        made = evaluation_stage(
            cells_file(predictions, folder, name="predictions"),
            data_path(truth, folder),
            Path(out or folder / "scores"),
            _changed(recipe.evaluate, options),
            method=method, dataset=dataset, seed=recipe.seed, threads=threads, force=force,
        )  # fmt: skip
        scores = Scores.read([made])
    if out is None:
        scores.keep(scratch)
    return scores


def _declared_columns(predictions: AnyCells) -> dict[str, str]:
    """Return the columns that our predictions in the user's units say they have."""
    if not isinstance(predictions, anndata.AnnData):
        return {}
    columns = predictions.uns.get("perturbdiff", {}).get("columns", {})
    return {f"{name}_key": str(columns[name]) for name in _COLUMNS if name in columns}


def _changed(config: EvaluateConfig, options: dict[str, Any]) -> EvaluateConfig:
    return config.model_copy(update={key: value for key, value in options.items() if value is not None})


def report(
    scores: Scores | AnyPath | Sequence[Scores | AnyPath],
    out: AnyPath,
    *,
    title: str = "Perturbation predictions",
    models: Sequence[PerturbDiff | AnyPath] = (),
    splits: Sequence[pd.DataFrame | AnyPath] = (),
    statistics: Sequence[AnyPath] = (),
    against: str | None = None,
    force: bool = False,
) -> Path:
    """Compare methods on one HTML page that needs no network.

    Parameters
    ----------
    scores
        What `evaluate` or `PerturbDiff.evaluate` returned, or folders of ``perturbdiff evaluate``; one or several.
    out
        The page (.html). Beside it, folders with its figures and tables are written.
    title
        Heading of the page.
    models
        Models or bundles, for their training curves and recipes.
    splits
        Splits, for a table of what was held out.
    statistics
        Folders of ``perturbdiff stats``.
    against
        Method to compare the model with. Default: ``nearest-context`` if it was scored.
    force
        Write even if an equal page is at ``out``.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a folder is none of `evaluate`'s, or no method is called ``against``.

    Examples
    --------
    >>> page = perturbdiff.report(scores, folder / "report.html", models=[trained])
    """
    given = [scores] if isinstance(scores, Scores | str | Path) else list(scores)
    runs = [path for one in given for path in (one.folders if isinstance(one, Scores) else [Path(one)])]
    with working() as folder:
        parts = []
        for number, one in enumerate(splits):
            (folder / str(number)).mkdir()
            parts.append(split_file(one, folder / str(number)))
        bundles = [Path(m) if isinstance(m, str | Path) else m.path for m in models]
        return write_report(
            runs, Path(out), title=title, bundles=bundles, splits=parts,
            statistics=[Path(s) for s in statistics], against=against, force=force,
        )  # fmt: skip
