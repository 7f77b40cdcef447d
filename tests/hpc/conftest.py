"""A cluster for the tests: found once, and each test skipped with a reason where something is missing."""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hpc.bed import ROOT, SHARED, Account, Bed, copy_tree, locked, visible

PARTITIONS = {"cpu", "gpu", "preempt", "urgent"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Tests of a class share their runs and stay on one worker, in order; functions go to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class ByClass(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition("::")[0] if nodeid.count("::") > 1 else nodeid

    return ByClass(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.hpc)


def common_folder() -> None:
    SHARED.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):
        SHARED.chmod(0o1777)


def remove_old(account: Account) -> None:
    """Folders of sessions that failed are kept for a day."""
    for folder in SHARED.glob(f"session-{account.name}-*/"):
        if time.time() - folder.stat().st_mtime > 86400:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def account() -> Account:
    """The ordinary user who runs everything."""
    try:
        return Account.find()
    except KeyError as problem:
        pytest.skip(f"{problem.args[0]}; tests/hpc/cluster up makes one, PD_TEST_USER names another")


@pytest.fixture(scope="session")
def slurm(account) -> None:
    """Slurm answers and has the partitions of the test cluster."""
    if shutil.which("sinfo") is None:
        pytest.skip("Slurm is missing (tests/hpc/cluster up brings up a small one)")
    asked = account.run("sinfo", "-h", "-o", "%R %a")
    if asked.returncode:
        pytest.skip(f"Slurm does not answer: {asked.stderr.strip().splitlines()[-1]}")
    absent = PARTITIONS - {line.split()[0] for line in asked.stdout.splitlines() if line.endswith("up")}
    if absent:
        pytest.skip(f"Slurm has no partition {', '.join(sorted(absent))}: not the test cluster")


@pytest.fixture(scope="session")
def apptainer(account) -> None:
    """The user can start Apptainer."""
    if shutil.which("apptainer") is None:
        pytest.skip("Apptainer is missing (tests/hpc/cluster up installs it)")
    asked = account.run("apptainer", "--version")
    if asked.returncode:
        pytest.skip(f"Apptainer does not start as {account.name}: {asked.stderr.strip()}")


@pytest.fixture(scope="session")
def session_folder(account, request):
    """A folder of this session that all nodes see, shared by its workers; kept if a test failed."""
    common_folder()
    # the controller of xdist gives all its workers one name
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")[:12]
    folder = SHARED / f"session-{account.name}-{name}"
    users = SHARED / f"{folder.name}.lock"
    with locked(users, alone=False):
        with locked(SHARED / "sessions.lock"):
            if not folder.exists():
                remove_old(account)
                # two heads that start at once cannot both make Nextflow's own folder
                for own in (folder / "runs", folder / "nextflow-home"):
                    own.mkdir(parents=True)
                account.give(folder)
        yield folder
        if request.session.testsfailed:
            (folder / "failed").touch()
            print(f"\nkept for a look: {folder}")
    if not (folder / "failed").exists():
        with contextlib.suppress(BlockingIOError), locked(users, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
            users.unlink()


@pytest.fixture(scope="session")
def image(apptainer, account, session_folder) -> Path:
    """The image under test: PD_TEST_IMAGE, or the one that tests/hpc/image makes."""
    path = Path(os.environ.get("PD_TEST_IMAGE", ROOT / ".cache/hpc/perturbdiff.sif"))
    if not path.is_file():
        pytest.skip(f"no image {path} (tests/hpc/image makes one, PD_TEST_IMAGE names another)")
    return visible(account, path, session_folder)


@pytest.fixture(scope="session")
def program(account, session_folder) -> Path:
    """Nextflow, as the user can start it."""
    found = subprocess.run([ROOT / "bin" / "get-nextflow"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"Nextflow cannot be had here: {found.stderr.strip().splitlines()[-1]}")
    return visible(account, Path(found.stdout.strip()), session_folder)


@pytest.fixture(scope="session")
def bed(slurm, account, image, program, session_folder) -> Bed:
    """Slurm, Apptainer, the image, Nextflow and a copy of the working tree that all nodes see."""
    ready = Bed(account, session_folder, program, image)
    with locked(session_folder / "copy.lock"):
        if not ready.site.exists():
            copy_tree(account, ready.site)
    return ready


@pytest.fixture(scope="module")
def workflow_in(bed):
    """Return a function: name → `Workflow` in a fresh folder, for runs that the tests of a module share."""
    opened = []

    def fresh(name: str):
        opened.append(bed.workflow(name))
        return opened[-1]

    yield fresh
    for one in opened:
        one.close()


@pytest.fixture
def workflow(bed, request):
    """The workflow in a fresh folder for one test."""
    fresh = bed.workflow(request.node.name.partition("[")[0].removeprefix("test_"))
    yield fresh
    fresh.close()
