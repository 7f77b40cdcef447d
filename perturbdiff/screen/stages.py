"""All stages for one screen, one after another, into one folder. Each is the function that its own command calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perturbdiff.baselines import NAMES
from perturbdiff.baselines import predict as predict_baseline
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.evaluation.evaluation_stage import ceiling, evaluate
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.report.loading.results import Run, read_runs
from perturbdiff.report.page.page import headline, write_report
from perturbdiff.runtime.errors import NeedsForce
from perturbdiff.sampling.sampling_stage import sample
from perturbdiff.screen.plan import MODEL, Plan
from perturbdiff.splits.splits import make_split
from perturbdiff.training.training_stages import train

logger = logging.getLogger(__name__)

_KEY_METRICS = (
    ("energy_distance", "energy distance", min),
    ("PDCorr", "correlation of changes (PDCorr)", max),
)


@dataclass(frozen=True)
class Finished:
    """What a run ends with: the report, and what came out in three lines."""

    report: Path
    lines: tuple[str, ...]


def run_plan(
    plan: Plan, out: Path, *, recipe: Path | None = None, device: str = "auto", force: bool = False
) -> Finished:
    """Carry a plan out: store, split, model, predictions, baselines, ceiling, scores and report.

    What is finished is recognised and left. An interrupted run continues when it is started again.

    Parameters
    ----------
    plan
        The plan.
    out
        Folder for everything.
    recipe
        The recipe, if it lies in ``out`` already and was edited; default: it is written there.
    device
        ``auto``, ``cpu`` or ``cuda``.
    force
        Replace outputs of other settings that took long to make, and keep them as ``NAME.previous``.

    Raises
    ------
    UserError
        If a stage cannot run; the message says what to do.
    StoppedEarly
        If training stops before its end; the same command continues.
    """
    config = recipes.load(recipe or plan.write(out))
    folder = _Folder(out, plan, config, device)
    stages: list[tuple[str, Callable[[bool], None]]] = [
        ("preprocess: counts become a store", folder.preprocess),
        ("split: what is held out", folder.split),
        ("train: the model", folder.train),
        ("sample: predict the held-out conditions", folder.sample),
        (f"baseline: {len(NAMES)} simple methods predict the same", folder.baselines),
        ("ceiling: real cells against real cells", folder.ceiling),
        ("evaluate: scores of all methods", folder.evaluate),
        ("report: one page", folder.report),
    ]
    for number, (title, stage) in enumerate(stages, 1):
        logger.info("[%d/%d] %s", number, len(stages), title)
        try:
            stage(False)
        except NeedsForce:
            if not force:
                raise
            stage(True)
    return Finished(folder.page, tuple(result_lines(folder.scored)))


class _Folder:
    """The folder of a run, and its stages."""

    def __init__(self, out: Path, plan: Plan, config: Config, device: str) -> None:
        self._plan, self._config, self._device = plan, config, device
        self._seed = config.seed
        self._store, self._split, self._bundle = out / "store", out / "split.parquet", out / "bundle"
        self._predictions, self._metrics, self.page = (
            out / "predictions",
            out / "metrics",
            out / "report.html",
        )
        self.scored = [self._metrics / name for name in (MODEL, *NAMES, "ceiling")]

    def preprocess(self, force: bool) -> None:  # noqa: FBT001
        obs = [self._plan.obs] if self._plan.obs else []
        preprocess([self._plan.source], self._store, self._config.data, obs=obs, seed=self._seed, force=force)

    def split(self, force: bool) -> None:  # noqa: FBT001
        make_split(self._store, self._split, self._config, seed=self._seed, force=force)

    def train(self, force: bool) -> None:  # noqa: FBT001
        train(self._store, self._split, self._bundle, self._config, device=self._device, force=force)

    def sample(self, force: bool) -> None:  # noqa: FBT001
        sample(
            self._bundle, self._store, self._predicted(MODEL),
            split=self._split, device=self._device, seed=self._seed, force=force,
        )  # fmt: skip

    def baselines(self, force: bool) -> None:  # noqa: FBT001
        for name in NAMES:
            predict_baseline(
                name, self._store, self._split, self._predicted(name), seed=self._seed, force=force
            )

    def ceiling(self, force: bool) -> None:  # noqa: FBT001
        ceiling(
            self._store, self._metrics / "ceiling", self._config.evaluate,
            split=self._split, dataset=self._plan.name, seed=self._seed, force=force,
        )  # fmt: skip

    def evaluate(self, force: bool) -> None:  # noqa: FBT001
        for name in (MODEL, *NAMES):
            evaluate(
                self._predicted(name), self._store, self._metrics / name, self._config.evaluate,
                method=name, dataset=self._plan.name, seed=self._seed, force=force,
            )  # fmt: skip

    def report(self, force: bool) -> None:  # noqa: FBT001
        write_report(
            self.scored, self.page, title=self._plan.name,
            bundles=[self._bundle], splits=[self._split], records=[self._predictions], force=force,
        )  # fmt: skip

    def _predicted(self, name: str) -> Path:
        return self._predictions / f"{name}.h5ad"


def result_lines(scored: list[Path]) -> list[str]:
    """Return the verdict, and the two main metrics of the model, the best baseline and the ceiling."""
    runs = read_runs(scored)
    verdict = headline(scored).splitlines()[-1].partition(": ")[2]
    return [verdict, *(_metric_line(runs, *metric) for metric in _KEY_METRICS)]


def _metric_line(runs: list[Run], metric: str, words: str, best: Callable[..., Run]) -> str:
    def value(run: Run) -> float:
        return run.score(metric)[0]

    model = next(run for run in runs if run.kind == "model")
    baselines = [run for run in runs if run.kind == "baseline" and not math.isnan(value(run))]
    parts = [f"{words}: {_number(value(model))}"]
    if baselines:
        chosen = best(baselines, key=value)
        parts.append(f"best baseline {chosen.method} {_number(value(chosen))}")
    parts += [f"ceiling {_number(value(run))}" for run in runs if run.kind == "ceiling"]
    return f"{', '.join(parts)} ({'lower' if best is min else 'higher'} is better)"


def _number(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.3f}"
