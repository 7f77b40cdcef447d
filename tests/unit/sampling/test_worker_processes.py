"""Several processes: the same cells as one, whatever fails is told, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import threading
import time

import numpy as np
import pandas as pd
import pytest
import sampling_doubles as doubles

from perturbdiff import sampling
from perturbdiff.config.settings import SampleConfig
from perturbdiff.predictions import read_predictions
from perturbdiff.runtime.errors import UserError
from perturbdiff.sampling import shards


def test_two_processes_write_the_very_file_of_one(trained, tmp_path):
    pd.DataFrame(
        {"cell_type": ["B", "T", "B"], "batch": ["d1", "d2", "d2"], "perturbation": ["p1", "p2", "p2"],
         "n_cells": [40, 16, 70], "guidance": [0.0, 2.0, None]}
    ).to_csv(tmp_path / "wanted.csv", index=False)  # fmt: skip
    settings = SampleConfig(num_steps=3, sets_per_batch=2, guidance=0.5, eta=0.3)
    made = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.h5ad"
        sampling.sample(
            trained / "bundle", trained / "store", out, conditions=tmp_path / "wanted.csv", config=settings,
            device="cpu", processes=processes,
        )  # fmt: skip
        made.append(read_predictions(out))
    np.testing.assert_array_equal(made[0].X.toarray(), made[1].X.toarray())
    pd.testing.assert_frame_equal(made[0].obs, made[1].obs)
    assert (tmp_path / "1.h5ad.manifest.json").read_bytes() == (
        tmp_path / "2.h5ad.manifest.json"
    ).read_bytes()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("opened", "kind", "message"),
    [
        (doubles.user_error, UserError, "^the store is upside down$"),
        (doubles.bug, RuntimeError, r"on cpu failed: Traceback[\s\S]*IndexError"),
    ],
)
def test_a_failed_process_tells_what_happened(opened, kind, message):
    mine, theirs = multiprocessing.Pipe(duplex=False)
    shards._work(theirs, opened, [[]], "cpu")
    with pytest.raises(kind, match=message):
        shards._received(mine, "cpu")


def test_a_killed_process_ends_the_run():
    found = shards.drawn(doubles.Deadly, [["a"], ["deadly"], ["b"]], ["here"])
    assert next(found) == (["a"], "here")
    with pytest.raises(RuntimeError, match="on here ended without a message"):
        next(found)
    assert not multiprocessing.active_children()


def test_a_process_that_is_done_early_is_not_missed():
    """Its closed pipe is not read again while a slower one is waited for."""
    slow, late = multiprocessing.Pipe(duplex=False)
    quick, early = multiprocessing.Pipe(duplex=False)
    early.send(("cells", "batch 1"))
    early.close()

    def work() -> None:
        late.send(("cells", "batch 0"))
        time.sleep(0.5)
        late.send(("cells", "batch 2"))
        late.close()

    thread = threading.Thread(target=work)
    thread.start()
    found = list(shards._in_order([slow, quick], 3, ["cpu", "cpu"]))
    thread.join()
    assert found == ["batch 0", "batch 1", "batch 2"]
