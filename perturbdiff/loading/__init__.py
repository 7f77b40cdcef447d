"""From a store to the dense sets of cells that a training step uses.

The cells of a set are a pure function of seed and position (``cell_sets``, or ``windows`` for stores larger than
memory). ``mixtures`` mixes the sets of several stores and adds twins, and ``set_streams`` gives each rank its share.
``loader`` reads their rows into ``batches``.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.loading.batches import CellSetBatch
    from perturbdiff.loading.cell_sets import CellSetSampler
    from perturbdiff.loading.loader import SetLoader
    from perturbdiff.loading.mixtures import MixtureSampler
    from perturbdiff.loading.set_streams import CellSet
    from perturbdiff.loading.windows import WindowedSampler

__all__ = ["CellSet", "CellSetBatch", "CellSetSampler", "MixtureSampler", "SetLoader", "WindowedSampler"]
__getattr__, __dir__ = attach(
    __name__,
    {
        "cell_sets": ["CellSetSampler"],
        "mixtures": ["MixtureSampler"],
        "set_streams": ["CellSet"],
        "batches": ["CellSetBatch"],
        "loader": ["SetLoader"],
        "windows": ["WindowedSampler"],
    },
)
