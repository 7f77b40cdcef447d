"""CPU seconds of the demo's training steps as the command takes them, of one checkout or of two in turn.

    OMP_NUM_THREADS=1 python benchmarks/small_steps.py STORE SPLIT [--other CHECKOUT] [--steps 200] [--repeats 5]

STORE and SPLIT are what the recipe `demo` makes. Each turn is a process of its own that trains with the whole loop:
loading, loop, callbacks, optimiser, average. The first 20 steps warm up; start-up, validation and checkpoints are
left out. Medians, and the ratio of each pair of turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP = 20


def once(given: argparse.Namespace) -> None:
    """Train, and print the CPU seconds of a step."""
    from perturbdiff.config import recipes
    from perturbdiff.training.callbacks.training_log import Throughput
    from perturbdiff.training.training_stages import train

    steps = WARM_UP + given.steps
    never = [f"train.{name}=1000000" for name in ("valid_every", "checkpoint_every", "log_every")]
    lasts = [f"train.max_steps={steps}", "train.min_steps=1", "train.max_epochs=null", *never, *given.set]
    config = recipes.load("demo", lasts)
    clock: list[float] = []
    counted = Throughput.step

    def step(self: Throughput, cells: int) -> None:
        clock.append(time.process_time())
        counted(self, cells)

    Throughput.step = step
    with tempfile.TemporaryDirectory() as folder:
        train(given.store, given.split, Path(folder) / "bundle", config, device="cpu")
        weights = (Path(folder) / "bundle" / "model.safetensors").read_bytes()
    import hashlib

    spent = (clock[-2] - clock[WARM_UP - 1]) / (len(clock) - 1 - WARM_UP)  # the last step validates
    print(json.dumps({"spent": spent, "weights": hashlib.sha256(weights).hexdigest()[:12]}))


def turn(given: argparse.Namespace, checkout: Path) -> dict:
    command = [
        sys.executable,
        __file__,
        str(given.store),
        str(given.split),
        "--once",
        "--steps",
        str(given.steps),
    ]
    command += [word for text in given.set for word in ("--set", text)]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("split", type=Path)
    parser.add_argument("--other", type=Path, help="another checkout, to compare with")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        once(given)
        return
    here = Path(__file__).parents[1]
    found: dict[str, list[dict]] = {}
    for repeat in range(given.repeats):
        sides = [("here", here), *([("other", given.other.resolve())] if given.other else [])]
        for name, checkout in sides if repeat % 2 else sides[::-1]:
            found.setdefault(name, []).append(turn(given, checkout))
    for name, turns in found.items():
        spent = [1000 * one["spent"] for one in turns]
        print(
            f"{name}: {statistics.median(spent):.2f} ms of CPU a step ({min(spent):.2f} to {max(spent):.2f})"
        )
        print(f"{name}: weights {sorted({one['weights'] for one in turns})}")
    if given.other:
        ratios = [b["spent"] / a["spent"] for a, b in zip(found["here"], found["other"], strict=True)]
        print(
            f"other / here, by pairs: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
