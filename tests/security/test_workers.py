"""Workers are reached through pipes: nothing of ours listens where another user of the node could speak to it."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from perturbdiff.data.crew import Crew


def family(process):
    """Return a process and all that descend from it."""
    found = [process]
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += family(int(child))
    return found


def listening(processes):
    """Return the addresses at which processes listen, from the kernel's tables (state 0A)."""
    sockets = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1]
    found = []
    for process in processes:
        for handle in Path(f"/proc/{process}/fd").glob("*"):
            try:
                found.append(sockets.get(str(handle.readlink())))
            except OSError:
                continue
    return [address for address in found if address]


def wait(seconds):
    time.sleep(seconds)
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tables are Linux's")
def test_workers_listen_nowhere():
    seen, workers, ended = [], [], threading.Event()

    def watch():
        while not ended.wait(0.05):
            seen.extend(listening(family(os.getpid())))

    watcher = threading.Thread(target=watch)
    before = set(listening(family(os.getpid())))
    watcher.start()
    with Crew(2) as crew:
        workers = crew.run(wait, [0.5, 0.5])
    ended.set()
    watcher.join()
    assert os.getpid() not in workers
    assert set(seen) <= before
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
