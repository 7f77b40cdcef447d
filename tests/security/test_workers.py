"""Workers are reached through pipes: nothing of ours listens, or can be read, where another user of the node is."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from perturbdiff.runtime.task_runner import TaskRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tables are Linux's")
LISTENS = "0A"
NOBODY = 65534
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}

FEW_GENES = ["--set", "data.num_hvgs=40"]

COMMANDS = """
import sys
if __name__ == "__main__":  # not in the workers, which need none of it
    from perturbdiff.cli import main as cli
    from perturbdiff.preprocessing import passes
    passes.VALUES_PER_PIECE = 1000
    if "stats" in sys.argv:
        from perturbdiff.statistics import expression_pass, statistics_stage as statistics
        expression_pass.ROWS_PER_TASK = 100
        statistics.SMALL_STORE = 0
    sys.argv[0] = "perturbdiff"
    cli.main()
"""
"""The command line, which starts workers for few cells as well."""

LAUNCHED = """
import sys, time
import torch, torch.distributed as group
from perturbdiff.training.distributed.processes import Processes
Processes.from_environment().meet("cpu")
ours = torch.ones(1)
group.all_reduce(ours)
assert ours == 2
time.sleep(2)
"""


def family(process):
    """Return a process and all that descend from it."""
    found = [process]
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = tasks.read_text().split()
        except OSError:
            continue
        for child in children:
            found += family(int(child))
    return found


def listening(processes):
    """Return the addresses at which processes listen, from the kernel's tables."""
    sockets = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                sockets[f"socket:[{fields[9]}]"] = fields[1]
    found = set()
    for process in processes:
        try:
            handles = list(Path(f"/proc/{process}/fd").iterdir())
        except OSError:
            continue
        for handle in handles:
            try:
                found.add(sockets.get(str(handle.readlink())))
            except OSError:
                continue
    return found - {None}


class Watched:
    """A command that runs, and what was seen of it from outside."""

    def __init__(self, command, folder, **env):
        self.addresses, self.opened, self.most = set(), set(), 0
        before = self.as_another_user(folder, [])
        process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder), **env})
        looked = 0.0
        try:
            while process.poll() is None:
                processes = family(process.pid)
                self.most = max(self.most, len(processes))
                self.addresses |= listening(processes)
                if len(processes) > 1 and time.monotonic() > looked + 0.5:
                    looked = time.monotonic()
                    self.opened |= self.as_another_user(folder, processes) - before
                time.sleep(0.05)
        finally:
            process.kill()
            self.code = process.wait()

    @staticmethod
    def as_another_user(folder, processes):
        """Return what another user can open of processes, shared memory and a folder."""
        if os.getuid():
            return set()  # nobody but root can be another user
        reading, writing = os.pipe()
        if child := os.fork():
            os.close(writing)
            with os.fdopen(reading) as answer:
                found = set(answer.read().splitlines())
            assert os.waitpid(child, 0)[1] == 0
            return found
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with os.fdopen(writing, "w") as answer:
                answer.write("\n".join(opened(folder, processes)))
        finally:
            os._exit(0 if os.getuid() == NOBODY else 1)


def opened(folder, processes):
    """Yield the paths that can be opened."""
    paths = [f"/proc/{process}/{name}" for process in processes for name in ("environ", "mem")]
    folders = [f"/proc/{process}/fd" for process in processes]
    for top in ("/dev/shm", folder):
        for at, names, files in os.walk(top):
            paths += [f"{at}/{name}" for name in files]
            folders += [f"{at}/{name}" for name in names]
    for path in [*paths, *folders]:
        try:
            if path in folders:
                list(Path(path).iterdir())
            else:
                with Path(path).open("rb") as file:
                    file.read(1)
            yield path
        except OSError:
            continue


@pytest.fixture
def public():
    """A folder for temporary files that everybody sees, as /tmp is."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_the_watcher_sees_what_is_open(public):
    """Else the tests below could not fail."""
    script = f"""
import socket, subprocess, time
open("{public}/open", "w").close()
link = socket.create_server(("127.0.0.1", 0))
subprocess.run(["sleep", "1"])
"""
    seen = Watched([sys.executable, "-c", script], public)
    assert {address.split(":")[0] for address in seen.addresses} == {"0100007F"}
    if os.getuid() == 0:
        assert seen.opened == {f"{public}/open"}


@pytest.mark.parametrize("command", ["preprocess", "stats"])
def test_commands_with_workers_are_closed_to_others(command, counts_file, trained, tmp_path, public):
    arguments = {
        "preprocess": ["preprocess", counts_file, "--out", tmp_path / "o", *FEW_GENES],
        "stats": ["stats", trained / "store", "--out", tmp_path / "o"],
    }[command]
    (tmp_path / "run.py").write_text(COMMANDS)
    seen = Watched(
        [sys.executable, tmp_path / "run.py", *map(str, arguments), "--jobs", "2"],
        public,
        PD_LOG="",
    )
    assert seen.code == 0
    assert seen.most >= 3
    assert not seen.addresses
    assert not seen.opened
    assert not list(public.iterdir())


def test_processes_of_a_training_on_one_node_listen_on_loopback_alone(public):
    launch = [sys.executable, "-m", "perturbdiff.training.distributed.launcher", "--processes", "2"]
    seen = Watched([*launch, sys.executable, "-c", LAUNCHED], public)
    assert seen.code == 0
    assert seen.most >= 3
    assert {address.split(":")[0] for address in seen.addresses} <= LOOPBACK
    assert not seen.opened
    assert not list(public.iterdir())


def wait(seconds):
    time.sleep(seconds)
    return os.getpid()


def test_workers_go_when_they_are_not_needed():
    with TaskRunner(2) as crew:
        workers = crew.run(wait, [0.5, 0.5])
    assert os.getpid() not in workers
    assert len(set(workers)) == 2
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_workers_end_with_a_command_that_is_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import time\nfrom perturbdiff.runtime.task_runner import TaskRunner\n"
        "if __name__ == '__main__':\n    with TaskRunner(2) as tasks:\n        tasks.run(time.sleep, [60, 60])\n"
    )
    process = subprocess.Popen([sys.executable, script])
    while len(family(process.pid)) < 4:  # with the standard library's tracker
        assert process.poll() is None
        time.sleep(0.05)
    workers = family(process.pid)[1:]
    threading.Timer(1, process.kill).start()
    process.wait()
    end = time.monotonic() + 10
    while any(alive(worker) for worker in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(worker) for worker in workers)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
