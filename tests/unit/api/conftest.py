"""A screen with names of its own, and one model of it that the tests share."""

from __future__ import annotations

import anndata
import pytest
from own_screen import COLUMNS, SETTINGS, own_screen

import perturbdiff


@pytest.fixture(scope="session", autouse=True)
def _quick(without_pictures):
    pass


@pytest.fixture(scope="session")
def screen() -> anndata.AnnData:
    return own_screen()


@pytest.fixture(scope="session")
def model(screen) -> perturbdiff.PerturbDiff:
    return perturbdiff.PerturbDiff(screen, **COLUMNS, config="tiny", settings=SETTINGS, device="cpu").fit()


@pytest.fixture(scope="session")
def scores(model) -> perturbdiff.Scores:
    return model.evaluate(baselines=("control", "linear"))
