"""Every name that a package offers can be taken from it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import perturbdiff

PACKAGES = sorted(m.name for m in pkgutil.iter_modules(perturbdiff.__path__) if m.ispkg)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package):
    module = importlib.import_module(f"perturbdiff.{package}")
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None, name


def test_no_module_hides_a_public_name():
    """Python would put a module of the same name in the function's place as soon as somebody imports it."""
    modules = {module.name for module in pkgutil.iter_modules(perturbdiff.__path__)}
    assert not modules & set(perturbdiff.__all__)
    assert sorted(perturbdiff.__all__) == dir(perturbdiff)
