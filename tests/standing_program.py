"""A `perturbdiff` that starts at once: a server has imported everything, and forks for each command that is typed.

It is for tests of many commands (pages of the manual, tasks of the workflow), whose time went into imports. The program
itself is a small script: it hands its words, folder, environment and streams to the server, passes signals on, and ends
as the command ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import forked

PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
code = int.from_bytes(server.recv(4), "little", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def standing(folder: Path) -> Iterator[Path]:
    """Yield ``folder``, in which there is the program for as long as the block lasts."""
    address = folder / "server"
    program = folder / "perturbdiff"
    program.write_text(PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdout is not None
        assert server.stdout.readline(), "the server of commands did not start"
        yield folder
        server.communicate(timeout=600)  # it ends when nobody holds its input


def serve(address: str) -> None:
    """Fork a process for each command until the end of the input."""
    forked.import_all()
    from perturbdiff.reporting.figures import svg

    svg.image = lambda figure: b"a picture"  # as in tests/conftest.py, for the time that it takes
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        print("ready", flush=True)
        while door in select.select([door, sys.stdin], [], [])[0]:
            client, _ = door.accept()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[
                    0
                ]:  # those that are done, so that their CPU time counts as ours
                    pass
            if os.fork() == 0:
                door.close()
                try:
                    _attend(client)
                finally:
                    os._exit(0)
            client.close()


def _attend(client: socket.socket) -> None:
    """Run the command of a client; what the client is sent, the command is sent."""
    _, streams, *_ = socket.recv_fds(client, 1, 3)
    told = b""
    while not told.endswith(b"\n"):
        told += client.recv(1 << 16)
    child = os.fork()
    if child == 0:
        client.close()
        forked.end_with(lambda: _be_command(*json.loads(told)), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([client, ended], [], [])[0]):
        assert client in ready
        if not (number := client.recv(1)):  # the client was killed
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return
        os.kill(child, number[0])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.sendall(code.to_bytes(4, "little", signed=True))


def _be_command(words: list[str], folder: str, environment: dict[str, str]) -> int:
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    if (
        "PD_LAUNCHER" in environment
    ):  # whom a process of a training must not outlive: here who attends to the client
        environment["PD_LAUNCHER"] = str(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another
    return forked.program(words)


if __name__ == "__main__":
    serve(sys.argv[1])
