"""A stand-in for the Hugging Face Hub on this machine: as much of its HTTP interface as push and pull use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

LARGE = 10_000
"""Files of more bytes are uploaded by themselves (LFS), as on the Hub."""
LICENCES = ("mit", "apache-2.0", "cc-by-4.0", "other", "unknown")


@dataclass
class Repository:
    """A repository with its states, the newest last: (commit, file contents by name)."""

    private: bool
    states: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a state; return its commit."""
        name = hashlib.sha1(f"{len(self.states)}{sorted(files)}".encode()).hexdigest()
        self.states.append((name, files))
        return name

    def state(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return a state by its commit, or the newest for ``main``."""
        if revision == "main":
            return self.states[-1]
        return next((state for state in self.states if state[0] == revision), None)


@dataclass
class Hub:
    """The content of the stand-in, and how it misbehaves.

    Attributes
    ----------
    address
        Its URL, for ``HF_ENDPOINT``.
    accounts
        Name of each account by its token.
    repositories
        By ``OWNER/NAME``.
    breaks
        Names of files of which only half is sent, and how many times.
    status
        If set, every answer has this status.
    sent
        Bytes sent by file name.
    """

    address: str = ""
    accounts: dict[str, str] = field(default_factory=dict)
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    status: int = 0
    sent: dict[str, int] = field(default_factory=dict)


@contextmanager
def serving(**accounts: str) -> Iterator[Hub]:
    """Run a stand-in while the block runs. ``accounts`` are tokens by name."""
    hub = Hub(accounts={token: name for name, token in accounts.items()})
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.status:
            return self._answer(self.hub.status, {"error": "out of order"})
        path = self.path.partition("?")[0]
        for pattern, answer in ROUTES:
            if found := re.fullmatch(pattern, path):
                return answer(self, *found.groups())
        return self._answer(404, {"error": "Not Found"})

    @property
    def account(self) -> str | None:
        return self.hub.accounts.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _repository(self, name: str, *, write: bool = False) -> Repository | None:
        """Return a repository that the account may see (or write), or answer why not."""
        found, owner = self.hub.repositories.get(name), name.split("/")[0]
        if found is None or (found.private and self.account != owner):
            self._answer(404 if self.account else 401, {"error": "Repository not found"}, "RepoNotFound")
            return None
        if write and self.account != owner:
            self._answer(403, {"error": "You may not write here"})
            return None
        return found

    def _answer(self, status: int, content: Any, code: str = "") -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def create(self) -> None:
        asked = json.loads(self.body)
        owner = asked.get("organization") or self.account
        if self.account is None:
            return self._answer(401, {"error": "Unauthorized"})
        name = f"{owner}/{asked['name']}"
        if name in self.hub.repositories:
            return self._answer(409, {"url": f"{self.hub.address}/{name}", "error": "exists"})
        if owner != self.account:
            return self._answer(403, {"error": "You may not create repositories there"})
        private = asked.get("private") or asked.get("visibility") == "private"
        made = self.hub.repositories[name] = Repository(bool(private))
        made.commit({".gitattributes": b""})
        return self._answer(200, {"url": f"{self.hub.address}/{name}", "name": name})

    def info(self, name: str, revision: str | None = None) -> None:
        if (found := self._repository(name)) is None:
            return None
        state = found.state(revision or "main")
        if state is None:
            return self._answer(404, {"error": "Invalid rev id"}, "RevisionNotFound")
        listed = [{"rfilename": file} for file in sorted(state[1])]
        facts = {"id": name, "modelId": name, "sha": state[0], "private": found.private, "siblings": listed}
        return self._answer(200, {**facts, "tags": [], "downloads": 0, "likes": 0})

    def validate(self) -> None:
        text = json.loads(self.body)["content"]
        front = re.match(r"---\n(.*?)\n---\n", text, re.S)
        facts = yaml.safe_load(front[1]) if front else {}
        if facts and facts.get("license") not in LICENCES:
            return self._answer(400, {"errors": [{"message": '"license" must be one of [...]'}]})
        return self._answer(200, {"errors": [], "warnings": [] if front else [{"message": "empty metadata"}]})

    def preupload(self, name: str, _: str) -> None:
        if self._repository(name, write=True) is not None:
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] > LARGE else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(self.body)["files"]
            ]
            self._answer(200, {"files": modes})

    def batch(self, name: str) -> None:
        if self._repository(name, write=True) is not None:
            asked = json.loads(self.body)["objects"]
            objects = [
                {
                    **one,
                    "actions": {
                        "upload": {"href": f"{self.hub.address}/upload/{one['oid']}?signature=secret"}
                    },
                }
                for one in asked
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.uploads[oid] = self.body
        self._answer(200, {})

    def commit(self, name: str, _: str) -> None:
        if (found := self._repository(name, write=True)) is None:
            return None
        files = dict(found.states[-1][1])
        for line in self.body.decode().splitlines():
            part = json.loads(line)
            key, value = part["key"], part["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        oid = found.commit(files)
        return self._answer(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{oid}", "commitOid": oid})

    def resolve(self, name: str, revision: str, file: str) -> None:
        if (found := self._repository(name)) is None:
            return None
        state = found.state(revision)
        if state is None or file not in state[1]:
            return self._answer(
                404, {"error": "Entry not found"}, "EntryNotFound" if state else "RevisionNotFound"
            )
        data = state[1][file]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", state[0])
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        piece = data[start:]
        if self.hub.breaks.get(file, 0):
            self.hub.breaks[file] -= 1
            piece = piece[: len(piece) // 2]
            self.close_connection = True
        self.hub.sent[file] = self.hub.sent.get(file, 0) + len(piece)
        self.wfile.write(piece)
        return None


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate),
    (rf"/api/models/{_NAME}", _Handler.info),
    (rf"/api/models/{_NAME}/revision/(.+)", _Handler.info),
    (rf"/api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    (rf"/api/models/{_NAME}/commit/(.+)", _Handler.commit),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/upload/(\w+)", _Handler.upload),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
)
