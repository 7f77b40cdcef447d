"""One copy of a store for the processes of a node."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_store import small_store

from perturbdiff.runtime import large_arrays
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.large_arrays import Node

pytestmark = pytest.mark.skipif(not Node.supported(), reason="needs Linux")

OTHER = """
import sys
import numpy as np
from perturbdiff.runtime.large_arrays import Node
from perturbdiff.store.store import Store

store = Store(sys.argv[1])
node = Node(sys.argv[2], int(sys.argv[3]), 3)
assert node.agree("fits", False) is True
held = store.in_memory(node)
rows = np.arange(store.n_cells)[::-3]
assert (held.dense(rows) == store.dense(rows)).all()
before = held._data[0]
held._data[0] = before + 1  # one copy: the others see it
held._data[0] = before
print("same", held.n_counts.sum(), flush=True)
"""


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(
        large_arrays, "WAIT", 300
    )  # two interpreters start meanwhile, perhaps beside much else
    return f"test {os.getpid()} {np.random.default_rng().integers(1 << 40)}"


def test_all_processes_hold_one_copy(tmp_path, run):
    store = small_store(tmp_path).opened
    others = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER, str(store.path), run, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in (1, 2)
    ]
    node = Node(run, 0, 3)
    assert node.agree("fits", True)
    held = store.in_memory(node)
    for other in others:
        text, _ = other.communicate(timeout=300)
        assert other.returncode == 0
        assert text.split()[0] == "same"
        assert float(text.split()[1]) == pytest.approx(store.n_counts.sum())
    rows = np.array([5, 3, 3, 100])
    np.testing.assert_array_equal(held.dense(rows), store.dense(rows))
    assert (held.counts(rows) != store.counts(rows)).nnz == 0
    assert held.in_memory() is held


def test_the_end_of_the_first_process_is_told(run):
    script = (
        "import sys, os, time; from perturbdiff.runtime.large_arrays import Node\n"
        "Node(sys.argv[1], 0, 2).share('x', 10, lambda block: (time.sleep(1), os._exit(1)))"
    )
    first = subprocess.Popen([sys.executable, "-c", script, run])
    with pytest.raises(UserError, match="ended while it read the cells"):
        Node(run, 1, 2).share("x", 10, lambda block: None)
    assert first.wait() == 1


def test_a_block_may_be_asked_for_again(run):
    """As for a store that is given under two names."""
    first, second = Node(run, 0, 2), Node(run, 1, 2)
    with ThreadPoolExecutor(1) as other:
        answers = other.submit(lambda: [second.agree("x", False) for _ in range(100)])
        assert [first.agree("x", bool(i % 2)) for i in range(100)] == answers.result()


def test_waiting_ends(run, monkeypatch):
    monkeypatch.setattr(large_arrays, "WAIT", 0.2)
    with pytest.raises(UserError, match="first process of this node did not start"):
        Node(run, 1, 2).share("x", 1, lambda block: None)
    with pytest.raises(UserError, match="1 processes of this node did not start"):
        Node(run, 0, 2).share("x", 1, lambda block: None)
