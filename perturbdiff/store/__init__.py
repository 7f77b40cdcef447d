"""The store: counts of any number of cells in chunked Zarr, read by rows in constant memory.

``Store`` reads and ``store_writer`` writes. ``views`` shows a store as AnnData or dask arrays. ``checksums`` and
``store_check`` find damage. ``row_reader`` and ``pseudobulk`` stream the rows.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.store.store import Store
    from perturbdiff.store.store_check import check_store
    from perturbdiff.store.views import to_anndata, to_dask

__all__ = ["Store", "check_store", "to_anndata", "to_dask"]
__getattr__, __dir__ = attach(
    __name__, {"store": ["Store"], "store_check": ["check_store"], "views": ["to_anndata", "to_dask"]}
)
