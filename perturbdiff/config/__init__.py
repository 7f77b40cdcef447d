"""The configuration of a run: one frozen, typed tree, read from presets, files and ``--set a.b=c``.

``settings`` and ``data_settings`` define the tree, and ``recipes`` reads it. ``readings`` names variants of the method
and sizes of the network, and reads the tags that say where a value comes from.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.config.recipes import describe, load, presets
    from perturbdiff.config.settings import Config

__all__ = ["Config", "describe", "load", "presets"]
__getattr__, __dir__ = attach(__name__, {"recipes": ["describe", "load", "presets"], "settings": ["Config"]})
