"""The size of the changes that a trained model reproduces: known answers, what the log says, what the bundle keeps."""

from __future__ import annotations

import logging

import anndata as ad
import numpy as np
import pytest
import torch
from small_store import small_store
from tiny_data import tiny_counts

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.training.callbacks.validation import effect_size
from perturbdiff.training.module import TrainingModule
from perturbdiff.training.setup import from_scratch


class Cheat(TrainingModule):
    """Predicts the controls plus a share of the true change."""

    def __init__(self, setup, share):
        super().__init__(setup.model, setup.config)
        (source,), self.share = setup.sources, share
        table = source.store.conditions
        places = zip(table["start"], table["stop"], strict=True)
        mean = np.array([source.store.expression(slice(a, b)).toarray().mean(0) for a, b in places])
        self.change = mean - mean[table["control"]]

    def generate(self, batch, settings, draw):
        change = torch.from_numpy(self.change[batch.condition.numpy()]).float()
        return batch.control + self.share * change[:, None]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    cells = ad.concat([tiny_counts()] * 6, index_unique="-")  # copies: both halves show the same change
    made = small_store(tmp_path_factory.mktemp("copies"), adata=cells)
    return from_scratch(made.store, made.split, made.recipe)


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_the_share_that_is_predicted_is_found(setup, share, caplog):
    with caplog.at_level(logging.INFO):
        found = effect_size(Cheat(setup, share), setup)
    assert found == pytest.approx(share, abs=0.1)
    assert f"reproduces {100 * found:.0f} % of the size of the changes" in caplog.text
    assert ("more steps or a larger model would help" in caplog.text) == (share < 0.85)


def test_no_answer_where_nothing_changes(setup, caplog, monkeypatch):
    monkeypatch.setattr("perturbdiff.training.callbacks.validation._FEWEST", 10**6)
    with caplog.at_level(logging.INFO):
        assert effect_size(Cheat(setup, 1.0), setup) is None
    assert "too little" in caplog.text


def test_the_bundle_keeps_it(trained):
    kept = Bundle.load(trained / "bundle").training["effect_slope"]
    assert kept is None or np.isfinite(kept)
