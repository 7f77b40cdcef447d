"""Sampling that is shared out: among processes, whose batches come in order, or among jobs, joined by `merge`."""

from __future__ import annotations

import contextlib
import logging
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.multiprocessing as mp

from perturbdiff.conditions.condition import LABELS, SET
from perturbdiff.io.input_file import InputFile
from perturbdiff.io.matrices import Block
from perturbdiff.io.opening import open_root
from perturbdiff.method import SOURCES
from perturbdiff.predictions import DEPTH, KIND, NAMED, PredictionWriter, format_of
from perturbdiff.runtime import job_shards
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track
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


_VALUES = 1 << 18  # read at once


def merge(parts: Sequence[Path], out: Path, *, force: bool = False) -> Path:
    """Join the parts that `sample` wrote with ``shard=(I, N)``.

    The file and its manifest equal those of a single run to the last byte. Cells are copied in pieces.

    Parameters
    ----------
    parts
        All N files, .h5ad or .zarr, in any order.
    out
        File to write, .h5ad or .zarr.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a file is not a part or is damaged, or if parts are missing, given twice or from different runs.
    """
    folder = format_of(Path(out)) == ".zarr"
    with job_shards.merging(
        parts, out, "sample", _is_part, unsharded={"shard": [0, 1]}, folder=folder, force=force
    ) as merge:
        if not merge.stage.skip:
            results = [record["results"] for record in merge.records]
            merge.stage.results |= {k: sum(int(part[k]) for part in results) for k in ("conditions", "cells")}
            _write(merge.stage.path, merge.parts, [int(part["cells"]) for part in results])
    return Path(out)


def _is_part(path: Path, manifest: Mapping[str, Any]) -> bool:
    return manifest["stage"] == "sample"


def _write(path: Path, parts: Sequence[Path], numbers: Sequence[int]) -> None:
    """Write the predicted cells of all parts, then the controls of all parts."""
    facts, genes, predicted = _heads(parts)
    names = {key: str(facts[key]) for key in ("method", "control", "dataset")}
    depth = float(facts["target_sum"])
    with (
        PredictionWriter(path, genes, target_sum=depth, facts=facts, predicted=predicted, **names) as writer,
        track("joining", 0) as work,
    ):
        for source in SOURCES:
            for part, number in zip(parts, numbers, strict=True):
                with _opened(part) as file:
                    rows = (0, number) if source == SOURCES[0] else (number, file.n_cells)
                    for block, obs in _pieces(file, *rows):
                        if (obs["source"] != source).any():
                            raise UserError(
                                f"{part}: does not have the {number} predicted cells that its manifest tells of, "
                                "then controls; make this part again"
                            )
                        writer.append(block.as_csr(len(genes)), obs)
                        work.advance(len(obs))


def _heads(parts: Sequence[Path]) -> tuple[dict[str, Any], list[str], np.ndarray | None]:
    """Return what the joined file declares, its genes and, with counts, which of them are predicted."""
    declared, genes, predicted = [], [], None
    for part in parts:
        with _opened(part) as file:
            declared.append(file.declared)
            genes.append(file.genes)
            if file.declared.get("scale") == "counts":
                predicted = file.gene_column("predicted")
        if genes[-1] != genes[0]:
            raise UserError(f"{part}: has other genes than {parts[0]}; make the parts again")
    whole = dict(declared[0])
    if "conditions_seen" in whole:
        whole["conditions_seen"] = sum(int(one["conditions_seen"]) for one in declared)
        first = [str(name) for one in declared for name in one.get("first_seen", ())][:NAMED]
        whole |= {"first_seen": first} if first else {}
    return whole, genes[0], predicted


@contextlib.contextmanager
def _opened(part: Path) -> Iterator[InputFile]:
    with contextlib.closing(InputFile(part, open_root(part), may_be_empty=True)) as file:
        if file.declared.get("kind") != KIND:
            raise UserError(
                f"{part}: cannot be read as predictions that 'perturbdiff sample' wrote; make this part again"
            )
        yield file


def _pieces(file: InputFile, start: int, stop: int) -> Iterator[tuple[Block, pd.DataFrame]]:
    """Yield the values and labels of rows ``start`` to ``stop``."""
    depth = [DEPTH] if file.declared.get("scale") == "counts" else []
    columns = {name: file.open_column(name) for name in (*LABELS, "source", "cell", SET, *depth)}
    for block in file.blocks(start, stop, _VALUES):
        yield block, pd.DataFrame({k: c.values(block.start, block.stop) for k, c in columns.items()})
