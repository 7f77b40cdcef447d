"""The design of an experiment: which scored run stands for what, read from a table and matched with the runs."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from perturbdiff.reporting.loading.comparison import families, seed_of
from perturbdiff.reporting.loading.results import Run
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.tabular import read_texts

COLUMNS = ("dataset", "method", "part", "collection", "arm", "level", "seed", "init")
_NEEDED = COLUMNS[:3]
PARTS = ("valid", "test")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One run of an experiment.

    Attributes
    ----------
    dataset, method
        As in the tables of scores.
    part
        valid or test: what was predicted.
    collection
        Data sets that tables average over.
    arm
        What the run is in the comparison.
    level
        A number, the x axis of curves. NaN for none.
    seed
        Empty if unknown.
    run
        What was scored. None if that failed.
    """

    dataset: str
    method: str
    part: str
    collection: str
    arm: str
    level: float
    seed: str
    run: Run | None = None

    @property
    def kind(self) -> str:
        """Return model, baseline, ceiling, or failed."""
        return "failed" if self.run is None else self.run.kind

    @property
    def key(self) -> tuple[str, float | None]:
        """Return what makes a line of tables and figures: the arm at its level."""
        return self.arm, None if math.isnan(self.level) else self.level


def read_design(path: Path, runs: Sequence[Run]) -> list[Entry]:
    """Read ``design.csv`` and match its lines with the runs.

    Runs of the table's data sets that have no line of their own (baselines that the workflow adds, ceilings) join
    as an arm under their own name, and runs of other data sets are left out. A line without a run has failed.

    Parameters
    ----------
    path
        CSV with a line for each scored run: dataset, method and part (valid, test), collection (empty: the data
        set), arm (empty: what the method is called without its seed), level (empty or a number), seed (empty: as
        the predictions say) and init may be empty or missing.
    runs
        As `read_runs` returns them.

    Raises
    ------
    UserError
        If the table cannot be read, lacks a column, or a line of it is not as above, or if no line has a run.
    """
    table = _table(path)
    entries = [
        _entry(path, number, row, runs) for number, row in enumerate(table.to_dict("records"), start=2)
    ]
    _check(path, entries)
    if not any(entry.run for entry in entries):
        there = listing(sorted({run.dataset for run in runs}))
        raise UserError(
            f"{path}: no line is one of the runs given (data sets: {there}); is it the design of another experiment?"
        )
    return _leveled([*entries, *_others(entries, runs)])


def default_design(runs: Sequence[Run]) -> list[Entry]:
    """Return an entry for each run as far as runs tell by themselves: families are arms, the part is not known."""
    entries = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        of_dataset = [run for run in runs if run.dataset == dataset]
        for family in families(of_dataset):
            entries += [_own(run, "", dataset, family.name) for run in family.runs]
    return entries


def _table(path: Path) -> pd.DataFrame:
    table = read_texts(path, "design of the experiment", COLUMNS, _NEEDED)
    if strange := [c for c in table if c not in COLUMNS]:
        hint = nearest(str(strange[0]), COLUMNS)
        raise UserError(f"{path}: column '{strange[0]}' is not known{hint}; columns: {', '.join(COLUMNS)}")
    return pd.DataFrame({c: table[c].str.strip() if c in table else "" for c in COLUMNS}, index=table.index)


def _entry(path: Path, number: int, row: dict[str, str], runs: Sequence[Run]) -> Entry:
    where = f"{path}, line {number}"
    if empty := [c for c in ("dataset", "method") if not row[c]]:
        raise UserError(f"{where}: {empty[0]} is empty; name it as in the tables of scores")
    if row["part"] not in PARTS:
        raise UserError(f"{where}: part '{row['part']}' is not one of {', '.join(PARTS)}")
    run = _run(where, row["dataset"], row["method"], runs)
    arm = row["arm"] or _family(row["method"], run, runs)
    seed = row["seed"] or (seed_of(run) if run else "")
    collection = row["collection"] or row["dataset"]
    level = _level(where, row["level"])
    return Entry(row["dataset"], row["method"], row["part"], collection, arm, level, seed, run)


