"""A server of one file on this machine, which can misbehave as servers do."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Served:
    """The file, and how the server misbehaves.

    Attributes
    ----------
    content
        Its bytes; None: there is no such file.
    address
        Its URL.
    etag
        The version, or empty if the server names none.
    ranges
        Whether parts of the file are sent.
    breaks
        How many answers end after half of what they should send.
    status
        If set, every answer has this status, or the first of a list of them.
    asked
        Header ``Range`` of each request, empty where there was none.
    """

    content: bytes | None
    address: str = ""
    etag: str = '"first"'
    ranges: bool = True
    breaks: int = 0
    status: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(content: bytes) -> Iterator[Served]:
    """Serve a file while the block runs."""
    served = Served(content)
    handler = type("Handler", (_Handler,), {"served": served})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        served.address = f"http://127.0.0.1:{server.server_port}/file.h5ad"
        threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()
        try:
            yield served
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    served: Served
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        served = self.served
        served.asked.append(self.headers.get("Range") or "")
        self.close_connection = True
        if served.status or served.content is None:
            return self._refuse(served.status.pop(0) if served.status else 404)
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        same = self.headers.get("If-Range") == served.etag
        start = int(found[1]) if found and same and served.ranges else 0
        if start > len(served.content):
            return self._refuse(416)
        piece, total = served.content[start:], len(served.content)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if served.etag:
            self.send_header("ETag", served.etag)
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        if served.breaks:
            served.breaks -= 1
            piece = piece[: len(piece) // 2]
        self.wfile.write(piece)
        return None

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
