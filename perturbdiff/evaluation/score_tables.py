"""`merge`: the parts of one evaluation in, the folder of a single run out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from perturbdiff.conditions.condition import LABELS
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.scoring.aggregate import aggregate, condition_chance, condition_rows
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope
from perturbdiff.runtime import job_shards, provenance, tabular, untrusted
from perturbdiff.runtime.errors import UserError, listing

FEW_CELLS = 10
FEW_PERTURBATIONS = 5
UNDEFINED = 0.2  # share of perturbations without a value
LIBRARY = 2.0  # factor between predicted and real library sizes
DIFFERENTIAL = {"real": "de_real.parquet", "predicted": "de_pred.parquet"}
CHANCE = ("scope_kind", "scope", "metric", "chance")
COLLAPSE = ("scope_kind", "scope", "real", "predicted", "ratio", "verdict")
PART = "part.json"
"""File that tells a part from a whole evaluation."""
_CSV_ROWS = 200_000  # a table with more rows has no CSV twin
_GROUP_ROWS = 1 << 19  # rows of a row group of the DE tables
_FRAMES = ("metrics", "conditions", "chance", "collapse", "points")
_STAGES = ("evaluate", "ceiling")

Finding = dict[str, Any]


def findings(
    metrics: pd.DataFrame, conditions: pd.DataFrame, collapse: pd.DataFrame, config: EvaluateConfig
) -> list[Finding]:
    """Return ``kind``, ``text`` and ``count`` of everything that limits what the numbers say.

    Parameters
    ----------
    metrics, conditions, collapse
        Tables of a whole evaluation as `perturbdiff.evaluation.score_tables` writes them.
    """
    pooled = pd.DataFrame(metrics[metrics["scope_kind"] == POOLED])
    found = [
        *_few_cells(conditions),
        *_few_perturbations(pooled),
        *_no_de(pooled, config),
        *_undefined(pooled),
        *_library(conditions),
        *_collapse(collapse),
    ]
    return [{"kind": kind, "text": text, "count": count} for kind, text, count in found]


def _few_cells(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    found = []
    for column, what in (("n_cells", "real"), ("n_predicted", "predicted")):
        if few := int((conditions[column] < FEW_CELLS).sum()):
            text = (
                f"{few} of {len(conditions)} conditions have fewer than {FEW_CELLS} {what} cells; "
                "their values are mostly noise"
            )
            found.append(("few_cells", text, few))
    return found


def _few_perturbations(pooled: pd.DataFrame) -> list[tuple[str, str, int]]:
    coupled = pooled[pooled["metric"].str.startswith("PDS") | (pooled["metric"] == "ES")]
    num = pooled.loc[pooled["perturbation"] != "*", "perturbation"].nunique()
    if coupled.empty or num >= FEW_PERTURBATIONS:
        return []
    noun = "1 perturbation" if num == 1 else f"{num} perturbations"
    text = f"only {noun} to tell apart; discrimination scores (PDS) and ES mean little"
    return [("few_perturbations", text, num)]


def _no_de(pooled: pd.DataFrame, config: EvaluateConfig) -> list[tuple[str, str, int]]:
    counts = pooled.loc[pooled["metric"] == "n_DE_real", "value"]
    none, few = int((counts == 0).sum()), int((counts < config.min_de).sum())
    if not few:
        return []
    text = f"{few} of {len(counts)} perturbations have fewer than {config.min_de} real DE genes in the pool"
    if none:
        text += f", {none} of them none, which DEOver and DEPrec count as 0"
    return [("no_de", f"{text}; DEOver_10 and DEPrec_10 leave them out", few)]


def _undefined(pooled: pd.DataFrame) -> list[tuple[str, str, int]]:
    several = pooled[pooled["perturbation"] != "*"]
    shares = several.assign(missing=several["status"] == "undefined").groupby("metric", sort=False)["missing"]
    names = [str(name) for name, share in shares.mean().items() if share > UNDEFINED]
    if not names:
        return []
    text = (
        f"{listing(names)} {'is' if len(names) == 1 else 'are'} undefined for more than a fifth of the perturbations; "
        "the means are over the others"
    )
    return [("undefined", text, len(names))]


def _library(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    ratios = conditions["library_ratio"].dropna() if "library_ratio" in conditions else pd.Series(dtype=float)
    if ratios.empty or 1 / LIBRARY <= (middle := float(ratios.median())) <= LIBRARY:
        return []
    far = int(((ratios < 1 / LIBRARY) | (ratios > LIBRARY)).sum())
    text = (
        f"predicted cells hold {middle:.2g} times the normalised counts of real cells (median over conditions); "
        "are both sides normalised alike?"
    )
    return [("scale", text, far)]


def _collapse(collapse: pd.DataFrame) -> list[tuple[str, str, int]]:
    if collapse.empty:
        return []
    bad = collapse[~collapse["verdict"].isin(["as different as the truth", "less alike than the truth"])]
    pooled = pd.DataFrame(bad[bad["scope_kind"] == POOLED])
    found = []
    for row in pooled.to_dict("records"):
        text = (
            f"predictions of different perturbations: {row['verdict']} (median correlation of changes "
            f"{row['predicted']:.2f}, real {row['real']:.2f}; size of changes {row['ratio']:.2f} of the real ones)"
        )
        found.append(("collapse", text, 1))
    if labels := sorted(set(bad["scope"]) - set(pooled["scope"])):
        text = f"in {len(labels)} contexts predictions are collapsed or too alike: {listing(labels)}"
        found.append(("collapse", text, len(labels)))
    return found


@dataclass
class Tables:
    """What was found in some scopes.

    Attributes
    ----------
    metrics
        Rows of `aggregate.scope_rows`.
    conditions
        The conditions whose cells were compared, as `scoring.Scored` has them.
    chance
        scope_kind, scope, metric, chance of the metrics of `metrics`.
    collapse
        scope_kind, scope, real, predicted, ratio, verdict.
    points
        The embedding; empty in a part without the pool.
    facts
        Of the inputs, the same in every part; ``largest_predicted_value`` is of the cells read.
    findings
        What the inputs gave rise to say.
    """

    metrics: pd.DataFrame = field(default_factory=pd.DataFrame)
    conditions: pd.DataFrame = field(default_factory=pd.DataFrame)
    chance: pd.DataFrame = field(default_factory=pd.DataFrame)
    collapse: pd.DataFrame = field(default_factory=pd.DataFrame)
    points: pd.DataFrame = field(default_factory=pd.DataFrame)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write a part."""
        for name in _FRAMES:
            if len(table := getattr(self, name)):
                table.to_parquet(folder / f"{name}.parquet", index=False)
        record = {"facts": self.facts, "findings": self.findings}
        (folder / PART).write_text(provenance.as_json(record))

    @classmethod
    def load(cls, folder: Path) -> Tables:
        """Read a part."""
        paths = {name: folder / f"{name}.parquet" for name in _FRAMES}
        frames = {
            name: tabular.read_parquet(path, "make this part again")
            for name, path in paths.items()
            if path.is_file()
        }
        record = untrusted.read(folder / PART, "JSON")
        try:
            return cls(**frames, facts=dict(record["facts"]), findings=list(record["findings"]))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{folder / PART}: is no record of a part; make this part again") from None

    @classmethod
    def joined(cls, parts: Sequence[Tables]) -> Tables:
        """Return the tables of all parts in the order of a single run."""
        frames = {}
        for name in _FRAMES:
            if found := [t for part in parts if len(t := getattr(part, name))]:
                frames[name] = pd.concat(found, ignore_index=True)
        for name in ("metrics", "chance", "collapse"):
            if name in frames:
                frames[name] = _by_scope(frames[name])
        if "conditions" in frames:
            frames["conditions"] = frames["conditions"].sort_values(list(LABELS), ignore_index=True)
        highest = max(part.facts["largest_predicted_value"] for part in parts)
        facts = {**parts[0].facts, "largest_predicted_value": highest}
        return cls(**frames, facts=facts, findings=parts[0].findings)


