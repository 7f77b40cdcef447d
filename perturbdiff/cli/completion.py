"""What the Tab key offers: presets, keys of the recipe, methods, data sets. Files are the shell's own matter."""

from __future__ import annotations


def presets(incomplete: str) -> list[str]:
    """Return the presets that begin like this; none, so that the shell offers files."""
    from importlib import resources

    files = (resources.files("perturbdiff.config") / "presets").iterdir()
    names = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return [name for name in names if name.startswith(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Return the keys of the recipe that begin like this, with the sign that follows them."""
    from perturbdiff.config.recipes import keys as all_keys

    return [f"{key}=" for key in all_keys() if f"{key}=".startswith(incomplete)]


def datasets(incomplete: str) -> list[str]:
    """Return the published data sets that begin like this."""
    from perturbdiff.datasets import registered

    return [name for name in registered() if name.startswith(incomplete)]
