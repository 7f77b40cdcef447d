"""`evaluate --definition cell-eval2`: both sides in, the folder of scores out."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import Condition
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.cell_eval2.anchors import (
    Ends,
    KeptEnds,
    MeanResponse,
    RealSide,
    ScopeEnds,
    baseline,
    replicates,
    write_ends,
)
from perturbdiff.evaluation.cell_eval2.count_tables import (
    Scored,
    aggregate,
    conditions,
    headline,
    metric_rows,
    splits,
    tests_of,
)
from perturbdiff.evaluation.cell_eval2.measurements import (
    Pair,
    Profile,
    Reference,
    Side,
    measure,
    reference_of,
)
from perturbdiff.evaluation.cell_eval2.metrics import DEFINITION, RULES, SCORED, Rules
from perturbdiff.evaluation.cell_eval2.panels import Panel, Panels, panels_of
from perturbdiff.evaluation.cell_eval2.scores import drawn_levels, levels, score
from perturbdiff.evaluation.readers.cells_by_condition import Cells
from perturbdiff.evaluation.score_tables import DifferentialWriter
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_CSV_ROWS = 200_000  # a table with more rows is not written as CSV too


def check_settings(config: EvaluateConfig, shard: tuple[int, int]) -> None:
    """Raise a `UserError` for settings that the rules of cell-eval2 leave no choice of."""
    fixed = {
        "--metrics": bool(config.metrics),
        "--predicted-controls": config.controls == "own",
        "--shard": shard[1] > 1,
    }
    if chosen := [option for option, given in fixed.items() if given]:
        raise UserError(
            f"the rules of {DEFINITION} leave no choice of {listing(chosen)}; leave it out, or take another definition"
        )


def score_counts(
    folder: Path,
    predictions: Cells,
    truth: Cells,
    config: EvaluateConfig,
    names: dict[str, str],
    *,
    seed: int,
    threads: int | None,
    truth_hash: str,
    ends: Path | None = None,
) -> dict[str, Any]:
    """Score counts by the rules that ``config`` names, write all tables into ``folder`` and return the summary.

    Both ends of the scale are read from the folder ``ends``, or made. ``truth_hash`` is the SHA-256 of the real cells.

    Raises
    ------
    UserError
        As `panels_of`, and if a value is no count.
    """
    rules = RULES[config.rules]
    panels = panels_of(predictions, truth, config, rules)
    kept = None if ends is None else KeptEnds(ends)
    scorer = _Scorer(panels, rules, config.bootstrap, seed, threads, truth_hash, kept)
    with DifferentialWriter(folder) as writer:
        scored = [scorer.score(number, writer) for number in range(len(panels.panels))]
    write_ends(folder, [one.made for one in scored])
    digest = panels.digest(rules, [one.controls for one in scored])
    _note_ends(scored, panels)
    marks = {"definition": DEFINITION, "rules": digest}
    metrics = pd.concat([metric_rows(one) for one in scored], ignore_index=True)
    metrics = metrics.assign(**marks)
    for place, key in enumerate(("method", "dataset")):
        metrics.insert(place, key, names[key])
    means = aggregate(scored, rules).assign(chance=np.nan, **marks)
    by_condition = conditions(scored)
    metrics.to_parquet(folder / "metrics.parquet", index=False)
    if len(metrics) <= _CSV_ROWS:
        tabular.write_csv(metrics, folder / "metrics.csv")
    tabular.write_csv(means, folder / "aggregate.csv")
    tabular.write_csv(splits(scored, rules).assign(**marks), folder / "replicates.csv")
    tabular.write_csv(by_condition, folder / "conditions.csv")
    summary = {
        **names,
        **marks,
        "profile": rules.profile,
        "parameters": asdict(rules),
        "alpha": rules.alpha,
        "num_conditions": len(by_condition),
        "num_perturbations": len({c.perturbation for p in panels.panels for c in p.conditions}),
        "num_cells_real": int(by_condition["n_cells"].sum()),
        "num_cells_predicted": int(by_condition["n_predicted"].sum()),
        "num_controls": sum(len(one.panel.real.controls) for one in scored),
        "num_genes": len(panels.genes),
        "num_genes_tested": {one.panel.scope[1]: one.num_tested for one in scored},
        "contexts": [p.scope[1] for p in panels.panels if p.scope[0] == "context"],
        "control": truth.control,
        "controls": config.controls,
        "made_by": predictions.made_by.to_json(),
        "targets": _told_targets(panels),
        **panels.notes.facts,
        "scaled": headline(means),
        "findings": _without_folders(panels, [predictions.reader.path, truth.reader.path]),
    }
    summary = json.loads(json.dumps(summary, default=float), parse_constant=lambda _: None)
    (folder / "summary.json").write_text(provenance.as_json(summary))
    return summary


def score_ends(
    folder: Path,
    truth: Cells,
    wanted: Sequence[Condition],
    config: EvaluateConfig,
    names: dict[str, str],
    *,
    seed: int,
    threads: int | None,
    truth_hash: str,
) -> dict[str, Any]:
    """Write both ends of the scale of some real conditions alone, for any method on these, and return the summary.

    Raises
    ------
    UserError
        As `score_counts`.
    """
    rules = RULES[config.rules]
    panels = panels_of(replace(truth, rows={one: truth.rows[one] for one in wanted}), truth, config, rules)
    scorer = _Scorer(panels, rules, 0, seed, threads, truth_hash, None)
    found = [scorer.ends(number) for number in range(len(panels.panels))]
    made = [one for one, _ in found]
    write_ends(folder, made)
    summary = {
        **names,
        "definition": DEFINITION,
        "rules": panels.digest(rules, [controls for _, controls in found]),
        "num_conditions": len(wanted),
        "num_replicates": min(len(one.ends.replicates) for one in made),
        "findings": _without_folders(panels, [truth.reader.path]),
    }
    (folder / "summary.json").write_text(provenance.as_json(summary))
    return summary


@dataclass(frozen=True)
class _Scorer:
    """Scores one context after the other; what it holds is the same for all of them."""

    panels: Panels
    rules: Rules
    draws: int
    seed: int
    threads: int | None
    truth_hash: str
    kept: KeptEnds | None

    def score(self, number: int, writer: DifferentialWriter) -> Scored:
        """Measure both sides of a context and make the ends, one after the other; write the tests of both sides.

        What is no longer needed is let go: the predictions once they are scored, the sorted controls before the
        replicates.
        """
        panel = self.panels.panels[number]
        cells, names = panel.real, tuple(sorted(panel.real.rows))
        reference = reference_of(cells.read, cells.controls, self.rules)
        controls, num_tested = reference.profile, int(reference.tested.sum())
        key = self.panels.key(panel, self.rules, controls, self.truth_hash)
        ends = None if self.kept is None else self.kept.of(panel.scope, key, names)
        targets = self.panels.positions(names)
        response = MeanResponse(targets)
        real = self._measure(panel, "real", reference, writer, response if ends is None else None)
        order = np.argsort(np.argsort(np.array(self.panels.genes, dtype=object), kind="stable"))
        predicted = self._measure(panel, "predicted", reference, writer)
        method = score(Pair(real, predicted, targets, order), self.rules)
        num_predicted = predicted.num_cells
        del predicted
        if ends is None:
            truth = RealSide(cells, real, targets, order)
            low = baseline(truth, reference, response.taken(), self.rules, threads=self.threads)
            del reference
            ends = Ends(low, replicates(truth, self.rules, threads=self.threads))
        drawn = None
        if self.draws:
            seed = (self.seed, number)
            drawn = drawn_levels(method, ends.baseline, ends.replicates, draws=self.draws, seed=seed)
        return Scored(
            panel=panel,
            key=key,
            perturbations=names,
            controls=controls,
            num_tested=num_tested,
            sizes=np.linalg.norm(real.change, axis=1),
            num_real=real.num_cells,
            num_predicted=num_predicted,
            method=method,
            ends=ends,
            point=levels(method, ends.baseline, ends.replicates),
            draws=drawn,
        )

    def ends(self, number: int) -> tuple[ScopeEnds, Profile]:
        """Make the ends of a context, and return the profile of its controls too."""
        panel = self.panels.panels[number]
        cells, names = panel.real, tuple(sorted(panel.real.rows))
        reference = reference_of(cells.read, cells.controls, self.rules)
        controls = reference.profile
        key = self.panels.key(panel, self.rules, controls, self.truth_hash)
        targets = self.panels.positions(names)
        response = MeanResponse(targets)
        real = self._measure(panel, "real", reference, None, response)
        order = np.argsort(np.argsort(np.array(self.panels.genes, dtype=object), kind="stable"))
        truth = RealSide(cells, real, targets, order)
        low = baseline(truth, reference, response.taken(), self.rules, threads=self.threads)
        del reference  # the sorted controls, before the replicates
        made = Ends(low, replicates(truth, self.rules, threads=self.threads))
        return ScopeEnds(panel.scope, key, names, made), controls

    def _measure(
        self,
        panel: Panel,
        name: Literal["real", "predicted"],
        reference: Reference,
        writer: DifferentialWriter | None,
        response: MeanResponse | None = None,
    ) -> Side:
        """Measure one side and write its tests, if there is a writer."""
        real = name == "real"
        side = measure(
            panel.real.read if real else self.panels.read,
            panel.real.rows if real else panel.predicted,
            reference,
            self.rules,
            threads=self.threads,
            label="real cells" if real else "predictions",
            seen=None if response is None else response.add,
        )
        if writer is not None:
            for table in tests_of(panel.scope, side, self.panels.genes):
                writer.add_group(name, table)
        return side


def _note_ends(scored: Sequence[Scored], panels: Panels) -> None:
    """Say where there is no replicate, or one that is not better than the baseline."""
    for one in scored:
        label = one.panel.scope[1]
        if not one.ends.replicates:
            text = f"{label}: too few cells to halve, so that there is no replicate and no scaled score"
            panels.notes.add("replicate", text, len(one.perturbations))
            continue
        if unclear := [name for name in SCORED if np.isnan(one.point.scaled[name][0])]:
            text = (
                f"{label}: a replicate is no better than the mean response by {listing(unclear)}, so that these data "
                "cannot tell, and there is no mean of the six scaled scores"
            )
            panels.notes.add("replicate", text, len(unclear))
        sizes = np.array([len(rows) for rows in one.panel.real.rows.values()])
        if small := int((sizes < 2).sum()):
            text = f"{label}: {small} perturbations of one cell cannot be halved and are not part of the replicate"
            panels.notes.add("few_cells", text, small)


def _told_targets(panels: Panels) -> dict[str, Any]:
    targets = panels.targets
    return {
        "source": targets.source or "names of the perturbations",
        "with_target": len(targets.genes) - len(targets.without),
        "without": list(targets.without),
        "unmeasured": list(targets.unmeasured),
        "unknown": list(targets.unknown),
    }


def _without_folders(panels: Panels, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the remarks, which name files without their folders, because scores are shared."""
    found = [dict(entry) for entry in panels.notes.entries]
    for path in sorted(set(paths), key=lambda one: -len(str(one))):
        found = [{**entry, "text": entry["text"].replace(str(path), path.name)} for entry in found]
    return found
