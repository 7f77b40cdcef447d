"""From a store to the dense sets of cells that a training step uses.

The cells of a set are a pure function of seed and position (``cell_sets``, or ``windows`` for stores larger than
memory), of which each rank takes its share. ``set_streams`` draws sets within units, mixes the sets of several stores
and adds twins. ``loader`` reads their rows into ``batches``.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.loading.batches import CellSetBatch
    from perturbdiff.loading.cell_sets import CellSet, CellSetSampler
    from perturbdiff.loading.loader import SetLoader
    from perturbdiff.loading.set_streams import MixtureSampler
    from perturbdiff.loading.windows import WindowedSampler

__all__ = ["CellSet", "CellSetBatch", "CellSetSampler", "MixtureSampler", "SetLoader", "WindowedSampler"]
__getattr__, __dir__ = attach(
    __name__,
    {
        "cell_sets": ["CellSet", "CellSetSampler"],
        "set_streams": ["MixtureSampler"],
        "batches": ["CellSetBatch"],
        "loader": ["SetLoader"],
        "windows": ["WindowedSampler"],
    },
)
