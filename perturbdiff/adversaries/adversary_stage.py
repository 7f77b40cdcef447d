"""The stage `adversaries`: every known attack on one truth, made as predictions, scored, and judged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.adversaries import gains
from perturbdiff.adversaries.attacks import ATTACKS, HONEST, Attack
from perturbdiff.adversaries.honest_cells import HonestCells
from perturbdiff.conditions.condition import LABELS, Condition
from perturbdiff.conditions.targets import Targets
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.calibration.calibration_stage import calibrate
from perturbdiff.evaluation.ceiling_stage import CEILING, ceiling
from perturbdiff.evaluation.cell_eval2.count_stage import check_settings
from perturbdiff.evaluation.cell_eval2.metrics import DEFINITION, RULES
from perturbdiff.evaluation.cell_eval2.panels import CountReader
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.evaluation.readers import inputs, pairing
from perturbdiff.io.matrices import Sparse
from perturbdiff.method import SOURCES, Method
from perturbdiff.predictions import DEPTH, PredictionWriter
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.files import existing
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)


def adversaries(
    truth: Path,
    out: Path,
    config: EvaluateConfig,
    *,
    split: Path | None = None,
    part: str = "test",
    dataset: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    force: bool = False,
) -> Path:
    """Make the known attacks on a truth, score them beside honest cells, and tell what each gains.

    The truth is calibrated first, so that the verdicts are those of a report, and so that it is told which metrics
    the default score of these data has. An attack with controls of its own is scored from them.

    By the rules of cell-eval2 the attacks are handed in as counts. The first evaluation makes both ends of the scale,
    which stand for calibration and ceiling, and what these rules do not allow is told as refused.

    What is finished is recognised and left, so that an interrupted run continues.

    Parameters
    ----------
    truth
        Store folder, or AnnData whose columns ``config`` names.
    out
        Folder: ``predictions`` (a file per attack and honest reference), ``calibration``, ``scores`` (the folders of
        `evaluate` and `ceiling`) and ``table`` (adversaries.csv, gains.csv, adversaries.txt).
    split, part
        Attack the conditions of this part only; all of them without a split.
    seed
        Of all draws.
    threads
        As in `evaluate`.

    Returns
    -------
    Path
        The folder of tables.

    Raises
    ------
    UserError
        If an input is missing or has no control cells, or only one perturbed condition.
    """
    scaled = config.definition == DEFINITION
    if scaled:
        check_settings(config, (0, 1))
    truth = existing(Path(truth), "truth")
    files = {"truth": truth, **({"split": Path(split)} if split else {})}
    real = inputs.open_truth(truth, config)
    wanted = pairing.held_out_conditions(files["split"], part, real) if split else list(real.rows)
    perturbations = sorted({c.perturbation for c in real.rows})
    table = None if config.targets is None else Path(config.targets)
    targets = Targets.read(table, perturbations, real.reader.genes)
    counts = CountReader.of(real, None, RULES[config.rules].max_total) if scaled else None
    honest = HonestCells(real, sorted(wanted), targets, seed, counts)
    more: dict[str, Any] = {"dataset": dataset or real.names["dataset"], "seed": seed, "force": force}
    scores, refused = Path(out) / "scores", {}
    more["threads"] = threads
    beside: dict[str, Any] = {}
    if not scaled:
        beside["calibration"] = calibrate(
            truth, Path(out) / "calibration", config, split=split, part=part, **more
        )
        ceiling(truth, scores / CEILING, config, split=split, part=part, **more)
    config = config.model_copy(update={"missing": "skip"})
    for attack in (*HONEST.values(), *ATTACKS.values()):
        file = Path(out) / "predictions" / f"{attack.name}.h5ad"
        made = {"attack": attack.name, "part": part, **config.model_dump()}
        _write(attack, honest, file, made, files, force=force)
        said = config.model_copy(update={"controls": "own"}) if attack.controls else config
        try:
            found = evaluate(file, truth, scores / attack.name, said, method=attack.name, **beside, **more)
        except UserError as error:
            if attack.name in HONEST:
                raise
            refused[attack.name] = str(error).replace(str(file), file.name)
            continue
        if scaled:
            beside["ends"] = beside.get("ends", found)
    references = [*HONEST] if scaled else [CEILING, *HONEST]
    return gains.write(scores, Path(out) / "table", refused, references=references, force=force)


def _write(
    attack: Attack,
    honest: HonestCells,
    out: Path,
    made: dict[str, Any],
    files: dict[str, Path],
    *,
    force: bool,
) -> None:
    """Write one attack's predictions file."""
    with provenance.stage(
        "adversaries", out, config=made, inputs=files, seed=honest.seed, force=force
    ) as stage:
        if stage.skip:
            return
        truth = honest.truth
        made_by = (
            Method(baseline=attack.name, seed=honest.seed)
            if attack.name in HONEST
            else Method(seed=honest.seed)
        )
        with PredictionWriter(
            stage.path,
            truth.reader.genes,
            method=attack.name,
            control=truth.control or "control",
            target_sum=honest.depth,
            facts=made_by.to_json(),
            predicted=None if honest.counts is None else np.ones(len(truth.reader.genes), bool),
        ) as writer:
            conditions = attack.conditions(honest)
            with track(f"adversaries {attack.name}", len(conditions), "conditions") as progress:
                for condition in conditions:
                    _append(writer, attack.cells(honest, condition), condition, SOURCES[0])
                    progress.advance()
            groups = {c.group: c for c in reversed(conditions) if c.group in truth.controls}
            for _, condition in sorted(groups.items()):
                labelled = condition._replace(perturbation=str(writer.facts["control"]))
                _append(writer, attack.handed_controls(honest, condition), labelled, SOURCES[1])
            stage.results["cells"] = writer.n_cells


def _append(writer: PredictionWriter, cells: Iterator[Sparse], condition: Condition, source: str) -> None:
    for block in cells:
        labels = {label: getattr(condition, label) for label in LABELS}
        depths = {DEPTH: np.asarray(block.sum(axis=1)).ravel()} if writer.counts else {}
        obs = pd.DataFrame({**labels, "source": source, **depths}, index=range(block.shape[0]))
        writer.append(block, obs)
