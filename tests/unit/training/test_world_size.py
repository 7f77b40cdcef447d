"""Two processes learn what one does with the same sets in a step, that is with twice the sets of each process.

The learning rate is small: what rounding makes of the order of summation grows with every step and with the rate,
and would hide a real difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

SMALL = [
    "model.width=32", "model.depth=2", "model.heads=4", "model.covariate_width=16",
    "train.max_steps=50", "train.max_epochs=null", "train.set_size=16", "train.sets_per_step=8",
    "train.learning_rate=5e-5", "train.warmup_steps=5", "train.log_every=1", "train.valid_every=25",
    "train.valid_sets=4", "train.checkpoint_every=50", "train.keep_every=null",
]  # fmt: skip
LAUNCH = [
    sys.executable,
    "-m",
    "perturbdiff.training.distributed.launcher",
    "--processes",
    "2",
    "perturbdiff",
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def learn(quick_program):
    """Return a function that runs a training command in processes of its own and returns its bundle."""

    def run(arguments, out, *changes, two=False, code=0, **env):
        given = [word for change in (*SMALL, *changes) for word in ("--set", change)]
        command = [*(LAUNCH if two else ["perturbdiff"]), *arguments, "--device", "cpu", "--out", out, *given]
        ran = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": f"{quick_program}:{os.environ['PATH']}", **env},
        )
        assert ran.returncode == code, ran.stderr
        return out

    return run


def assert_close(one, two):
    curves = [pd.read_csv(bundle / "training.csv") for bundle in (one, two)]
    assert curves[0]["split"].value_counts().to_dict() in ({"train": 50}, {"train": 50, "valid": 2})
    pd.testing.assert_frame_equal(*curves, rtol=TOLERANCE, atol=TOLERANCE)
    weights = [load_file(bundle / "model.safetensors") for bundle in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


WHOLE_SETS = ["loss.mmd_statistic=set", "train.set_noise=0.1"]


@pytest.mark.parametrize(
    ("recipe", "extra"),
    [
        ("paper", []),
        ("released", ["train.accumulate=2"]),
        ("recommended", ["train.accumulate=2"]),
        ("recommended", WHOLE_SETS),
    ],
    ids=["paper", "released", "recommended", "whole sets"],
)
def test_the_curve_of_two_processes_is_that_of_one(trained, learn, tmp_path, recipe, extra):
    # twin sets, two generated sets for one true one, and averages in passes: all couplings within a step
    train = ["train", trained / "store", "--split", trained / "split.parquet", "--config", recipe]
    one = learn(train, tmp_path / "one", *extra)
    two = learn(train, tmp_path / "two", *extra, two=True)
    assert_close(one, two)
    if extra == WHOLE_SETS:  # same seed, same number of processes: same bits, interrupted or not
        learn(train, tmp_path / "again", *extra, two=True, code=75, PD_END_TIME=str(time.time()))
        again = learn(train, tmp_path / "again", *extra, two=True)
        for name in ("model.safetensors", "training.csv", "manifest.json"):
            assert (again / name).read_bytes() == (two / name).read_bytes(), name


def test_a_data_set_may_be_on_one_process_only(trained, learn, tmp_path):
    """Each data set has its own input layers, which then have no gradient on the other process."""
    other = tmp_path / "other"
    other.symlink_to(trained / "store")
    pretrain = ["pretrain", trained / "store", other, "--config", "tiny"]
    # U, for with V a cell's distance to itself, the root of rounding, is in the value (not in the gradient)
    changes = ("train.sets_per_step=2", "train.choose=last", "train.clip_norm=0.01", "loss.mmd_statistic=U")
    one = learn(pretrain, tmp_path / "one", *changes)
    assert_close(one, learn(pretrain, tmp_path / "two", *changes, two=True))


def test_sets_that_processes_cannot_share_are_refused(trained, quick_program, tmp_path):
    train = ["train", trained / "store", "--split", trained / "split.parquet", "--config", "recommended"]
    command = [
        *LAUNCH,
        *train,
        "--device",
        "cpu",
        "--out",
        tmp_path / "out",
        "--set",
        "train.sets_per_step=6",
    ]
    env = {**os.environ, "PATH": f"{quick_program}:{os.environ['PATH']}"}
    env["CUDA_VISIBLE_DEVICES"] = "0,1"  # what Slurm says of GPUs that PyTorch does not see
    ran = subprocess.run([str(w) for w in command], capture_output=True, text=True, check=False, env=env)
    assert ran.returncode == 2
    assert [line for line in ran.stderr.splitlines() if "error" in line] == [
        "error: train.sets_per_step=6 does not make pairs for 2 processes; "
        "loss.mmd_statistic=cross needs a multiple of 4"
    ]
    assert not (tmp_path / "out").exists()
