"""What a pass is made of: scopes and their shares, partners for chance, threads that work on what one reads."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perturbdiff.conditions.condition import Condition
from perturbdiff.evaluation.scoring.condition_pass import _partners
from perturbdiff.evaluation.scoring.scopes import of_shard, sizes_of, units_of
from perturbdiff.evaluation.scoring.worker_threads import Workers, usable


def pairing(conditions, contexts=None, controls=None, own=None) -> Any:
    """Return what scopes need of a pairing; conditions with their numbers of cells."""
    groups = {c.group for c in conditions}
    rows = {c: np.arange(n) for c, n in conditions.items()}
    return SimpleNamespace(
        conditions=sorted(conditions),
        contexts={c: c.cell_type for c in conditions} if contexts is None else contexts,
        controls={g: np.arange(5) for g in (groups if controls is None else controls)},
        predicted_controls=own,
        real=SimpleNamespace(rows=rows),
        predicted=SimpleNamespace(rows=rows),
    )


SCREEN = {
    Condition(p, t, b): 10 * (i + 1)
    for i, t in enumerate("ABC")
    for b in ("x", "y")
    for p in ("p1", "p2", "p3")
}


def test_the_pool_comes_first_and_every_condition_is_some_units_own():
    units = units_of(pairing(SCREEN))
    assert [u.scopes for u in units] == [(("pooled", "pooled"),), *((("context", t),) for t in "ABC")]
    assert sorted(c for u in units for c in u.own) == sorted(SCREEN)
    assert not units[0].own
    assert set(units[0].conditions) == set(SCREEN)
    assert sizes_of(units[1], pairing(SCREEN)) == dict.fromkeys(("p1", "p2", "p3"), (20, 20))


def test_a_context_without_controls_is_part_of_the_pool_only():
    some = pairing(SCREEN, controls=[("A", "x"), ("B", "y")])
    assert [u.scopes[0][1] for u in units_of(some)] == ["pooled", "A", "B"]
    assert {c.cell_type for c in units_of(some)[0].own} == {"C"}
    bare = pairing(SCREEN, own={("A", "x"): np.arange(3)})
    assert [u.scopes[0][1] for u in units_of(bare)] == ["pooled", "A"]


def test_the_only_context_is_the_pool_unless_it_lacks_a_condition():
    one = {c: n for c, n in SCREEN.items() if c.cell_type == "A"}
    assert [u.scopes for u in units_of(pairing(one))] == [(("pooled", "pooled"), ("context", "A"))]
    partly = pairing(one, contexts={c: "A" for c in one if c.batch == "x"})
    assert [u.scopes for u in units_of(partly)] == [(("pooled", "pooled"),), (("context", "A"),)]
    assert [u.scopes for u in units_of(pairing(one, contexts={}))] == [(("pooled", "pooled"),)]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_parts_share_out_all_scopes_evenly(count):
    found = pairing(SCREEN)
    units = units_of(found)
    parts = [of_shard(units, found, (i, count)) for i in range(count)]
    assert sorted(u.scopes for part in parts for u in part) == sorted(u.scopes for u in units)
    if count == 2:
        work = [sum(len(u.conditions) * 10 for u in part) for part in parts]
        assert min(work) > 0


def test_chance_is_the_next_perturbation_of_the_group_else_of_the_context():
    others = [Condition("p1", "A", "y"), Condition("p3", "B", "x")]
    conditions = {Condition(p, "A", "x"): 5 for p in ("p1", "p2", "p9")} | dict.fromkeys(others, 5)
    partners = _partners(pairing(conditions))
    assert partners["p1", "A", "x"] == ("p2", "A", "x")
    assert partners["p9", "A", "x"] == ("p1", "A", "x")
    assert partners["p1", "A", "y"] == ("p2", "A", "x")
    assert ("p3", "B", "x") not in partners


def test_threads_do_all_work_and_hold_few_values_at_once():
    done, held, most = [], [0], [0]
    lock = threading.Lock()

    def work(i):
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
        time.sleep(0.002)
        with lock:
            held[0] -= 1
            done.append(i)

    with Workers(3) as workers:
        for i in range(40):
            workers.submit(lambda i=i: work(i), 1 << 24)
    assert sorted(done) == list(range(40))
    assert most[0] == 2, "two pieces of 2^24 values fill the room"


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_ends_the_work(threads):
    done = []

    def work(i):
        if i == 3:
            raise ValueError("the third")
        done.append(i)

    with pytest.raises(ValueError, match="the third"), Workers(threads) as workers:
        for i in range(1000):
            workers.submit(lambda i=i: work(i), 1)
    assert len(done) < 999


def test_an_error_of_the_reader_does_not_hang():
    with pytest.raises(KeyError), Workers(2) as workers:
        workers.submit(lambda: time.sleep(0.01), 1)
        raise KeyError("reader")


def test_as_many_threads_as_asked_for():
    assert (usable(3), usable(0)) == (3, 1)
    assert usable(None) >= 1
