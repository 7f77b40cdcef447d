"""The adapters' side of the contract (docs/adapters.md). Runs in the tools' environments: Python 3.9 or newer, anndata.

An adapter is a script that is called with one argument, the task folder:

    from perturbdiff_adapter import open_task

    task = open_task()
    with task.phase("train"):
        ...
    task.write(values)
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp

CONTRACT = 1
EXIT_REFUSED = 3
"""The method cannot do what it is asked; the reason is a line ``refused: …`` of standard error."""

_ROWS_PER_BLOCK = 4096


class Settings(dict):
    """Hyper-parameters by name, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Task:
    """The task folder, read.

    Attributes
    ----------
    folder
        Absolute path; scratch files may be written there.
    settings, seed, threads, device, device_required, control, target_sum, has_counts
        As in task.json (docs/adapters.md).
    train
        AnnData of the training cells and all controls: ``X`` CSR float32 log1p; ``obs`` with ``perturbation,
        cell_type, batch`` (categorical), ``is_control`` (bool) and ``n_counts`` (depth over all genes).
    queries
        A row for each cell to predict: ``perturbation, cell_type, batch, control_row``, the latter the row of
        ``train`` of a matched control cell.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).resolve()
        facts = json.loads((self.folder / "task.json").read_text())
        if facts["contract"] != CONTRACT:
            raise SystemExit(f"this adapter knows contract {CONTRACT}, the task is of {facts['contract']}")
        self.settings = Settings(facts["settings"])
        self.method, self.control = facts["method"], facts["control"]
        self.seed, self.threads, self.device = facts["seed"], facts["threads"], facts["device"]
        self.device_required = facts.get("device_required", True)
        self.target_sum, self.has_counts = facts["target_sum"], facts["has_counts"]
        self.train = anndata.read_h5ad(self.folder / "train.h5ad")
        labels = dict.fromkeys(("perturbation", "cell_type", "batch"), str)
        # a perturbation may be called 'NA' or '1'
        self.queries = pd.read_csv(self.folder / "queries.csv", dtype=labels, na_filter=False)
        self.facts: dict[str, Any] = {"seconds": {}, "cpu_seconds": {}}

    @property
    def genes(self) -> list[str]:
        """Names of the genes, in the order of all matrices."""
        return [str(gene) for gene in self.train.var_names]

    def labels(self, column: str) -> np.ndarray:
        """Labels of the training cells as text, object [n_train]."""
        return self.train.obs[column].astype(str).to_numpy(object)

    def dense(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Log1p values of training rows (all by default), float32 [n, G]."""
        values = self.train.X if rows is None else self.train.X[rows]
        values = values.toarray() if sp.issparse(values) else np.asarray(values)
        return np.ascontiguousarray(values, dtype=np.float32)

    def counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Raw counts of training rows (all by default), float32 [n, G] of whole numbers."""
        if not self.has_counts:
            self.refuse("needs raw counts, and the data set was read as log1p values")
        depth = self.train.obs["n_counts"].to_numpy(np.float64)
        depth = depth if rows is None else depth[rows]
        values = self.dense(rows)
        for first in range(
            0, len(values), _ROWS_PER_BLOCK
        ):  # in double precision, which for all cells would be large
            block = slice(first, first + _ROWS_PER_BLOCK)
            exact = np.expm1(values[block].astype(np.float64)) * (depth[block] / self.target_sum)[:, None]
            values[block] = np.rint(exact)
        return values

    def require_seen(self) -> None:
        """Refuse if a perturbation to predict does not occur among the training cells."""
        unseen = sorted(set(self.queries["perturbation"]) - set(self.labels("perturbation")))
        if unseen:
            names = ", ".join(unseen[:4]) + (", …" if len(unseen) > 4 else "")
            self.refuse(
                f"cannot predict perturbations that do not occur in training: {len(unseen)} ({names})"
            )

    def refuse(self, reason: str) -> NoReturn:
        """End with a reason that a person reads in the log and in the report."""
        print(f"refused: {reason}", file=sys.stderr, flush=True)
        sys.exit(EXIT_REFUSED)

    def without_gpu(self, reason: str) -> None:
        """Go on with ``device`` 'cpu' where the method can use no GPU; refuse if the user insists on one."""
        if self.device_required:
            self.refuse(f"{reason}; --device cpu works")
        print(f"no GPU is used: {reason}", file=sys.stderr, flush=True)
        self.device = "cpu"
        self.note(device="cpu", no_gpu=reason)

    def call(self, command: Sequence[Any], **options: Any) -> None:
        """Run a command (`subprocess.run`); if it fails, this process fails in the same way."""
        code = subprocess.run([str(word) for word in command], check=False, **options).returncode
        if code == -signal.SIGKILL:  # out of memory, most likely: the parent process must know
            sys.exit(128 + signal.SIGKILL)
        if code:
            raise SystemExit(f"{self.method}: {command[0]} ended with code {code}")

    def note(self, **facts: Any) -> None:
        """Remember facts of this run (steps, losses, warnings) for its record.

        ``from_control_row=True`` says that each predicted cell was made from its matched control cell.
        """
        self.facts.update(facts)

    def progress(self, done: int, total: int, text: str = "") -> None:
        """Say how far the work is: one line that the parent process reads."""
        print(f"progress {int(done)}/{int(total)} {text}".rstrip(), flush=True)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the wall and CPU seconds of a part of the work ('train', 'predict'), child processes included."""
        wall, cpu = time.time(), _cpu_seconds()
        yield
        self.facts["seconds"][name] = round(time.time() - wall, 2)
        self.facts["cpu_seconds"][name] = round(_cpu_seconds() - cpu, 2)

    def write(self, values: Any) -> None:
        """Write the predictions, the last thing an adapter does.

        Parameters
        ----------
        values
            float [n_queries, G], log1p, in the order of ``queries``; dense or sparse.
        """
        shape = (len(self.queries), len(self.genes))
        if values.shape != shape:
            raise SystemExit(f"{self.method}: predictions have shape {values.shape}, expected {shape}")
        values = values.astype(np.float32) if sp.issparse(values) else np.asarray(values, dtype=np.float32)
        peak = max(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        self.note(peak_memory_mib=round(peak / 1024), python=sys.version.split()[0])
        (self.folder / "facts.json").write_text(json.dumps(self.facts, default=str))
        found = anndata.AnnData(values, var=pd.DataFrame(index=pd.Index(self.genes)))
        partial = self.folder / "predictions.partial.h5ad"
        found.write_h5ad(partial)
        partial.replace(self.folder / "predictions.h5ad")


def _cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def open_task() -> Task:
    """Return the task in the folder that is the script's only argument."""
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {Path(sys.argv[0]).name} TASK_FOLDER (docs/adapters.md)")
    return Task(Path(sys.argv[1]))
