"""Shared by all tests: few threads, a tiny data set, and the command line run in this process."""

import gc
import logging
import os
import signal

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a script started us in the background: programs inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from standing_program import standing
from tiny_data import tiny_counts
from trained_folder import make_trained

from perturbdiff.cli import main

forked.build_once()
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


_TESTS = Path(__file__).parent
_LONG = (
    "pipeline/test_docs.py",
    "docs/test_notebooks.py",
    "pipeline",
    "browser",
    "unit/screen/test_run.py",
    "security/test_fuzz.py",
    "fault/test_kills.py",
    "fault/test_surroundings.py",
    "unit/training/test_economy.py",
    "unit/training/test_world_size.py",
    "docs/test_site.py",
    "unit/api",
    "unit/test_benchmarks.py",
    "unit/test_contributing.py",
    "unit/training/test_resume.py",
    "unit/adversaries/test_adversaries.py",
    "unit/training/test_processes.py",
    "unit/preprocessing/test_shared_genes.py",
    "unit/released/test_full_size.py",
)
"""Files, and folders whose tests share what is dear to make, that take more than some ten seconds: longest first."""
_TOGETHER = (
    ("tests/browser/",),
    ("tests/pipeline/",),
    ("tests/unit/api/",),
    ("security/test_fuzz.py", "fault/test_kills.py"),
)
"""Files that share a report, a Nextflow, a model or inputs: one process makes it."""


def _place(item: pytest.Item) -> int:
    """Return the place of a test's file or folder among the long ones."""
    names = {item.path.relative_to(_TESTS).as_posix(), item.path.parent.relative_to(_TESTS).as_posix()}
    return next((place for place, name in enumerate(_LONG) if name in names), len(_LONG))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first, so that with ``-n`` the processes end together."""
    items.sort(key=_place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int:
    """With ``-n auto``: one more than there are CPUs, since tests often wait for Nextflow or other processes."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n``: a file's tests stay on one worker, in order, for what they share; long files come first."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file.endswith(("pipeline/test_docs.py", "docs/test_notebooks.py")):
                return nodeid  # nothing in common
            return next((group[0] for group in _TOGETHER if any(part in file for part in group)), file)

    config.option.loadscopereorder = False  # by number of tests would put the longest last
    return ByFile(config, log)


def pytest_collection_finish():
    """Look for garbage less often, and not among what imports made: a sixth of the time of small tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@dataclass(frozen=True)
class Outcome:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_cli(monkeypatch, capfd):
    """Run ``perturbdiff …`` as a user would; returns exit code and texts. Leaves the log as it was."""
    package = logging.getLogger("perturbdiff")
    before = package.handlers[:], package.level, package.propagate

    def run(*arguments) -> Outcome:
        monkeypatch.setattr("sys.argv", ["perturbdiff", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main.main()
        captured = capfd.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    yield run
    package.handlers[:], package.level, package.propagate = before


@pytest.fixture
def counts_file(tmp_path) -> Path:
    """A small h5ad with raw counts."""
    path = tmp_path / "counts.h5ad"
    tiny_counts().write_h5ad(path)
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with store, split.parquet and bundle of the tiny recipe, made once."""
    return make_trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> Path:
    """Folder of sound inputs of every kind; the first test that needs them makes it."""
    return tmp_path_factory.mktemp("sound") / "good"


@pytest.fixture(scope="session")
def without_pictures() -> Iterator[None]:
    """Leave out the PNG of each figure, which takes a third of a report's time; test_figures.py looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perturbdiff.reporting.figures.svg.image", lambda figure: b"a picture")
        yield


@pytest.fixture(scope="session")
def quick_program() -> Iterator[Path]:
    """A folder with a `perturbdiff` that starts at once, for PATH."""
    with tempfile.TemporaryDirectory(prefix="pd-") as folder, standing(Path(folder)) as place:
        yield place  # not in pytest's own folder: the name of a socket must be short


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium, or the test is skipped."""
    found = subprocess.run(
        [Path(__file__).parents[1] / "bin" / "get-chromium"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"Chromium cannot be had here: {found.stderr.strip().splitlines()[-1]}")
    return found.stdout.strip()


@pytest.fixture(scope="session")
def browser(chromium) -> Iterator[object]:
    """A running browser; playwright makes a new profile for it."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        yield started
        started.close()
