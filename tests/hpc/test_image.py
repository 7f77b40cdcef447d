"""The image: who built it and from what, what it holds, and that anybody can run it without a home or a GPU."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from hpc.bed import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from perturbdiff import __version__

pytestmark = pytest.mark.hpc

# each distribution with its version, and what is asked for and missing or of another version
INSTALLED = """
import importlib.metadata, json, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as name
ours = [path for path in sys.path if path.startswith("/opt/venv")]
found = {name(one.metadata["Name"]): one for one in importlib.metadata.distributions(path=ours)}
broken = []
for one in found.values():
    for asked in map(Requirement, one.requires or []):
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            there = found.get(name(asked.name))
            if there is None or not asked.specifier.contains(there.version, prereleases=True):
                broken.append(f"{one.name} wants {asked}")
print(json.dumps({"versions": {key: one.version for key, one in found.items()}, "broken": broken}))
"""


@pytest.fixture(scope="module")
def inside(account, image):
    """Run a command in the image as the ordinary user, who has neither home nor host folders there."""

    def run(*command, options=(), verb="exec", cwd=None, timeout=300):
        return account.run(
            "apptainer",
            verb,
            "--no-home",
            "--containall",
            *options,
            image,
            *command,
            cwd=cwd,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="module")
def labels(account, image) -> dict[str, str]:
    asked = account.run("apptainer", "inspect", "--json", "--labels", image)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)["data"]["attributes"]["labels"]


@pytest.fixture
def mine(account, session_folder):
    """A folder of the user's own."""
    folder = session_folder / "runs" / f"image-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return account.give(folder)


def source_digest() -> str:
    """SHA-256 over the package's files as the recipe has it: of the lines that sha256sum prints."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "perturbdiff"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    names = sorted({name for name in listed.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists()})
    lines = [
        hashlib.sha256((ROOT / os.fsdecode(n)).read_bytes()).hexdigest().encode() + b"  " + n for n in names
    ]
    return hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()


def test_an_ordinary_user_built_it_and_its_digest_lies_beside_it(image, account):
    assert account.uid != 0
    assert image.stat().st_uid == account.uid
    kept = account.run("sha256sum", "--check", f"{image.name}.sha256", cwd=image.parent, timeout=300)
    assert kept.returncode == 0, kept.stderr
    told = account.run(ROOT / "bin" / "image-digest", "--kept", image)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}\n", told.stdout)
    assert told.stdout[7:71] in image.with_name(f"{image.name}.sha256").read_text()


def test_labels_tell_version_commit_and_lock(labels):
    assert labels["org.opencontainers.image.version"] == __version__
    assert re.fullmatch(r"[0-9a-f]{40}", labels["org.opencontainers.image.revision"])
    assert labels["org.perturbdiff.dirty"] in ("true", "false")
    lock = hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()
    assert labels["org.perturbdiff.lock.sha256"] == lock
    made_from = labels["org.perturbdiff.source.sha256"]
    assert made_from == source_digest(), "the package was changed since: tests/hpc/image makes a new image"
    assert "org.opencontainers.image.source" in labels


def test_its_own_test_passes(inside):
    done = inside(verb="test")
    assert done.returncode == 0, done.stderr
    assert f"perturbdiff {__version__}" in done.stdout
    assert "simulate, preprocess: well" in done.stdout


def test_it_holds_the_locked_versions_and_nothing_else(inside):
    # the markers of the lock are those of this Python; the image's is of the same kind
    asked = [
        Requirement(line.rstrip("\\ "))
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if re.match(r"[A-Za-z0-9]", line)
    ]
    locked = {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in asked
        if one.marker is None
        or one.marker.evaluate({"python_version": "3.11", "python_full_version": "3.11.2"})
    }
    assert len(locked) > 50
    done = inside("python", "-c", INSTALLED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"] == locked | {"perturbdiff": __version__}
    assert found["broken"] == []


def test_it_runs_without_home_gpu_or_write_access(inside):
    done = inside("--help", verb="run")
    assert done.returncode == 0, done.stderr
    assert "Usage: perturbdiff" in done.stdout
    gpu = "python -c 'import torch; print(torch.cuda.is_available())'"
    script = f"ps -o pid= -p $$ && touch /opt/venv/x; perturbdiff --version && {gpu}"
    done = inside("bash", "-c", script, options=["--nv"])
    assert done.returncode == 0, done.stderr
    assert f"perturbdiff {__version__}\n" in done.stdout
    assert re.search(r"^\s*\d+$", done.stdout, re.M), "no ps"
    assert "Read-only file system" in done.stderr


def test_an_output_names_image_and_commit_and_caches_stay_in_tmp(inside, mine, image, labels, account):
    # somebody else's file has the name of our cache: another is used
    (mine / "tmp").mkdir()
    (mine / "tmp" / f"perturbdiff-{account.uid}").touch()
    account.give(mine / "tmp")
    options = ["--bind", f"{mine},{mine / 'tmp'}:/tmp", "--env", "PD_IMAGE_ID=sha256:0123"]
    command = ["perturbdiff", "-q", "simulate", "--config", "tiny", "--cells", "800", "--out", mine / "raw"]
    done = inside(*command, options=options)
    assert done.returncode == 0, done.stderr
    record = json.loads((mine / "raw" / "run.json").read_text())
    assert record["image"] == {"name": image.name, "id": "sha256:0123"}
    assert record["code"]["commit"] == labels["org.opencontainers.image.revision"]
    assert record["code"]["dirty"] is (labels["org.perturbdiff.dirty"] == "true")
    assert record["code"]["lock_sha256"] == labels["org.perturbdiff.lock.sha256"]
    manifest = (mine / "raw" / "manifest.json").read_text()
    assert not re.search(r"image|commit|0123\b|\.sif", manifest)
    shown = inside("bash", "-c", "echo $NUMBA_CACHE_DIR; cd ${NUMBA_CACHE_DIR%/*}", options=options)
    assert shown.returncode == 0, shown.stderr
    assert re.fullmatch(r"/tmp/tmp\.\w+/numba", shown.stdout.strip())


def test_the_same_files_make_no_second_image(account, image):
    if "PD_TEST_IMAGE" in os.environ:
        pytest.skip("PD_TEST_IMAGE names an image that tests/hpc/image did not make")
    before = image.stat().st_mtime_ns
    done = subprocess.run(
        [ROOT / "tests/hpc/image"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / ".cache/hpc/perturbdiff.sif"
    assert image.stat().st_mtime_ns == before