def _level(where: str, text: str) -> float:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.inf
    if math.isinf(value) or (text and math.isnan(value)):
        raise UserError(f"{where}: level '{text}' is not a number; it is the x axis of curves, or empty")
    return value


def _run(where: str, dataset: str, method: str, runs: Sequence[Run]) -> Run | None:
    """Return the run of that method, which may be called as `evaluate` did or as the report tells runs apart."""
    here = [run for run in runs if run.dataset == dataset]
    if exact := [run for run in here if run.method == method]:
        return exact[0]
    named = [run for run in here if run.base == method]
    if len(named) > 1:
        raise UserError(
            f"{where}: {len(named)} runs on {dataset} are called {method}; give them names with 'evaluate "
            f"--method', or name them as this report does: {listing(run.method for run in named)}"
        )
    return named[0] if named else None


def _family(method: str, run: Run | None, runs: Sequence[Run]) -> str:
    if run is None:
        return method
    seed_groups = families([r for r in runs if r.dataset == run.dataset])
    return next((f.name for f in seed_groups if run in f.runs), method)


def _check(path: Path, entries: Sequence[Entry]) -> None:
    """Refuse designs whose means would mix or repeat what they must not."""
    parts: dict[str, set[str]] = {}
    homes: dict[str, set[str]] = {}
    for entry in entries:
        parts.setdefault(entry.dataset, set()).add(entry.part)
        homes.setdefault(entry.dataset, set()).add(entry.collection)
    if mixed := [name for name, values in parts.items() if len(values) > 1]:
        raise UserError(
            f"{path}: {mixed[0]} stands for both parts; call the data sets of validation and test differently"
        )
    if torn := [name for name, values in homes.items() if len(values) > 1]:
        raise UserError(
            f"{path}: {torn[0]} belongs to several collections ({listing(sorted(homes[torn[0]]))})"
        )
    lines = Counter((e.dataset, e.method) for e in entries)
    if twice := [line for line, n in lines.items() if n > 1]:
        raise UserError(f"{path}: two lines for {twice[0][1]} on {twice[0][0]}; one line for each scored run")
    places = Counter((e.dataset, *e.key, e.seed) for e in entries if e.run)
    if twice := [place for place, n in places.items() if n > 1]:
        dataset, arm, level, seed = twice[0]
        at = "" if level is None else f" at level {level:g}"
        raise UserError(
            f"{path}: {arm}{at} has several runs of seed '{seed}' on {dataset}; give them different arms, "
            "levels or seeds"
        )


def _others(entries: Sequence[Entry], runs: Sequence[Run]) -> list[Entry]:
    """Return entries for the runs without a line on the design's data sets."""
    homes = {e.dataset: (e.part, e.collection) for e in entries}
    used = {id(e.run) for e in entries}
    found = []
    for run in runs:
        if id(run) in used or run.is_reference:
            continue
        if run.dataset not in homes:
            logger.info(
                "%s on %s is not in the design: it is left out of the experiment", run.method, run.dataset
            )
            continue
        part, collection = homes[run.dataset]
        arm = run.kind if run.kind == "ceiling" else str(run.baseline or run.method)
        found.append(replace(_own(run, part, collection, arm)))
    return found


def _own(run: Run, part: str, collection: str, arm: str) -> Entry:
    return Entry(run.dataset, run.method, part, collection, arm, math.nan, seed_of(run), run)


def _leveled(entries: Iterable[Entry]) -> list[Entry]:
    """Give baselines and ceilings of a data set with one level that level, where others of the collection differ.

    Where each share of the cells is a data set of its own, a baseline belongs to its share.
    """
    entries = list(entries)
    found = []
    for entry in entries:
        if math.isnan(entry.level):
            beside = [
                e
                for e in entries
                if (e.part, e.collection) == (entry.part, entry.collection) and not math.isnan(e.level)
            ]
            here = {e.level for e in beside if e.dataset == entry.dataset}
            if len(here) == 1 and len({e.level for e in beside}) > 1:
                entry = replace(entry, level=here.pop())
        found.append(entry)
    return found
