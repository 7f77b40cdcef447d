"""Sampling with several processes. Each computes every n-th batch, and the batches are returned in order."""

from __future__ import annotations

import contextlib
import logging
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

import torch
import torch.multiprocessing as mp

from perturbdiff.runtime.errors import UserError
from perturbdiff.sampling.condition_sampler import Cells, ConditionSampler, SetToDraw

Open = Callable[[str], ConditionSampler]
"""Function from a device to a sampler. It must be picklable, because each process calls it."""

_AHEAD = 2  # batches that a process may be ahead of the file, in addition to the one it computes


def drawn(opened: Open, batches: Sequence[list[SetToDraw]], devices: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells of ``batches``, in order, each batch computed by one process on its device.

    Parameters
    ----------
    opened
        Creates the sampler on a device.
    batches
        `ConditionSampler.batches`.
    devices
        Devices, one for each process.

    Raises
    ------
    UserError
        If a process raises it.
    RuntimeError
        If a process ended for another reason.
    """
    context = mp.get_context("spawn")
    threads = max(1, torch.get_num_threads() // len(devices))
    processes, connections = [], []
    try:
        for worker, device in enumerate(devices):
            receiver, sender = context.Pipe(duplex=False)
            share = batches[worker :: len(devices)]
            arguments = (sender, opened, share, device, threads)
            # Daemons end with this process, however it ends.
            process = context.Process(target=_process, args=arguments, daemon=True, name=f"sample-{worker}")
            process.start()
            sender.close()  # so that reading ends when the process ends
            processes.append(process)
            connections.append(receiver)
        yield from _in_order(connections, len(batches), devices)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()
        for connection in connections:
            connection.close()


def _in_order(connections: list[Connection], number: int, devices: Sequence[str]) -> Iterator[Cells]:
    """Yield batches 0, 1, … in order. Process k of n sends the batches whose number is k modulo n."""
    ready: list[deque[Cells]] = [deque() for _ in connections]
    owed = [len(range(worker, number, len(connections))) for worker in range(len(connections))]
    for batch in range(number):
        worker = batch % len(connections)
        while not ready[worker]:
            # A process that owes no batch has ended, so its closed pipe must not be read.
            hungry = [
                c for c, o, cells in zip(connections, owed, ready, strict=True) if o and len(cells) < _AHEAD
            ]
            for connection in wait(hungry):
                sender = connections.index(connection)  # type: ignore[arg-type]
                ready[sender].append(_received(connections[sender], devices[sender]))
                owed[sender] -= 1
        yield ready[worker].popleft()


def _received(connection: Connection, device: str) -> Cells:
    try:
        kind, what = connection.recv()
    except EOFError:
        raise RuntimeError(
            f"a sampling process on {device} ended without a message; was it killed because memory ran out?"
        ) from None
    if kind == "cells":
        return what
    raise (
        UserError(what) if kind == "user" else RuntimeError(f"a sampling process on {device} failed: {what}")
    )


def _process(
    connection: Connection, opened: Open, batches: Sequence[list[SetToDraw]], device: str, threads: int
) -> None:
    """Compute batches and send them; this runs in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process gets it too, and ends this one
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)  # the main process has logged it already
    _work(connection, opened, batches, device)


def _work(connection: Connection, opened: Open, batches: Sequence[list[SetToDraw]], device: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the main process no longer reads
        try:
            sampler = opened(device)
            for batch in batches:
                connection.send(("cells", sampler.draw(batch)))
        except UserError as error:
            connection.send(("user", str(error)))
        except BrokenPipeError:
            raise
        except Exception:  # noqa: BLE001 - the main process reports it
            connection.send(("failure", traceback.format_exc()))
