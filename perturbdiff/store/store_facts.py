"""What a store is, in a few lines: size, settings, where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.runtime import provenance
from perturbdiff.store.store_head import StoreHead


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
    files = [p for p in path.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files)
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
        "files": len(files),
        "data_files": sum(
            p.parents[1].name in ("data", "indices") and p.parents[2].name == "X" for p in files
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
