"""The loss curve that the recipe `tiny` has on the tests' data; ``python tests/golden_curve.py`` stores it anew.

Store it anew only with a change that is meant to change what training computes (an initialisation, an order of
random draws, a loss); what only makes it faster has to keep the curve.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from small_store import small_store

from perturbdiff.training.training_stages import train

STORED = Path(__file__).parent / "unit" / "training" / "golden_tiny.json"
CHANGES = ["train.max_steps=30", "train.log_every=1", "train.loggers=[]"]
TERMS = {"train": ["total", "mmd", "mse"], "valid": ["total", "mmd", "mse", "energy"]}


def curve(folder: Path) -> dict[str, Any]:
    """Preprocess, split and train on one thread; return the terms of the loss by step, train and valid."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = small_store(folder, CHANGES)
        bundle = train(made.store, made.split, folder / "bundle", made.recipe, device="cpu")
    finally:
        torch.set_num_threads(threads)
    rows = pd.read_csv(bundle / "training.csv")
    return {
        split: rows[rows["split"] == split][["step", *terms]].to_dict(orient="list")
        for split, terms in TERMS.items()
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        STORED.write_text(json.dumps(curve(Path(name)), indent=1) + "\n")