def _by_scope(table: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by scope, pool first, those of a scope staying as they are."""
    order = [
        i
        for _, i in sorted(
            ((kind != POOLED, kind, label), i)
            for i, (kind, label) in enumerate(zip(table["scope_kind"], table["scope"], strict=True))
        )
    ]
    return table.iloc[order].reset_index(drop=True)


def write_folder(
    folder: Path, tables: Tables, config: EvaluateConfig, names: dict[str, str], seed: int
) -> dict[str, Any]:
    """Write all tables but those of DE; return the summary, which is written too.

    Parameters
    ----------
    names
        kind, method and dataset.
    seed
        Of the intervals.
    """
    conditions = tables.conditions
    metrics = pd.concat([tables.metrics, condition_rows(conditions)], ignore_index=True)
    who = pd.DataFrame({k: [names[k]] * len(metrics) for k in ("method", "dataset")})
    metrics = pd.concat([who, metrics.assign(definition=config.definition)], axis=1)
    chance = pd.concat(
        [t for t in (tables.chance, condition_chance(conditions)) if len(t)] or [pd.DataFrame()]
    )
    means = aggregate(
        metrics,
        _members(conditions),
        chance=chance,
        draws=config.bootstrap,
        seed=seed,
        definition=config.definition,
    )
    summary = {
        **names,
        "definition": config.definition,
        "alpha": config.alpha,
        "min_de": config.min_de,
        "num_conditions": len(conditions),
        "num_cells_real": int(conditions["n_cells"].sum()),
        "num_cells_predicted": int(conditions["n_predicted"].sum()),
        **tables.facts,
        "headline": _headline(means),
        "collapse": tables.collapse.to_dict("records"),
        "findings": [*tables.findings, *findings(metrics, conditions, tables.collapse, config)],
    }
    metrics.to_parquet(folder / "metrics.parquet", index=False)
    if len(metrics) <= _CSV_ROWS:
        tabular.write_csv(metrics, folder / "metrics.csv")
    tabular.write_csv(means, folder / "aggregate.csv")
    tabular.write_csv(conditions, folder / "conditions.csv")
    tabular.write_csv(pd.DataFrame(tables.collapse, columns=pd.Index(COLLAPSE)), folder / "collapse.csv")
    tables.points.to_parquet(folder / "embedding.parquet", index=False)
    summary = _plain(summary)
    (folder / "summary.json").write_text(provenance.as_json(summary))
    return summary


def _members(conditions: pd.DataFrame) -> dict[str, list[tuple[str, str]]]:
    """Return each context's conditions as (scope, perturbation)."""
    scope = conditions["cell_type"] + "|" + conditions["batch"]
    keys = list(zip(scope, conditions["perturbation"], strict=True))
    found: dict[str, list[tuple[str, str]]] = {}
    for context, key in zip(conditions["context"], keys, strict=True):
        if context != "":
            found.setdefault(str(context), []).append(key)
    return found


def _headline(means: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the mean over defined values per metric: pooled, and the mean of the contexts."""
    chosen = means[means["scope_kind"].isin([POOLED, "contexts"])]
    return {
        str(kind): dict(zip(group["metric"], group["nanmean"].astype(float), strict=True))
        for kind, group in chosen.groupby("scope_kind", sort=False)
    }


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return ``record`` with NaN as null, which JSON knows."""
    return json.loads(json.dumps(record, default=float), parse_constant=lambda _: None)


class DifferentialWriter:
    """Writes the DE tables of both sides, scope after scope, in row groups of a scope's perturbations.

    Use as a context manager.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = {side: folder / name for side, name in DIFFERENTIAL.items()}
        self._writers: dict[str, pq.ParquetWriter] = {}

    def add(self, scope: Scope, comparison: Comparison) -> None:
        """Write a scope."""
        step = max(1, _GROUP_ROWS // max(1, len(comparison.genes)))
        for side in DIFFERENTIAL:
            for first in range(0, len(comparison.perturbations), step):
                rows = slice(first, first + step)
                self.add_group(side, _differential_table(scope, comparison, side, rows))

    def add_group(self, side: str, table: pa.Table) -> None:
        """Write a row group."""
        if side not in self._writers:
            self._writers[side] = pq.ParquetWriter(self._paths[side], table.schema, compression="zstd")
        self._writers[side].write_table(table, row_group_size=max(1, len(table)))

    def __enter__(self) -> DifferentialWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()


def differential_scopes(path: Path) -> list[Scope]:
    """Return the scope of each row group of a DE table."""
    with pq.ParquetFile(path) as file:
        names = ["scope_kind", "scope"]
        first = [file.read_row_group(i, columns=names).slice(0, 1) for i in range(file.num_row_groups)]
    return [(t["scope_kind"][0].as_py(), t["scope"][0].as_py()) for t in first]


def read_group(path: Path, number: int) -> pa.Table:
    """Return a row group of a DE table."""
    with pq.ParquetFile(path) as file:
        return file.read_row_group(number)


def _differential_table(scope: Scope, comparison: Comparison, side: str, rows: slice) -> pa.Table:
    """Return a row per perturbation and gene."""
    found, genes = getattr(comparison, side), comparison.genes
    perturbations = comparison.perturbations[rows]
    num, width = len(perturbations), len(genes)

    def repeated(names: Sequence[str], codes: np.ndarray) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(list(names)))

    return pa.table(
        {
            "scope_kind": repeated(scope[:1], np.zeros(num * width)),
            "scope": repeated(scope[1:], np.zeros(num * width)),
            "perturbation": repeated(perturbations, np.repeat(np.arange(num), width)),
            "gene": repeated(genes, np.tile(np.arange(width), num)),
            "p": found.p[rows].ravel(),
            "q": found.q[rows].ravel(),
            "log2fc": found.log2_fold[rows].ravel(),
            "mean": found.mean[rows].ravel().astype(np.float32),
            "control_mean": np.tile(found.control.astype(np.float32), num),
        }
    )


def merge(parts: Sequence[Path], out: Path, *, force: bool = False) -> Path:
    """Join the parts that `evaluate` or `ceiling` wrote with ``shard=(I, N)``.

    The tables and the manifest are those of a single run, to the last byte.

    Parameters
    ----------
    parts
        All N folders, in any order.
    out
        Folder to write.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a folder is no part, parts are missing or given twice, or they are not of the same evaluation.
    """
    ordered, records = job_shards.ordered([Path(part) for part in parts], "evaluate", _is_part)
    first = records[0]
    base = {key: first[key] for key in job_shards.DETERMINE}
    base["config"] = {k: v for k, v in first["config"].items() if k != "shard"}
    with provenance.stage(
        str(base["stage"]),
        Path(out),
        config={},
        inputs=job_shards.roles(ordered),
        folder=True,
        force=force,
        base=base,
    ) as stage:
        if not stage.skip:
            found = Tables.joined([Tables.load(part) for part in ordered])
            names = {key: str(first["results"][key]) for key in ("kind", "method", "dataset")}
            fields = {k: v for k, v in base["config"].items() if k in EvaluateConfig.model_fields}
            config = EvaluateConfig.model_validate(fields)
            summary = write_folder(stage.path, found, config, names, int(base["seed"]))
            _join_differential(ordered, stage.path)
            stage.results.update(summary)
            stage.notes["parts"] = len(ordered)
    return Path(out)


def _is_part(folder: Path, manifest: Mapping[str, Any]) -> bool:
    return manifest["stage"] in _STAGES and (folder / PART).is_file()


def _join_differential(parts: Sequence[Path], folder: Path) -> None:
    """Copy the DE tables row group by row group, in the order of the scopes."""
    with DifferentialWriter(folder) as writer:
        for side, name in DIFFERENTIAL.items():
            groups: list[tuple[tuple[bool, Scope], Path, int]] = []
            for path in (part / name for part in parts):
                scopes = differential_scopes(path) if path.is_file() else []
                groups += [((scope[0] != POOLED, scope), path, i) for i, scope in enumerate(scopes)]
            for _, path, number in sorted(groups):
                writer.add_group(side, read_group(path, number))
