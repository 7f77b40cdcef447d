"""From evaluated runs to one page.

``loading`` reads the runs, ``figures`` draws and tabulates, ``sections`` lays a data set's chapter out,
``experiments`` does so for an experiment's arms, ``page`` writes the page and its files.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.reporting.page.page import headline, write_report

__all__ = ["headline", "write_report"]
__getattr__, __dir__ = attach(__name__, {"page.page": ["headline", "write_report"]})
