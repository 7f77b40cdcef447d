"""All stages for one screen, one after another, into one folder. Each is the function that its own command calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perturbdiff.baselines import NAMES
from perturbdiff.baselines import predict as predict_baseline
from perturbdiff.baselines.simple import BASELINES
from perturbdiff.config import recipes
from perturbdiff.config.settings import Config, EvaluateConfig
from perturbdiff.embeddings.embedding_tables import SemanticKind
from perturbdiff.evaluation.calibration.calibration_stage import calibrate
from perturbdiff.evaluation.ceiling_stage import CEILING, ceiling
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
from perturbdiff.reporting.figures.store_figures import write_figures
from perturbdiff.reporting.loading.results import Run, read_runs
from perturbdiff.reporting.page.page import headline, write_report
from perturbdiff.runtime.errors import NeedsForce, UserError
from perturbdiff.sampling.sampling_stage import sample
from perturbdiff.screen.plan import MODEL, Plan
from perturbdiff.splits.splits import make_split
from perturbdiff.statistics import write_statistics
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
    plan: Plan,
    out: Path,
    *,
    recipe: Path | None = None,
    embeddings: Mapping[SemanticKind, Path] | None = None,
    device: str = "auto",
    force: bool = False,
) -> Finished:
    """Carry a plan out: store, split, statistics, model, predictions, baselines, ceiling, calibration, scores, report.

    What is finished is recognised and left. An interrupted run continues when it is started again.

    Parameters
    ----------
    plan
        The plan.
    out
        Folder for everything.
    recipe
        The recipe, if it lies in ``out`` already and was edited; default: it is written there.
    embeddings
        Files with vectors of labels or genes.
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
    steps = Stages.within(
        out, config, plan.name, source=plan.source, obs=plan.obs, embeddings=embeddings or {}, device=device
    )
    stages: list[tuple[str, Callable[[Stages], None]]] = [
        ("preprocess: counts become a store", Stages.make_store),
        ("split: what is held out", Stages.make_split),
        ("stats: what the store holds", Stages.describe),
        ("train: the model", Stages.train),
        ("sample: predict the held-out conditions", Stages.sample),
        (f"baseline: {len(steps.baselines)} simple methods predict the same", Stages.predict_baselines),
        ("ceiling: real cells against real cells", Stages.score_ceiling),
        ("calibrate: which metrics mean something on these cells", Stages.calibrate),
        ("evaluate: scores of all methods", Stages.evaluate),
        ("report: one page", Stages.report),
    ]
    for number, (title, stage) in enumerate(stages, 1):
        logger.info("[%d/%d] %s", number, len(stages), title)
        try:
            stage(steps)
        except NeedsForce:
            if not force:
                raise
            stage(replace(steps, force=True))
    return Finished(steps.page, tuple(result_lines(steps.scored())))


