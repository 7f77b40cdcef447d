"""What a store says of itself, without a cell being read: its manifest, its checksums, its small tables.

Light on purpose: of the large libraries only NumPy, and pyarrow for a table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.io.damage import explain_damage, plain_name
from perturbdiff.runtime import outputs
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
            names = [plain_name(str(part["name"]), f"{self.path}: part") for part in facts["parts"]]
            self._edges = np.cumsum([0, *(int(part["n_cells"]) for part in facts["parts"])])
        self._parts = [self.path / name for name in names]
        tables = [f"{name}.parquet" for name in ("conditions", "perturbations", "genes")]
        for name in [*tables, *names]:
            if (self.path / name).is_symlink():
                raise UserError(f"{self.path / name}: is a link, which is not followed; copy the whole store")
        for name in tables:
            if not (self.path / name).is_file():
                raise UserError(
                    f"{self.path / name}: is missing, or no file; run preprocess again with --force"
                )
        missing = [p.name for p in self._parts if not p.is_dir()]
        if missing:
            raise UserError(f"{self.path}: parts are missing ({listing(missing, 3)}); run preprocess again")
        self._recorded = checksums.confirm(self.path, tables)

    def _facts(self) -> dict[str, Any]:
        if not self.path.exists():
            raise UserError(f"store not found: {self.path}")
        # an earlier version's manifest carries no checksum of its own
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
