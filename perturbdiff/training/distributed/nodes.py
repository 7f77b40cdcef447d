"""The nodes of a run: the place of each, and the messages between their launchers."""

from __future__ import annotations

import json
import signal
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from perturbdiff.training.distributed.processes import START_SECONDS, meeting_name

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PAUSE = 0.01

GRACE = 15.0
"""Seconds that processes have to end by themselves after another one has failed."""


@dataclass(frozen=True)
class Place:
    """The place of this node's processes in the run.

    Attributes
    ----------
    processes
        Number of processes on each node.
    nodes, node
        Number of nodes, and the index of this one.
    address, port
        Where the first node's launcher listens; port 0 means any free port.
    """

    processes: int
    nodes: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int = 0


class Nodes:
    """Messages between the launchers of the nodes. On one node there are none.

    Parameters
    ----------
    store
        Store on the first node's launcher; None on one node.
    place
        The place of this node.
    """

    def __init__(self, store: Store | None, place: Place) -> None:
        self._store, self._place = store, place

    def name(self) -> str:
        """Return the run's name, which the first node makes up."""
        run = uuid.uuid4().hex
        if self._store is None:
            return run
        if self._place.node == 0:
            self._store.set("run", run)
        return self._store.get("run").decode()

    def failed(self) -> None:
        """Tell the other nodes that a process of this node failed."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set("failed", "1")

    def other_failed(self) -> bool:
        """Return whether another node reported a failure, or the first node is gone."""
        if self._store is None:
            return False
        try:
            return self._store.check(["failed"])
        except RuntimeError:
            return True

    def gather(self, codes: dict[int, int]) -> dict[int, int]:
        """Publish the exit codes of this node's processes, collect those of all nodes, and leave together.

        A node that does not answer counts as killed.
        """
        if self._store is None:
            return codes
        try:
            self._store.set(f"codes {self._place.node}", json.dumps(codes))
            collected = [self._collect(self._store, node) for node in range(self._place.nodes)]
            self._leave(self._store)
        except RuntimeError:  # the first node is gone, and the store with it
            return codes | {0: -signal.SIGKILL}
        return dict(item for node_codes in collected for item in node_codes.items())

    def _collect(self, store: Store, node: int) -> dict[int, int]:
        """Return the exit codes of a node's processes. If it does not answer, its first process counts as killed."""
        name = f"codes {node}"
        try:
            store.wait([name], timedelta(seconds=2 * GRACE))
        except RuntimeError:
            return {node * self._place.processes: -signal.SIGKILL}
        return {int(rank): code for rank, code in json.loads(store.get(name)).items()}

    def _leave(self, store: Store) -> None:
        """Exit on node 0 last, because it hosts the store. Nodes exit close together, because srun kills stragglers."""
        left, end = store.add("left", 1), time.monotonic() + GRACE
        while self._place.node == 0 and left < self._place.nodes and time.monotonic() < end:
            time.sleep(_PAUSE)
            left = store.add("left", 0)


def meet(place: Place) -> tuple[Store | None, Place]:
    """Return the store that connects several nodes, and the place with the port in use."""
    if place.nodes == 1:
        return None, place
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.distributed_c10d import PrefixStore

    store = TCPStore(
        place.address,
        place.port,
        is_master=place.node == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_SECONDS),
    )
    return PrefixStore(meeting_name("launch"), store), replace(place, port=store.port)
