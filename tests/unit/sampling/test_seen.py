"""Predictions say which of their conditions the model was trained on, and an evaluation warns of them."""

from __future__ import annotations

import pandas as pd
import pytest

from perturbdiff.baselines import predict
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.inputs import open_predictions, open_truth
from perturbdiff.evaluation.readers.pairing import pair
from perturbdiff.predictions import read_predictions

CONFIG = EvaluateConfig()


@pytest.fixture
def predicted(trained, tmp_path, run_cli):
    """A function that samples conditions and returns the file."""

    def of(conditions, *options):
        pd.DataFrame(conditions).assign(n_cells=2).to_csv(tmp_path / "wanted.csv", index=False)
        out = tmp_path / "p.h5ad"
        done = run_cli("sample", trained / "bundle", trained / "store", "--conditions", tmp_path / "wanted.csv",
                       "--out", out, "--device", "cpu", "--set", "sample.num_steps=2", *options)  # fmt: skip
        assert done.code == 0, done.err
        return out

    return of


def test_conditions_of_training_are_counted_named_and_reported(trained, predicted):
    seen = Bundle.load(trained / "bundle", "cpu").seen
    labels = ["cell_type", "batch", "perturbation"]
    known = seen.loc[seen["role"] == "target", labels].iloc[:1]
    split = pd.read_parquet(trained / "split.parquet")
    held_out = split.loc[split["part"] == "test", labels].iloc[:1]
    out = predicted(pd.concat([known, held_out]))
    facts = read_predictions(out).uns["perturbdiff"]
    name = "|".join(known.iloc[0])
    assert (facts["conditions_seen"], list(facts["first_seen"])) == (1, [name])
    pairing = pair(open_predictions(out, CONFIG), open_truth(trained / "store", CONFIG), CONFIG)
    assert [(f["kind"], f["count"]) for f in pairing.findings] == [("seen", 1)]
    assert f"trained on 1 of the 2 predicted conditions ({name})" in pairing.findings[0]["text"]


def test_held_out_conditions_and_untrained_weights_raise_no_warning(trained, predicted):
    split = pd.read_parquet(trained / "split.parquet")
    labels = ["cell_type", "batch", "perturbation"]
    held_out = predicted(split.loc[split["part"] == "test", labels].iloc[:1])
    assert open_predictions(held_out, CONFIG).trained_on == (0, ())
    untrained = predicted(split.loc[split["part"] == "train", labels].iloc[-1:], "--random-init", "--force")
    assert "conditions_seen" not in read_predictions(untrained).uns["perturbdiff"]


@pytest.mark.parametrize(
    ("name", "part"), [("resample", "train"), ("control", "train"), ("resample", "test")]
)
def test_a_baseline_knows_the_conditions_that_it_learned_from(trained, tmp_path, name, part):
    out = predict(name, trained / "store", trained / "split.parquet", tmp_path / "p.h5ad", part=part)
    cells = open_predictions(out, CONFIG)
    assert cells.trained_on is not None
    assert cells.trained_on[0] == (len(cells.rows) if (name, part) == ("resample", "train") else 0)
