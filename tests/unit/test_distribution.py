"""What is handed on: the wheel and the sdist, built without a network, and the wheel installed in a bare folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import perturbdiff

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "perturbdiff"
KEPT_OUT = (".pyc", ".sif", ".h5ad", ".parquet", ".ckpt", ".pkl", ".ipynb")


def uv(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program, "uv is one of the package's own requirements"
    command = [program, *map(str, arguments), "--offline", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with both, built from a copy of what a checkout has."""
    folder = tmp_path_factory.mktemp("built")
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "requirements.lock",
    ):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "perturbdiff", ignore=ignored)
    shutil.copytree(ROOT / "tests" / "data", folder / "tests" / "data")
    pytest.importorskip("hatchling", reason="hatchling builds: `make env-dev` installs it")
    done = uv(
        "build", folder, "--out-dir", folder / "dist", "--no-build-isolation", "--python", sys.executable
    )
    assert done.returncode == 0, done.stderr
    return folder / "dist"


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built / f"perturbdiff-{perturbdiff.__version__}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        facts = wheel.read(f"perturbdiff-{perturbdiff.__version__}.dist-info/METADATA").decode()
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    dist_info = f"perturbdiff-{perturbdiff.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(dist_info)} == ours
    for needed in (
        "py.typed",
        "config/presets/tiny.yaml",
        "config/variants/recommended.yaml",
        "config/sizes/small.yaml",
        "datasets/registry.yaml",
        "reporting/page/templates/report.html.j2",
        "reporting/page/templates/report.css",
        "baselines/external/tools/cpa.lock",
        "baselines/external/adapters/run_cpa.py",
    ):
        assert f"perturbdiff/{needed}" in names, needed
    assert not [name for name in names if name.endswith(KEPT_OUT) or "test" in Path(name).name]
    assert f"{dist_info}licenses/LICENSE" in names
    for extra in ("embed", "hub", "wandb", "mlflow", "pseudobulk"):
        assert f"Provides-Extra: {extra}" in facts


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built / f"perturbdiff-{perturbdiff.__version__}.tar.gz") as sdist:
        sdist.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert not (folder / "tests").exists()
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "requirements.lock"):
        assert (folder / name).is_file(), name
    done = uv("build", "--wheel", folder, "--out-dir", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    wheel = f"perturbdiff-{perturbdiff.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / "again" / wheel) as one, zipfile.ZipFile(built / wheel) as other:
        assert {i.filename: i.CRC for i in one.infolist()} == {i.filename: i.CRC for i in other.infolist()}


def test_the_wheel_answers_from_a_bare_folder(built, tmp_path):
    wheel = built / f"perturbdiff-{perturbdiff.__version__}-py3-none-any.whl"
    done = uv("pip", "install", "--no-deps", "--target", tmp_path / "bare", "--python", sys.executable, wheel)
    assert done.returncode == 0, done.stderr
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "bare")}

    def answer(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert answer("-c", "import perturbdiff; print(perturbdiff.__file__)").startswith(str(tmp_path / "bare"))
    assert answer("-m", "perturbdiff", "--version") == f"perturbdiff {perturbdiff.__version__}\n"
    assert "kang18" in answer("-m", "perturbdiff", "config", "show")
    assert (tmp_path / "bare" / "bin" / "perturbdiff").is_file()


def test_one_version_everywhere():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.M)[0]
    assert changelog.index("## [Unreleased]") < changelog.index(f"## [{version}]")
    assert version == perturbdiff.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation
    assert re.search(rf"version\s+= '{version}'", (ROOT / "nextflow.config").read_text())
