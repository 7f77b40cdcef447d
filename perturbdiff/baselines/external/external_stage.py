"""The `baseline` stage for external methods: write the task, run the adapter, check and write its predictions."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from perturbdiff import predictions
from perturbdiff.baselines import baseline_task
from perturbdiff.baselines.external import adapter_process
from perturbdiff.baselines.external.adapter_output import Answer
from perturbdiff.baselines.external.adapter_process import OutputLog, explain
from perturbdiff.baselines.external.methods import ExternalMethod
from perturbdiff.baselines.external.task_folder import (
    CONTRACT,
    FACTS,
    PREDICTIONS,
    TRAIN,
    Written,
    environment,
    write_task,
)
from perturbdiff.runtime import files, provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.resources import resolve_device
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

MARGIN = 120.0
"""A method is ended this many seconds before the end of the job, so that there is time to report it."""


def predict_external(
    method: ExternalMethod,
    store: Path,
    split: Path,
    out: Path,
    *,
    part: str = "test",
    seed: int = 0,
    threads: int | None = None,
    device: str = "auto",
    timeout_hours: float = 24.0,
    keep: Path | None = None,
    force: bool = False,
) -> Path:
    """Predict every condition of a part with an external method, as many cells as the condition really has.

    Parameters
    ----------
    method
        `methods.tool_method` or `methods.script_method`.
    store, split
        The store and its split. Expression of held-out cells never reaches the method.
    out
        Predictions to write (.h5ad or .zarr), with the real controls appended. The method's output goes to
        ``OUT.log``, or to the run's log if there is one (``PD_LOG``).
    part
        'train', 'valid' or 'test'.
    seed
        Seed of the matched controls and of the method.
    threads
        CPU threads it may use; by default OMP_NUM_THREADS, else all CPUs.
    device
        'auto', 'cpu' or 'cuda'.
    timeout_hours
        Time limit, after which the method counts as failed.
    keep
        New folder that keeps the task and the predictions of the method. By default they are removed.
    force
        Run even if an equal output exists.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If the method refuses, fails, takes too long or predicts impossible values. The message says why, and
        where its output is.
    Killed
        If it was killed from outside, probably because memory was used up.
    """
    out, where = Path(out), resolve_device(device)
    folder = predictions.format_of(out) == ".zarr"
    recipe = {
        "name": method.name,
        "part": part,
        "contract": CONTRACT,
        "settings": dict(method.settings),
        "method": dict(method.determinants),
    }
    inputs = {"store": Path(store), "split": Path(split), **method.inputs}
    with (
        adapter_process.ending_on_signals(),
        provenance.stage(
            "baseline", out, config=recipe, inputs=inputs, seed=seed, folder=folder, force=force
        ) as stage,
    ):
        if stage.skip:
            return out
        _warn_of_time(method, where)
        with _task_folder(stage, keep) as scratch:
            run = _Run(method, Store(store), scratch, seed, threads or _threads(), where, device != "auto")
            run.predict(stage, read_split(Path(split)), part, OutputLog(out, method.name), timeout_hours)
    return out


def _warn_of_time(method: ExternalMethod, device: str) -> None:
    """Warn that the settings that the authors recommend are not for a CPU."""
    if device == "cpu" and str(method.made_by.settings).startswith("recommended"):
        logger.warning(
            "%s: its recommended settings are for a GPU and may take hours or days here; for minutes: "
            "--set baseline.settings=quick",
            method.name,
        )


@contextlib.contextmanager
def _task_folder(stage: provenance.Stage, keep: Path | None) -> Iterator[Path]:
    """Yield an empty folder: ``keep``, or one that is removed at the end."""
    if keep is not None:
        keep = keep.absolute()
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise UserError(f"--keep {keep}: is there already; give a new folder")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    folder = (stage.scratch / "task").absolute()
    folder.mkdir()
    try:
        yield folder
    finally:
        files.remove(folder)


def _threads() -> int:
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return max(int(setting), 1) if setting.isdigit() else len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class _Run:
    """One run of a method in a task folder."""

    method: ExternalMethod
    store: Store
    folder: Path
    seed: int
    threads: int
    device: str
    device_required: bool

    def predict(
        self, stage: provenance.Stage, split: pd.DataFrame, part: str, log: OutputLog, hours: float
    ) -> None:
        """Write the task, run the adapter and write the predictions. Facts for the records go into ``stage``."""
        task, wanted = baseline_task.open_task(self.store, split, part, self.seed)
        with log:
            written = write_task(
                self.folder,
                task,
                wanted["n_cells"].to_numpy(),
                method=self.method.name,
                settings=self.method.settings,
                threads=self.threads,
                device=self.device,
                device_required=self.device_required,
            )
            ended = self._run_adapter(log, hours)
            facts = self._facts()
            stage.notes["method_run"] = self._record(ended, facts)
            stage.results |= self._write(stage.path, wanted, written, facts, learned=part == "train")

    def _run_adapter(self, log: OutputLog, hours: float) -> adapter_process.Ended:
        """Run the adapter and return how it ended, if it ended well."""
        name, caches = self.method.name, self.folder / "cache"
        caches.mkdir()
        seconds, limit = _time_limit(hours)
        logger.info("%s: running (%s, threads: %d), output in %s", name, self.device, self.threads, log.path)
        log.say(f"{name} (at most {seconds / 3600:.2f} h): {' '.join(self.method.command)}")
        ended = adapter_process.run(
            [*self.method.command, str(self.folder)],
            self.folder,
            log,
            name=name,
            environment=environment(os.environ, caches, threads=self.threads, device=self.device),
            seconds=seconds,
        )
        log.say(f"{name}: exit code {ended.code} after {ended.seconds:.0f} s")
        if ended.timed_out:
            raise UserError(f"{name} had not finished after {ended.seconds:.0f} s, {limit}; see {log.path}")
        if ended.code:
            explain(name, ended, log)
        logger.info("%s: done in %.0f s, peak memory %d MiB", name, ended.seconds, ended.peak_memory_mib)
        return ended

    def _facts(self) -> dict[str, Any]:
        """Return the facts that the adapter wrote about its run."""
        path = self.folder / FACTS
        try:
            facts = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            facts = {}
        if not isinstance(facts, dict):
            facts = {}
        return facts

    def _record(self, ended: adapter_process.Ended, facts: dict[str, Any]) -> dict[str, Any]:
        return {
            "device": self.device,
            **facts,
            "threads": self.threads,
            "command": list(self.method.command),
            "process_seconds": ended.seconds,
            "process_cpu_seconds": ended.cpu_seconds,
            "peak_memory_mib": max(ended.peak_memory_mib, int(facts.get("peak_memory_mib") or 0)),
        }

    def _write(
        self,
        path: Path,
        wanted: pd.DataFrame,
        written: Written,
        facts: dict[str, Any],
        *,
        learned: bool,
    ) -> dict[str, Any]:
        """Check the predictions, write the file and return facts about them."""
        queries = written.queries
        names = self._controls(queries) if facts.get("from_control_row") else None
        made_by = replace(self.method.made_by, seed=self.seed, controls="balanced")
        labels = queries.drop(columns="control_row")
        with Answer(
            self.folder / PREDICTIONS, self.method.name, self.store.genes, labels, written.maxima, names
        ) as answer:
            counts = baseline_task.write(
                path, self.store, wanted, answer.cells(), self.method.name, made_by, learned=learned
            )
        values = max(len(queries) * self.store.n_genes, 1)
        if answer.negative:
            share = answer.negative / values
            logger.warning(
                "%s: %.2g %% of its values are negative; they become 0", self.method.name, 100 * share
            )
        return {
            **counts,
            "training_cells": written.n_cells,
            "negative_share": answer.negative / values,
            "above_training_maximum_share": answer.above / values,
            "largest_value": answer.largest,
            "largest_training_value": float(written.maxima.max(initial=0)),
        }

    def _controls(self, queries: pd.DataFrame) -> np.ndarray:
        """Return the names of the cells' matched controls, object [n_queries]."""
        rows, place = np.unique(queries["control_row"].to_numpy(np.int64), return_inverse=True)
        with h5py.File(self.folder / TRAIN, "r") as handle:
            index: Any = handle["obs/_index"]
            return index.asstr()[:][rows][place].astype(object)


def _time_limit(hours: float) -> tuple[float, str]:
    """Return the time limit of a method in seconds, and what to do if it is too short."""
    seconds, remedy = hours * 3600, "its time limit (baseline.timeout_hours)"
    end = os.environ.get("PD_END_TIME") or os.environ.get("SLURM_JOB_END_TIME")
    with contextlib.suppress(ValueError):
        left = float(end or "nan") - time.time() - MARGIN
        if left < seconds:
            return max(left, 0.0), "shortly before the job's time limit: give the job more time"
    return seconds, remedy
