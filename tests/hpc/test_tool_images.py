"""The images of external methods, as far as they are there, run without home, network or write access.

``bin/build-image --baseline NAME .cache/hpc/perturbdiff-NAME.sif`` makes one; ``PD_TEST_TOOL_IMAGES`` names another
folder with them.
"""

import json
import os
from pathlib import Path

import pytest
from hpc.bed import ROOT

from perturbdiff.baselines.external import known_tools

pytestmark = pytest.mark.hpc

FOLDER = Path(os.environ.get("PD_TEST_TOOL_IMAGES", ROOT / ".cache/hpc"))
SHORT = {
    "cellflow": ["iterations=20", "tolerance=1.0e-2"],
    "cpa": ["epochs=2", "check_val_every_n_epoch=1"],
    "squidiff": ["steps=20"],
    "state": ["max_steps=4"],
}
MAKE = (
    "simulate --config tiny --cells 800 --out {0}/raw",
    "preprocess {0}/raw/counts.h5ad --config tiny --out {0}/store",
)


@pytest.fixture(params=known_tools.names())
def inside(request, apptainer, account):
    """Run a command in a tool's image, and the tool's name."""
    image = FOLDER / f"perturbdiff-{request.param}.sif"
    if not image.is_file():
        pytest.skip(f"no image {image} (bin/build-image --baseline {request.param} makes one)")

    def run(verb, *words, bind="/tmp", timeout=600):
        alone = ("--no-home", "--containall", "--bind", bind)
        return account.run("apptainer", verb, *alone, image, *words, timeout=timeout)

    run.tool, run.image = known_tools.load(request.param), image
    return run


@pytest.fixture
def mine(account, session_folder, request):
    folder = session_folder / "runs" / f"tool-{os.getpid()}-{request.node.name.split('[')[-1][:-1]}"
    folder.mkdir(exist_ok=True)
    return account.give(folder)


def test_labels_tell_what_is_in_it_and_its_licence(inside, account):
    asked = account.run("apptainer", "inspect", "--json", "--labels", inside.image)
    labels = json.loads(asked.stdout)["data"]["attributes"]["labels"]
    tool, prefix = inside.tool, "org.perturbdiff.baseline"
    assert labels[f"{prefix}.name"] == tool.name
    assert labels[f"{prefix}.version"] == f"{tool.package} {tool.version}"
    assert labels[f"{prefix}.lock.sha256"] == tool.lock_sha256, "the lock was changed since"
    assert labels[f"{prefix}.licence"]
    minor = tuple(map(int, labels[f"{prefix}.python"].split(".")[:2]))
    assert minor in tool.pythons


def test_its_own_test_passes(inside):
    done = inside("test")
    assert done.returncode == 0, done.stderr
    assert f"{inside.tool.title} {inside.tool.version} can be imported" in done.stdout


def test_it_trains_and_predicts(inside, mine):
    commands = [line.format(mine) for line in MAKE]
    held_out = "--set split.num_held_out=1 --set split.train_fraction=0.3"
    commands.append(f"split {mine}/store --config tiny {held_out} --out {mine}/split.parquet")
    changed = " ".join(f"--set baseline.options.{one}" for one in SHORT[inside.tool.name])
    commands.append(
        f"baseline {inside.tool.name} {mine}/store --split {mine}/split.parquet --out {mine}/out.h5ad "
        f"--set baseline.settings=quick {changed} --threads 1 --device cpu"
    )
    for line in commands:
        done = inside("run", "-q", *line.split(), bind=str(mine))
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    record = json.loads((mine / "out.h5ad.run.json").read_text())
    assert record["image"]["name"] == inside.image.name
