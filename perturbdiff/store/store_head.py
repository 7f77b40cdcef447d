"""What a store says of itself, without a cell being read: its manifest, its checksums, its small tables.

It loads quickly on purpose: of the large libraries only NumPy, and pyarrow for a table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.io.damage import explain_damage, plain_name
from perturbdiff.io.recognise import confusion
from perturbdiff.runtime import files, outputs, provenance
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.store import checksums

FORMAT = 1
"""Version of the store's layout; a reader refuses any other."""


class StoreHead:
    """A finished store as its manifest describes it.

    Attributes
    ----------
    path
        Its folder.
    parts, edges
        Folders of its parts, in order; first row of each part and, last, the number of rows, int64 [parts + 1].
    n_cells, n_genes, n_values
        Its shape, and the number of values stored.
    dtype, index_dtype
        Types of the stored values and column numbers.
    target_sum
        Depth that counts are scaled to before the logarithm; nan if the input was log1p of unknown target.
    scale
        Divisor of log1p values in model units.
    input_scale
        ``counts``: integers are stored and log1p is computed here; ``log1p``: stored as given.
    control
        Label of the control perturbation.
    seed
        Of preprocessing.
    set_key
        Name of the input's column that said which cells were a set; None if the store does not know.

    Raises
    ------
    UserError
        If ``path`` is not a finished store of this version, or a small file of it was changed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        facts = self._facts()
        with explain_damage(self.path / "manifest.json", "run preprocess again with --force"):
            self.n_cells, self.n_genes = int(facts["n_cells"]), int(facts["n_genes"])
            self.n_values = int(facts["n_values"])
            self.dtype = np.dtype(facts["dtype"])
            self.target_sum = float("nan") if facts["target_sum"] is None else float(facts["target_sum"])
            self.scale, self.control = float(facts["scale"]), str(facts["control"])
            self.input_scale, self.seed = str(facts["input_scale"]), int(facts["seed"])
            self.set_key = None if facts.get("set_key") is None else str(facts["set_key"])
            names = [plain_name(str(part["name"]), f"{self.path}: part") for part in facts["parts"]]
            self.edges = np.cumsum([0, *(int(part["n_cells"]) for part in facts["parts"])])
        self.parts = [self.path / name for name in names]
        tables = [f"{name}.parquet" for name in ("conditions", "perturbations", "genes")]
        for name in [*tables, *names]:
            if (self.path / name).is_symlink():
                raise UserError(f"{self.path / name}: is a link, which is not followed; copy the whole store")
        for name in tables:
            if not (self.path / name).is_file():
                raise UserError(
                    f"{self.path / name}: is missing, or no file; run preprocess again with --force"
                )
        missing = [p.name for p in self.parts if not p.is_dir()]
        if missing:
            raise UserError(f"{self.path}: parts are missing ({listing(missing, 3)}); run preprocess again")
        self._recorded = checksums.confirm(self.path, tables)

    def _facts(self) -> dict[str, Any]:
        files.existing(self.path, "store")
        if other := confusion(self.path, "a store"):
            raise UserError(f"{self.path}: {other}; make a store with perturbdiff preprocess")
        # The manifest of an earlier version has no checksum of its own.
        manifest = outputs.check_record(self.path / "manifest.json") or outputs.read_manifest(self.path) or {}
        try:
            facts = manifest["results"]["store"]
        except (KeyError, TypeError):
            raise UserError(
                f"{self.path}: is not a finished store; make one with perturbdiff preprocess"
            ) from None
        if facts["format"] != FORMAT:
            raise UserError(
                f"{self.path}: has store format {facts['format']}, this version reads {FORMAT}; "
                "run preprocess again"
            )
        return facts

    @contextlib.contextmanager
    def _reading_table(self, name: str) -> Iterator[Path]:
        """Give the path of a small table; turn what reading it raises into a `UserError`."""
        try:
            yield self.path / f"{name}.parquet"
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path}: {name}.parquet cannot be read ({error}); run preprocess again"
            ) from error

    def columns(self, name: str, *columns: str) -> list[list[Any]]:
        """Return columns of the small table ``conditions``, ``perturbations`` or ``genes``."""
        from pyarrow import parquet

        with self._reading_table(name) as path:
            table = parquet.ParquetFile(path).read(list(columns))
            return [table[column].to_pylist() for column in columns]

    @property
    def nbytes_in_memory(self) -> int:
        """Bytes that `Store.in_memory` needs: values, column numbers, row pointers, depths."""
        pointer = 4 if self.n_values <= np.iinfo(np.uint32).max else 8
        return (
            self.n_values * (self.dtype.itemsize + self.index_dtype.itemsize) + (pointer + 4) * self.n_cells
        )

    @property
    def index_dtype(self) -> np.dtype:
        """Type of the stored column numbers."""
        return np.dtype(np.int16 if self.n_genes <= 1 << 15 else np.int32)


def describe(path: Path) -> dict[str, Any]:
    """Return the facts of a store for people and scripts.

    Parameters
    ----------
    path
        Folder of the store.

    Returns
    -------
    dict
        ``cells, genes, conditions, control_conditions, perturbations, cell_types, batches, values_per_cell, dtype,
        input_scale, target_sum, scale, control, seed, format, genes_chosen, parts, files, data_files, bytes,
        bytes_per_cell, memory_bytes, smallest_condition, median_condition, largest_condition, inputs, versions,
        checksums``; bytes are those on disk, ``memory_bytes`` what `Store.in_memory` needs.

    Raises
    ------
    UserError
        If ``path`` is not a finished store.
    """
    store = StoreHead(path)
    manifest = provenance.read_manifest(path) or {}
    results = manifest.get("results", {})
    everything = [p for p in path.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in everything)
    counted, controls, *labels = store.columns(
        "conditions", "n_cells", "is_control", "perturbation", "cell_type", "batch"
    )
    perturbations, cell_types, batches = (len(set(names)) for names in labels)
    cells = np.asarray(counted, np.int64)
    return {
        "path": str(path),
        "cells": store.n_cells,
        "genes": store.n_genes,
        "conditions": len(cells),
        "control_conditions": sum(controls),
        "perturbations": perturbations,
        "cell_types": cell_types,
        "batches": batches,
        "smallest_condition": int(cells.min(initial=store.n_cells)),
        "median_condition": float(np.median(cells)) if len(cells) else 0.0,
        "largest_condition": int(cells.max(initial=0)),
        "values_per_cell": store.n_values / max(1, store.n_cells),
        "dtype": store.dtype.name,
        "input_scale": store.input_scale,
        "target_sum": None if np.isnan(store.target_sum) else store.target_sum,
        "scale": store.scale,
        "control": store.control,
        "seed": store.seed,
        "format": results["store"]["format"],
        "genes_chosen": results["store"].get("hvg"),
        "parts": len(results["store"]["parts"]),
        "files": len(everything),
        "data_files": sum(
            p.parents[1].name in ("data", "indices") and p.parents[2].name == "X" for p in everything
        ),
        "bytes": size,
        "bytes_per_cell": size / max(1, store.n_cells),
        "memory_bytes": store.nbytes_in_memory,
        "checksums": results.get("checksums"),
        "inputs": manifest.get("inputs", {}),
        "versions": manifest.get("versions", {}),
    }


def render(facts: dict[str, Any]) -> str:
    """Return `describe`'s facts as aligned lines of text."""
    contexts = f"{_count(facts['cell_types'], 'cell type')}, {_count(facts['batches'], 'batch', 'batches')}"
    lines = {
        "store": f"{facts['path']} (format {facts['format']})",
        "cells": f"{facts['cells']:,} x {facts['genes']:,} genes, {facts['values_per_cell']:.1f} values per cell",
        "conditions": (
            f"{facts['conditions']:,} ({facts['control_conditions']:,} of controls): "
            f"{_count(facts['perturbations'], 'perturbation')} with '{facts['control']}', {contexts}"
        ),
        "cells of one": (
            f"{facts['smallest_condition']:,} to {facts['largest_condition']:,}, "
            f"median {facts['median_condition']:,.0f}"
        ),
        "values": _values(facts),
        "gene choice": ", ".join(f"{k} {v}" for k, v in (facts["genes_chosen"] or {}).items())
        or "not recorded",
        "on disk": (
            f"{_size(facts['bytes'])}, {facts['bytes_per_cell']:.0f} bytes per cell, {_count(facts['parts'], 'part')}, "
            f"{facts['files']:,} files ({facts['data_files']:,} of values and column numbers)"
        ),
        "in memory": _size(facts["memory_bytes"]),
        "checksums": facts["checksums"] or "none; this store was made by an older version",
        "seed": str(facts["seed"]),
    }
    for role, entry in facts["inputs"].items():
        lines[role] = f"{entry['name']}  sha256 {entry['sha256']}"
    lines["made with"] = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _values(facts: dict[str, Any]) -> str:
    target = "unknown" if facts["target_sum"] is None else f"{facts['target_sum']:g}"
    if facts["input_scale"] == "log1p":
        return f"log1p as given ({facts['dtype']}), target sum {target}"
    return (
        f"counts ({facts['dtype']}), read as log1p(count x {target} / depth); model scale {facts['scale']:g}"
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