@dataclass(frozen=True)
class Stages:
    """The stages of one screen and the places of their files. Each is the function that its own command calls.

    Attributes
    ----------
    out
        Folder of predictions, metrics and the report.
    config
        The recipe.
    name
        Name of the data set in tables.
    store, split, bundle
        Where they are, or will be.
    source, obs
        File with the cells, and the table of their labels if it lacks them.
    has_split
        Whether the split is there already, so that none is made.
    embeddings
        Files with vectors of labels or genes.
    device
        ``auto``, ``cpu`` or ``cuda``.
    jobs
        Worker processes of preprocessing; None: as many as pay.
    force
        Run every stage again.
    """

    out: Path
    config: Config
    name: str
    store: Path
    split: Path
    bundle: Path
    source: Path | None = None
    obs: Path | None = None
    has_split: bool = False
    embeddings: Mapping[SemanticKind, Path] = field(default_factory=dict)
    device: str = "auto"
    jobs: int | None = None
    force: bool = False

    @classmethod
    def within(
        cls, out: Path, config: Config, name: str, *, split: Path | None = None, **more: Any
    ) -> Stages:
        """Return the stages whose files all lie in one folder, except perhaps a split that is there already."""
        return cls(
            out, config, name, out / "store", split or out / "split.parquet", out / "bundle",
            has_split=split is not None, **more,
        )  # fmt: skip

    @property
    def page(self) -> Path:
        """Place of the report."""
        return self.out / "report.html"

    def predictions(self, name: str = MODEL) -> Path:
        """Return the place of a method's predicted cells."""
        return self.out / "predictions" / f"{name}.h5ad"

    @property
    def baselines(self) -> tuple[str, ...]:
        """The baselines to compare with; those that need vectors only if perturbations have some."""
        return tuple(BASELINES) if "perturbation" in self.embeddings else NAMES

    def scored(self, baselines: Sequence[str] | None = None) -> list[Path]:
        """Return the folders of scores: of the model, the baselines and the ceiling."""
        names = self.baselines if baselines is None else baselines
        return [self.out / "metrics" / name for name in (MODEL, *names, CEILING)]

    def make_store(self) -> None:
        """Preprocess. If genes are chosen from training cells, the split is made first, from the labels alone."""
        if self.source is None:
            raise UserError("there are no cells to preprocess")
        looks_at_split = self.config.data.hvg_cells == "train"
        if looks_at_split and not self.has_split:
            make_split(
                self.source, self.split, self.config, obs=self.obs, seed=self.config.seed, force=self.force
            )
        preprocess(
            [self.source], self.store, self.config.data, obs=[self.obs] if self.obs else [],
            split=self.split if looks_at_split else None, seed=self.config.seed, force=self.force,
            machine=Machine(jobs=self.jobs),
        )  # fmt: skip

    def make_split(self) -> None:
        """Choose what is held out, unless that is settled."""
        if not self.has_split and self.config.data.hvg_cells != "train":
            make_split(self.store, self.split, self.config, seed=self.config.seed, force=self.force)

    @property
    def statistics(self) -> Path:
        """Place of the tables and figures that describe the store."""
        return self.out / "statistics"

    def describe(self) -> None:
        """Describe the store."""
        write_statistics(
            self.store, self.statistics,
            split=self.split, draw=write_figures, seed=self.config.seed, force=self.force,
        )  # fmt: skip

    def train(self) -> None:
        """Train the model."""
        train(
            self.store, self.split, self.bundle, self.config,
            embeddings=self.embeddings, device=self.device, force=self.force,
        )  # fmt: skip

    def sample(self) -> None:
        """Predict the test conditions with the model."""
        sample(
            self.bundle, self.store, self.predictions(),
            split=self.split, device=self.device, seed=self.config.seed, force=self.force,
        )  # fmt: skip

    def predict_baselines(self, names: Sequence[str] | None = None) -> None:
        """Predict the same conditions with baselines."""
        for name in self.baselines if names is None else names:
            needed = name in BASELINES and BASELINES[name].needs_vectors
            predict_baseline(
                name, self.store, self.split, self.predictions(name),
                embedding=self.embeddings.get("perturbation") if needed else None,
                seed=self.config.seed, force=self.force,
            )  # fmt: skip

    def score_ceiling(self) -> None:
        """Score one half of the real cells against the other."""
        ceiling(
            self.store, self.out / "metrics" / CEILING, self._scoring,
            split=self.split, dataset=self.name, seed=self.config.seed, force=self.force,
        )  # fmt: skip

    @property
    def calibration(self) -> Path:
        """Place of what each metric is worth on these cells."""
        return self.out / "calibration"

    def calibrate(self) -> None:
        """Find out which metrics mean something on the test conditions."""
        calibrate(
            self.store, self.calibration, self._scoring,
            split=self.split, dataset=self.name, seed=self.config.seed, force=self.force,
        )  # fmt: skip

    def evaluate(self, baselines: Sequence[str] | None = None) -> None:
        """Score the predictions of the model and of baselines."""
        for name in (MODEL, *(self.baselines if baselines is None else baselines)):
            evaluate(
                self.predictions(name), self.store, self.out / "metrics" / name, self._scoring,
                method=name, dataset=self.name, calibration=self.calibration,
                seed=self.config.seed, force=self.force,
            )  # fmt: skip

    def report(self) -> None:
        """Write the page."""
        write_report(
            self.scored(), self.page, title=self.name, bundles=[self.bundle], splits=[self.split],
            statistics=[self.statistics], records=[self.out / "predictions"], force=self.force,
        )  # fmt: skip

    @property
    def _scoring(self) -> EvaluateConfig:
        """The settings of evaluation. Our predictions have our columns, whatever the recipe says of other files."""
        fields = EvaluateConfig.model_fields
        ours = {key: fields[key].default for key in ("perturbation_key", "cell_type_key", "batch_key")}
        return self.config.evaluate.model_copy(update=ours)


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
