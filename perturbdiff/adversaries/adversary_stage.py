"""The stage `adversaries`: every known attack on one truth, made as predictions, scored, and judged."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from perturbdiff.adversaries import gains
from perturbdiff.adversaries.attacks import ATTACKS, HONEST, Attack
from perturbdiff.adversaries.honest_cells import HonestCells
from perturbdiff.conditions.condition import LABELS, Condition
from perturbdiff.conditions.targets import Targets
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.evaluation_stage import CEILING, ceiling, evaluate
from perturbdiff.evaluation.readers import inputs, pairing
from perturbdiff.evaluation.readers.cells_by_condition import Cells
from perturbdiff.io.matrices import Sparse
from perturbdiff.method import SOURCES, Method
from perturbdiff.predictions import PredictionWriter
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.files import existing
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

_OUR_COLUMNS = {key: EvaluateConfig.model_fields[key].default for key in ("perturbation_key", "cell_type_key", "batch_key")}


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

    What is finished is recognised and left, so that an interrupted run continues.

    Parameters
    ----------
    truth
        Store folder, or AnnData whose columns ``config`` names.
    out
        Folder: ``predictions`` (a file per attack and honest reference), ``scores`` (the folders of `evaluate` and
        `ceiling`) and ``table`` (adversaries.csv, gains.csv, adversaries.txt).
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
    files = {"truth": Path(truth), **({"split": Path(split)} if split else {})}
    real = inputs.open_truth(existing(files["truth"], "truth"), config)
    wanted = pairing.held_out_conditions(files["split"], part, real) if split else list(real.rows)
    targets = Targets.read(None, sorted({c.perturbation for c in real.rows}), real.reader.genes)
    honest = HonestCells(real, sorted(wanted), targets, seed)
    name = dataset or str(real.names.get("dataset") or files["truth"].name)
    scores = Path(out) / "scores"
    more: dict[str, Any] = {"dataset": name, "seed": seed, "threads": threads, "force": force}
    ceiling(files["truth"], scores / CEILING, config, split=split, part=part, **more)
    refused = {}
    for attack in (*HONEST.values(), *ATTACKS.values()):
        file = Path(out) / "predictions" / f"{attack.name}.h5ad"
        _write(attack, honest, files, file, name, part, force=force)
        skipping = config.model_copy(update={"missing": "skip"})
        try:
            evaluate(file, files["truth"], scores / attack.name, skipping, method=attack.name, **more)
        except UserError as error:
            if attack.name in HONEST:
                raise
            refused[attack.name] = str(error).replace(str(file), file.name)
    return gains.write(scores, Path(out) / "table", refused, force=force)


def _write(
    attack: Attack,
    honest: HonestCells,
    files: dict[str, Path],
    out: Path,
    dataset: str,
    part: str,
    *,
    force: bool,
) -> None:
    """Write one attack's predictions file."""
    config = {"attack": attack.name, "part": part, "dataset": dataset}
    with provenance.stage("adversaries", out, config=config, inputs=files, seed=honest.seed, force=force) as stage:
        if stage.skip:
            return
        truth = honest.truth
        made_by = Method(baseline=attack.name, seed=honest.seed) if attack.name in HONEST else Method(seed=honest.seed)
        with PredictionWriter(
            stage.path,
            truth.reader.genes,
            method=attack.name,
            control=truth.control or "control",
            target_sum=honest.depth,
            dataset=dataset,
            facts=made_by.to_json(),
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
        writer.append(block, pd.DataFrame({**labels, "source": source}, index=range(block.shape[0])))
