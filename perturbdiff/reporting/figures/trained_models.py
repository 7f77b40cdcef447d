"""What was trained, and what it cost: a line per run to compare budgets by, and the curves of each training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbdiff.reporting.figures import condition_plots
from perturbdiff.reporting.figures.number_texts import duration, memory
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.figures.svg import Look, Plot, slug
from perturbdiff.reporting.loading.comparison import seed_of
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.results import Run, read_json, unique_names
from perturbdiff.runtime import files, provenance, tabular
from perturbdiff.runtime.errors import UserError

_RECORD, _MANIFEST = ".run.json", ".manifest.json"
_MOST_SECONDS = 3600


@dataclass(frozen=True)
class Cost:
    """What a run took, NaN where it is unknown.

    Attributes
    ----------
    train_cpu, train_wall, predict_wall
        Seconds. Of a tool they are its own, without the writing of its input and the reading of its output.
    memory
        Peak of the training, MiB.
    attempts
        A training that was continued has used more CPU time than its last attempt tells.
    """

    train_cpu: float = math.nan
    train_wall: float = math.nan
    predict_wall: float = math.nan
    memory: float = math.nan
    attempts: int = 1


def record_files(folders: Sequence[Path]) -> list[Path]:
    """Return the records of predictions (run record and manifest) that lie in some folders, by name.

    Raises
    ------
    UserError
        If a folder is missing or holds none.
    """
    paths: list[Path] = []
    for folder in folders:
        here = sorted(files.existing(folder, "folder of records").glob(f"*{_RECORD}"))
        if not here:
            raise UserError(
                f"{folder}: no record of predictions (NAME.h5ad{_RECORD}); give the folder that they lie in"
            )
        paths += [p for run in here for p in (run, _manifest_of(run)) if p.is_file()]
    return paths


def costs(runs: Sequence[Run], records: Sequence[Path], bundles: Sequence[Path]) -> dict[Run, Cost]:
    """Return what each run took, as far as the records of predictions and bundles tell.

    A run's predictions are known by the name in the manifest of their evaluation, a model's bundle by its content.
    """
    by_content = {files.sha256(path): read_json(path / "run.json") for path in bundles}
    by_run = {}
    for run, record in _predictions(runs, records).items():
        made = read_json(_manifest_of(record))
        by_run[run] = _cost(read_json(record), by_content.get(_digest(made, "bundle"), {}))
    return by_run


def bundles_of(runs: Sequence[Run], records: Sequence[Path], bundles: Sequence[Path]) -> dict[Run, Path]:
    """Return the bundle that each run's predictions were drawn with, where it is among the given ones.

    Bundles that a training kept on the way (``BUNDLE/steps/*``) are found too.
    """
    kept = [path for bundle in bundles for path in sorted(bundle.glob("steps/*")) if path.is_dir()]
    by_content = {files.sha256(path): path for path in (*kept, *bundles)}
    made = {run: read_json(_manifest_of(record)) for run, record in _predictions(runs, records).items()}
    return {run: path for run, m in made.items() if (path := by_content.get(_digest(m, "bundle")))}


def _predictions(runs: Sequence[Run], records: Sequence[Path]) -> dict[Run, Path]:
    """Return the record of each run's predictions, known by the name in the manifest of the evaluation."""
    by_name = {p.name.removesuffix(_RECORD): p for p in records if p.name.endswith(_RECORD)}
    by_run = {run: by_name.get(_name_of(run.manifest, "predictions")) for run in runs}
    return {run: record for run, record in by_run.items() if record is not None}


def pretrained(bundles: Sequence[Path], records: Sequence[Path]) -> dict[str, tuple[Path, Cost]]:
    """Return the bundles that none of the predictions was drawn with, by name: other trainings started from them."""
    used = {_digest(read_json(p), "bundle") for p in records if p.name.endswith(_MANIFEST)}
    if not used - {""}:
        return {}
    called = dict(zip(unique_names(bundles), bundles, strict=True))
    rest = {name: path for name, path in called.items() if files.sha256(path) not in used}
    return {name: (path, _of_bundle(read_json(path / "run.json"))) for name, path in rest.items()}


def _manifest_of(record: Path) -> Path:
    return record.with_name(f"{record.name.removesuffix(_RECORD)}{_MANIFEST}")


def _input(manifest: Mapping[str, Any], role: str) -> Mapping[str, Any]:
    entry = (manifest.get("inputs") or {}).get(role)
    return entry if isinstance(entry, dict) else {}


def _name_of(manifest: Mapping[str, Any], role: str) -> str:
    return str(_input(manifest, role).get("name", ""))


def _digest(manifest: Mapping[str, Any], role: str) -> str:
    return str(_input(manifest, role).get("sha256", ""))


def _number(record: Mapping[str, Any], *path: str) -> float:
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _cost(record: Mapping[str, Any], bundle: Mapping[str, Any]) -> Cost:
    """Return what a prediction took: of a baseline by its own record, of a model by its bundle's and its own."""
    if isinstance(reported := record.get("method_run"), dict):
        return Cost(
            _number(reported, "cpu_seconds", "train"),
            _number(reported, "seconds", "train"),
            _number(reported, "seconds", "predict"),
            _number(reported, "peak_memory_mib"),
        )
    training = _of_bundle(bundle)
    drawn = (
        math.nan if record.get("parts") else _number(record, "wall_seconds")
    )  # joining parts draws nothing
    return Cost(training.train_cpu, training.train_wall, drawn, training.memory, training.attempts)


def _of_bundle(record: Mapping[str, Any]) -> Cost:
    attempts = record.get("attempts")
    attempts = attempts if isinstance(attempts, int) else 1
    wall = _number(record, "train_seconds_of_all_attempts" if attempts > 1 else "wall_seconds")
    cpu = math.nan if attempts > 1 else _number(record, "cpu_seconds")
    return Cost(cpu, wall, math.nan, _number(record, "peak_memory_mib"), attempts)


_HEADS = (
    "Method",
    "data set",
    "kind",
    "version",
    "settings",
    "seed",
    "training, CPU time",
    "training, wall time",
    "prediction, wall time",
    "peak memory",
    "licence",
)


def trained(
    runs: Sequence[Run],
    absent: Sequence[FailedRun],
    cost_of: Mapping[Run, Cost],
    prior: Mapping[str, tuple[Path, Cost]],
    look: Mapping[str, Look],
) -> Table | None:
    """Return a line for each method: its version, settings and seed, and what training and predicting took.

    Parameters
    ----------
    runs, absent
        Scored runs and failed runs.
    cost_of
        Costs of the runs (see `costs`).
    prior
        Pretrained bundles (see `pretrained`).
    look
        Colours and markers of the methods.
    """
    rows = [
        _row(run, cost_of.get(run, Cost()), look[run.method].color) for run in runs if run.kind != "ceiling"
    ]
    if not any(cost_of.values()) and not any(r.external for r in runs):
        return None
    rows += [
        Row(one.method, (Cell(one.dataset), Cell("failed", "failed"), *_blank(8)), "absent", note=one.short)
        for one in absent
    ]
    for name, (path, cost) in prior.items():
        manifest = provenance.read_manifest(path) or {}
        texts = (Cell(""), Cell("pretrained"), Cell(_version(manifest)), Cell(""))
        rows.append(Row(name, (*texts, Cell(_text(manifest.get("seed")), "num"), *_cells(cost), Cell(""))))
    return Table(_HEADS, tuple(rows), name="trained", note=_NOTE)


_NOTE = (
    "CPU time adds up all threads, so it tells whether budgets are equal. Of an external method the times are its "
    "own. Of our models training is the whole command, and prediction the whole of 'sample'. n/a: no record of it was "
    "given, or the training was continued after an interruption, whose CPU time is not known."
)


def _row(run: Run, cost: Cost, color: str) -> Row:
    made_by = run.made_by
    version = str(made_by.version or _version(run.manifest))
    settings = str(made_by.settings or made_by.recipe or "")
    texts = (Cell(run.dataset), Cell(run.kind_words), Cell(version), Cell(settings))
    seed = Cell(seed_of(run) or "n/a", "num")
    licence = Cell(str(made_by.licence or ""))
    note = str(made_by.note or "")
    return Row(run.method, (*texts, seed, *_cells(cost), licence), run.kind, color, note)


def _cells(cost: Cost) -> tuple[Cell, ...]:
    again = f"{cost.attempts} attempts" if cost.attempts > 1 else ""
    times = (
        Cell(_seconds(cost.train_cpu), "num", again, value=cost.train_cpu),
        Cell(_seconds(cost.train_wall), "num", value=cost.train_wall),
        Cell(_seconds(cost.predict_wall), "num", value=cost.predict_wall),
    )
    return (*times, Cell(memory(_known(cost.memory)), "num", value=cost.memory))


def _seconds(value: float) -> str:
    """Return a time in seconds as long as budgets are compared by them, else in the unit that suits it."""
    if math.isnan(value) or value >= _MOST_SECONDS:
        return duration(_known(value))
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _blank(number: int) -> tuple[Cell, ...]:
    return tuple(Cell("–", "na") for _ in range(number))


def _version(manifest: Mapping[str, Any]) -> str:
    return f"perturbdiff {(manifest.get('versions') or {}).get('perturbdiff', 'n/a')}"


def _text(value: Any) -> str:
    return "n/a" if value is None else str(value)


_PLAIN = {
    "total": "loss",
    "loss": "loss at fixed noise levels",
    "mmd": "loss between cell sets (MMD)",
    "mse": "loss of single cells (squared error)",
    "energy": "energy distance of sampled cells",
    "r2": "R² of sampled mean profiles",
    "pdcorr": "PDCorr of sampled mean changes",
    "learning_rate": "learning rate",
    "grad_norm": "length of the gradient",
}


def curves(index: int, name: str, bundle: Path) -> list[Plot]:
    """Return a figure per numeric column of a bundle's training.csv. Empty without that file.

    Parameters
    ----------
    index, name
        The bundle's place among those of the page, from 1 on, and what it is called there.

    Raises
    ------
    UserError
        If the file is damaged, or not that of a bundle.
    """
    path = bundle / "training.csv"
    if not path.is_file():
        return []
    table = tabular.read_csv(path, "train again or leave this bundle out")
    if not {"step", "split"} <= set(table.columns):
        raise UserError(f"{path}: no column step or split; is {bundle} a bundle of this version?")
    terms = [c for c in table.select_dtypes("number") if c != "step" and len(table[[c]].dropna())]
    return [
        condition_plots.curves(
            f"training-{index}-{slug(str(term))}",
            f"{plain(str(term))} while training {name}",
            table,
            str(term),
            label=plain(str(term)),
        )
        for term in terms
    ]


def plain(name: str) -> str:
    """Return a column's name in words: known ones as a reader would say them, others without underscores."""
    return _PLAIN.get(name, name.replace("_", " "))
